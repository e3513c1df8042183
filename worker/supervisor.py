"""One process per attempt and node: starts the ranks, sees them end, ships what they write, reports.

It is detached from the agent, talks to the API by itself, and its main thread only decides and signals: sending
(`worker.courier`) and hearing (`worker.directives`) are threads, so that a slow server delays no stop.

Run by the nursery, or as `python -P -m worker.supervisor <attempt folder>`; with `--finish <outcome> <message>` it
finishes for a supervisor that died (`worker.finish`). Not for: claiming, heartbeats, choosing what runs.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Final

from gangline.protocol import names
from gangline.protocol.durations import exact_duration
from gangline.protocol.launch import Directive, LaunchPlan, NodeFailure, NodeReport, Rendezvous, StopOrder, encode
from gangline.protocol.outcomes import Outcome, StopIntent
from worker import attempt_folder as folders
from worker.agent_log import log
from worker.api import AttemptApi, Fenced
from worker.cgroup import AttemptCgroup, current_home
from worker.courier import Courier, DeliveredNotice, FencedNotice
from worker.directives import DirectiveWatcher, wait_seconds
from worker.endings import is_trainer
from worker.environment_check import find_program, spawn_failure
from worker.finish import FENCED, clean_up, finish_lost, own_identity
from worker.hang_watch import HangWatch
from worker.launcher import RankCommand, data_limit_bytes
from worker.mailbox import Mailbox
from worker.node_report import RankRun, exhausted_shared_memory, port_failure, rank_report
from worker.preparation import CannotStartError, Surroundings, needs_patience, prepare
from worker.process_set import ProcessSet, become_subreaper, describe
from worker.rank_judge import OPEN_LOOK_SECONDS, RankJudge
from worker.rendezvous import ReservedPort
from worker.shared_memory import SharedMemoryTrace
from worker.shipper import Shipper, streams_of
from worker.spawn import SpawnError, spawn
from worker.state import AttemptState, StateError, identify, read_state, write_json, write_state
from worker.stopping import Situation, Stopping, advance, decide_stop, next_deadline

KILL_ROUND_SECONDS: Final = 0.05
KILL_PATIENCE_SECONDS: Final = 20.0
"""A process that SIGKILL does not end in this time (it waits in the kernel) is reported as a leftover."""
WATCH_DELAY_SECONDS: Final = 0.2
"""The answer to `started` tells what the server wants at that moment, so the long-poll can wait this long. A job that
ends sooner needs none, and pools of very short jobs are spared its cost."""


class StopBeforeStartError(Exception):
    """The attempt is to stop, and no rank runs yet."""


class Supervisor:
    """Supervises one attempt on this node, from preparation to the accepted report."""

    def __init__(self, attempt_folder: Path, state: AttemptState, plan: LaunchPlan) -> None:
        self._folder = attempt_folder
        self._state = state
        self._plan = plan
        self._mailbox = Mailbox()
        self._shipper_api = self._api()
        shipper = Shipper(
            streams_of(attempt_folder, plan), attempt_folder / names.OFFSETS_FILE, self._shipper_api.put_stream
        )
        self._shipper = shipper
        self._courier = Courier(self._shipper_api, shipper, self._mailbox, gather_seconds=plan.gather_seconds)
        self._watcher = DirectiveWatcher(
            self._api(), self._mailbox, wait_seconds=wait_seconds(plan.disconnect_stop_seconds)
        )
        self._set = ProcessSet(_make_cgroup(state.marker, plan.memory_bytes))
        self._judge = RankJudge(attempt_folder, plan)
        self._hang_watch: HangWatch | None = None
        self._shared_memory = SharedMemoryTrace()
        self._record = folders.SupervisorRecord()
        self._runs: list[RankRun] = []
        self._port: ReservedPort | None = None
        self._begun_at = time.monotonic()
        self._launched_at: float | None = None
        self._order: StopOrder | None = None
        self._peers_rendezvous: Rendezvous | None = None
        self._is_fenced = False
        self._failure: NodeFailure | None = None
        self._hangs_after_result = False
        self._has_told_failure = False
        self._stopping: Stopping | None = None
        self._killed_at: float | None = None
        self._leftovers: tuple[str, ...] = ()

    def run(self) -> None:
        """Do all of it. Returns when the report was accepted or the attempt fenced, and the folder is removed."""
        become_subreaper()
        self._mailbox.watch_signals()
        try:
            commands = self._prepare()
            self._launch(commands)
        except CannotStartError as error:
            self._failure = error.failure
        except Fenced:
            self._is_fenced = True
        except StopBeforeStartError:
            pass
        self._courier.start()
        self._watch()
        self._free_shared_memory()
        if not self._is_fenced:
            self._report_end()
        self._clean_up()

    @property
    def has_launched(self) -> bool:
        """Whether a rank was started."""
        return bool(self._runs)

    def kill_ranks(self) -> None:
        """End the process set without grace or report, whatever state this object is in."""
        deadline = time.monotonic() + KILL_PATIENCE_SECONDS
        self._set.reap()
        while not self._set.is_empty() and time.monotonic() < deadline:
            self._set.kill_all()
            time.sleep(KILL_ROUND_SECONDS)
            self._set.reap()
        self._set.close()

    # --- Start -------------------------------------------------------------------------------------------------------

    def _prepare(self) -> tuple[RankCommand, ...]:
        plan = self._plan
        try:
            if needs_patience(plan, self._folder):
                self._watcher.start()
            scratch = folders.make_scratch_folder(plan)
            groups = tuple(str(group) for group in self._set.cgroup_folders)
            self._record = folders.SupervisorRecord(scratch_folder=str(scratch), cgroup_folders=groups)
            folders.write_record(self._folder, self._record)
            if plan.node_rank == 0:
                self._port = ReservedPort(plan.node_address)
                if plan.num_nodes > 1:
                    rendezvous = self._port.rendezvous
                    self._courier.send("rendezvous", lambda api: api.rendezvous(rendezvous))
            around = Surroundings(
                attempt_folder=self._folder,
                scratch_folder=scratch,
                deadline=self._begun_at + plan.start_timeout_seconds,
                download=self._api().download_bundle,
                wait=self._wait_unless_stopped,
                peers_rendezvous=lambda: self._peers_rendezvous,
                shared_folder=self._state.shared_folder,
            )
            commands = prepare(plan, around, None if self._port is None else self._port.rendezvous)
        except (OSError, ValueError) as error:
            raise CannotStartError(_preparation_failure(error, plan)) from error
        self._wait_unless_stopped(0.0)
        return commands

    def _wait_unless_stopped(self, seconds: float) -> None:
        self._mailbox.wait(seconds)
        self._read_messages()
        if self._is_fenced or self._order is not None:
            raise StopBeforeStartError

    def _launch(self, commands: tuple[RankCommand, ...]) -> None:
        for command in commands:
            try:
                run = self._spawn(command)
            except SpawnError as error:
                self._failure = spawn_failure(error.errno or 0, command.arguments[0], str(error), time.time())
            except ValueError as error:
                self._failure = NodeFailure(
                    outcome=Outcome.CONFIG_ERROR,
                    message=f"The job cannot be started: {error}.",
                    fix="Correct the arguments and `env:` in the job file.",
                    at=time.time(),
                )
            if self._failure is not None:
                return
            self._runs.append(run)
        self._launched_at = time.monotonic()
        if is_trainer(self._plan.run):
            self._hang_watch = HangWatch(self._folder, self._plan, self._launched_at)
        pids = {run.rank: run.pid for run in self._runs}
        self._courier.send("started", lambda api: api.started(pids, time.time()))
        log("started", attempt_id=self._plan.attempt_id, pids=",".join(str(pid) for pid in pids.values()))

    def _spawn(self, command: RankCommand) -> RankRun:
        program = find_program(command.arguments[0], command.environment["PATH"], command.working_folder)
        started_at = time.time()
        pid = spawn(
            program=str(program or command.arguments[0]),
            arguments=command.arguments,
            environment=command.environment,
            working_folder=command.working_folder,
            log_file=command.log_file,
            cgroup_folders=self._set.cgroup_folders,
            data_limit_bytes=None if self._set.limits_memory else data_limit_bytes(self._plan),
        )
        self._set.add()
        identity = identify(pid)
        started = folders.StartedRank(
            rank=command.rank,
            local_rank=command.local_rank,
            pid=pid,
            start_time=0 if identity is None else identity.start_time,
            started_at=started_at,
        )
        self._record = dataclasses.replace(self._record, ranks=(*self._record.ranks, started))
        folders.write_record(self._folder, self._record)
        return RankRun(rank=command.rank, local_rank=command.local_rank, pid=pid, started_at=started_at)

    # --- Watch -------------------------------------------------------------------------------------------------------

    def _watch(self) -> None:
        """Until the process set is empty (or holds only what cannot be killed): see, decide, signal, wait."""
        while True:
            self._reap()
            self._read_messages()
            if self._plan.num_nodes > 1 or not self._set.is_empty():
                self._tell_failure()
            if self._set.is_empty():
                return
            now = time.monotonic()
            self._look_for_hang(now)
            if not self._waits_for_stacks():
                self._stop_if_needed(now)
            if self._killed_at is not None and now - self._killed_at > KILL_PATIENCE_SECONDS:
                self._leftovers = tuple(describe(facts) for facts in self._set.members())
                return
            self._start_watcher(now)
            self._mailbox.wait(self._pause_seconds(now))

    def _reap(self) -> None:
        by_pid = {run.pid: run for run in self._runs if not run.has_ended}
        for pid, status in self._set.reap():
            run = by_pid.get(pid)
            if run is not None:
                run.status = status
                run.ended_at = time.time()
                run.reaped_at = time.monotonic()
                run.stopped_by_us = self._stopping is not None

    def _read_messages(self) -> None:
        for message in self._mailbox.drain():
            if isinstance(message, Directive):
                self._order = message.stop or self._order
                self._peers_rendezvous = message.rendezvous or self._peers_rendezvous
                self._take_limit(message.time_limit_seconds)
            elif isinstance(message, FencedNotice):
                self._is_fenced = True
            elif isinstance(message, Exception):
                raise message
        if self._mailbox.is_terminated and self._order is None:
            # Nobody of ours sends it: the machine goes down.
            self._order = StopOrder(intent=StopIntent.DRAIN, grace_seconds=self._plan.stop_grace_seconds)

    def _take_limit(self, seconds: float | None) -> None:
        """The job was given more time: its total from the start of the ranks on, by our own monotonic clock."""
        if seconds is not None and seconds != self._plan.time_limit_seconds and self._stopping is None:
            log("time_limit", attempt_id=self._plan.attempt_id, seconds=seconds)
            self._plan = dataclasses.replace(self._plan, time_limit_seconds=seconds)

    def _tell_failure(self) -> None:
        """Tell of the first failure at once, so that peers on other nodes are stopped while ours still end."""
        has_failed = self._failure is not None or self._judge.has_failure(self._runs)
        if not has_failed or self._has_told_failure or self._is_fenced:
            return
        self._has_told_failure = True
        report = self._report(is_final=False)
        self._courier.send("failing", lambda api: api.failing(dataclasses.replace(report, sent_at=time.time())))

    def _situation(self, now: float) -> Situation:
        answered = [self._begun_at, self._courier.answered_at, self._watcher.answered_at]
        return Situation(
            is_fenced=self._is_fenced,
            order=self._order,
            has_failed=self._failure is not None or self._judge.has_failure(self._runs),
            is_hung=self._failure is not None and self._failure.outcome == Outcome.HANG,
            is_over=self._hangs_after_result or all(run.has_ended for run in self._runs),
            running_seconds=0.0 if self._launched_at is None else now - self._launched_at,
            silent_seconds=now - max(at for at in answered if at is not None),
        )

    def _look_for_hang(self, now: float) -> None:
        watch = self._hang_watch
        if watch is None or self._stopping is not None:
            return
        if self._order is not None and self._order.intent == StopIntent.PEER_FAILURE:
            watch.join_peer(now, self._runs)
        failure = watch.tick(now, self._runs)
        if failure is None:
            return
        if self._judge.result is None:
            self._failure = failure
        else:
            self._hangs_after_result = True  # in its teardown: all is done, so nothing has failed

    def _waits_for_stacks(self) -> bool:
        """Whether a hang's stacks are on their way into the logs, and nothing more urgent wants the ranks to end."""
        is_capturing = self._hang_watch is not None and self._hang_watch.is_capturing and self._stopping is None
        is_ordered = self._order is not None and self._order.intent != StopIntent.PEER_FAILURE
        is_known = self._failure is not None or self._hangs_after_result
        return is_capturing and not (is_ordered or is_known or self._is_fenced)

    def _stop_if_needed(self, now: float) -> None:
        decision = decide_stop(self._situation(now), self._plan, self._stopping)
        if decision is not None:
            before = self._stopping
            self._stopping = advance(before, decision, now)
            if before is None or before.intent != self._stopping.intent:
                self._begin_stop(self._stopping)
        if self._stopping is not None and self._stopping.is_kill_due(now):
            self._kill(self._stopping, now)

    def _begin_stop(self, stopping: Stopping) -> None:
        members = self._set.members()
        log("stopping", intent=stopping.intent or "leftovers", processes=",".join(str(f.pid) for f in members))
        if stopping.intent is None:
            # Whatever wrapped them is gone, so nobody would pass a signal on.
            self._set.signal_all(signal.SIGTERM)
            self._shared_memory.look(facts.pid for facts in members)
            return
        if stopping.intent == StopIntent.TIME_LIMIT:
            limit = self._plan.time_limit_seconds
            assert limit is not None, "without a limit nothing stops for it"
            self._failure = NodeFailure(
                outcome=Outcome.TIME_LIMIT,
                message=f"It ran for its whole time limit of {exact_duration(limit)}.",
                fix="Raise resources.time, or save checkpoints and let new attempts go on from them: retry.max, and "
                "retry.on: [time_limit].",
                at=time.time(),
            )
        try:
            (self._folder / names.STOP_FILE).write_text(stopping.intent, encoding="utf-8")
        except OSError as error:
            log("stop_file_not_written", error=error)  # a full disk; the signal still comes
        self._set.signal_groups(signal.SIGTERM, [run.pid for run in self._runs])
        self._shared_memory.look(facts.pid for facts in members)

    def _kill(self, stopping: Stopping, now: float) -> None:
        """One round of SIGKILL to the whole set; rounds follow until it is empty."""
        if self._killed_at is None:
            self._killed_at = now
            self._shared_memory.look(self._set.pids())
            if stopping.intent is not None:
                self._note_killed()
        self._set.kill_all()

    def _note_killed(self) -> None:
        """Mark the ranks that the end of the grace cut off: themselves, or what they started (by session)."""
        sessions = {facts.session_id for facts in self._set.members()}
        cut_off = [run for run in self._runs if not run.has_ended or run.pid in sessions]
        for run in cut_off or self._runs:
            run.killed_after_grace = True

    def _start_watcher(self, now: float) -> None:
        if self._launched_at is not None and now - self._launched_at >= WATCH_DELAY_SECONDS:
            self._watcher.start()

    def _pause_seconds(self, now: float) -> float | None:
        if self._killed_at is not None:
            return KILL_ROUND_SECONDS
        deadlines = [next_deadline(self._plan, self._situation(now), self._stopping, now)]
        if self._launched_at is not None and not self._watcher.is_started:
            deadlines.append(self._launched_at + WATCH_DELAY_SECONDS)
        if self._hang_watch is not None and self._stopping is None:
            deadlines.append(self._hang_watch.due_at)
        if self._judge.is_waiting(self._runs):
            deadlines.append(now + OPEN_LOOK_SECONDS)
        known = [deadline for deadline in deadlines if deadline is not None]
        return max(0.0, min(known) - now) if known else None

    # --- End ---------------------------------------------------------------------------------------------------------

    def _report(self, *, is_final: bool) -> NodeReport:
        now = time.time()
        runs = self._runs if is_final else [run for run in self._runs if run.has_ended]
        is_gang = self._plan.world_size > 1 or self._plan.num_nodes > 1
        ranks = tuple(rank_report(run, self._folder, self._plan.run, is_gang=is_gang, now=now) for run in runs)
        port = None if self._port is None else self._port.rendezvous.port
        intent = None if self._stopping is None else self._stopping.intent
        if not self._runs and self._order is not None:
            intent = self._order.intent
        return NodeReport(
            ranks=ranks,
            failure=self._failure or port_failure(ranks, port, now) or self._folder_failure(now),
            stop_intent=intent,
            process_set_empty=is_final and not self._leftovers,
            leftovers=self._leftovers,
            oom_kills=self._set.oom_kills(),
            stream_sizes=self._shipper.sizes(),
            sent_at=now,
            result=self._judge.result,
            shared_memory_bytes=exhausted_shared_memory(ranks),
        )

    def _folder_failure(self, now: float) -> NodeFailure | None:
        """The attempt's folder was removed under us: whatever the ranks then did is not the user's doing."""
        if (self._folder / names.STATE_FILE).exists():
            return None
        message = f"the folder of attempt {self._plan.attempt_id} was removed while it ran"
        return NodeFailure(outcome=Outcome.SUPERVISOR_LOST, message=message, at=now)

    def _report_end(self) -> None:
        report = self._report(is_final=True)
        try:
            write_json(self._folder / names.REPORT_FILE, encode(report))
        except OSError as error:
            log("report_not_saved", error=error)  # a full disk: it is lost only if we die before it is accepted
        self._courier.finish(report)
        is_delivered = False
        while not is_delivered and not self._is_fenced:
            self._mailbox.wait(None)
            for message in self._mailbox.drain():
                if isinstance(message, Exception):
                    raise message
                is_delivered = is_delivered or isinstance(message, DeliveredNotice)
                self._is_fenced = self._is_fenced or isinstance(message, FencedNotice)
            self._reap()

    def _free_shared_memory(self) -> None:
        try:
            removed = self._shared_memory.clean()
        except OSError as error:
            log("shared_memory_not_freed", error=error)  # it takes memory, and hinders nothing else
            return
        if removed:
            log("shared_memory_freed", files=",".join(removed))

    def _clean_up(self) -> None:
        if self._port is not None:
            self._port.close()
        for folder in self._set.close():
            log("cgroup_not_removed", folder=folder)
        clean_up(self._folder, self._state, self._record)

    def _api(self) -> AttemptApi:
        return AttemptApi(self._state.server, self._state.token, self._plan.attempt_id, self._plan.node_rank)


def run_supervisor(attempt_folder: Path) -> int:
    """Supervise the attempt in `attempt_folder` to its end; the exit status of the process (0: reported or fenced).

    A second supervisor of an attempt does nothing; one that finds a predecessor's traces starts no rank again, but
    finishes for it.
    """
    folder = attempt_folder.resolve()
    os.chdir("/")
    try:
        lock = folders.lock(folder)
    except (folders.AlreadySupervisedError, FileNotFoundError) as error:
        log("not_supervised", error=error)
        return 3
    try:
        return _supervise(folder)
    finally:
        os.close(lock)


def run_finish(attempt_folder: Path, outcome: str, message: str) -> int:
    """End what is left of an attempt whose supervisor died, and report it; the exit status of the process."""
    folder = attempt_folder.resolve()
    os.chdir("/")
    try:
        lock = folders.lock(folder)
    except (folders.AlreadySupervisedError, FileNotFoundError) as error:
        log("not_finished", error=error)
        return 3
    try:
        finish_lost(folder, outcome, message)
    finally:
        os.close(lock)
    return 0


def _supervise(folder: Path) -> int:
    try:
        state = read_state(folder)
    except (FileNotFoundError, StateError) as error:
        log("state_unreadable", error=error)
        return 4
    if state.supervisor is not None:
        finish_lost(folder, Outcome.SUPERVISOR_LOST, "The process that supervised this attempt died.")
        return 0
    try:
        plan = folders.read_plan(folder)
    except (FileNotFoundError, ValueError) as error:
        finish_lost(folder, Outcome.LAUNCH_FAILED, f"The launch plan on the node cannot be read: {error}")
        return 0
    state = dataclasses.replace(state, node_rank=plan.node_rank, supervisor=own_identity(), phase="supervised")
    write_state(folder, state)
    supervisor = Supervisor(folder, state, plan)
    try:
        supervisor.run()
    except Exception as error:  # noqa: BLE001  # the last place to turn a defect of ours into an end that is reported
        traceback.print_exc()
        supervisor.kill_ranks()
        outcome = Outcome.SUPERVISOR_LOST if supervisor.has_launched else Outcome.LAUNCH_FAILED
        finish_lost(folder, outcome, f"The supervisor on node {plan.node_name} failed: {error!r}.")
    return 0


def _preparation_failure(error: Exception, plan: LaunchPlan) -> NodeFailure:
    """What the system refused is ours; a plan that cannot be meant is the job's."""
    if isinstance(error, OSError):
        outcome, fix = Outcome.LAUNCH_FAILED, "Look at the space and limits of the node; the attempt is repeated."
    else:
        outcome, fix = Outcome.CONFIG_ERROR, "Correct the job file and submit it again."
    message = f"Node {plan.node_name} could not prepare the attempt: {error}."
    return NodeFailure(outcome=outcome, message=message, fix=fix, at=time.time())


def _make_cgroup(mark: str, memory_bytes: int | None) -> AttemptCgroup | None:
    home = current_home()
    if home is None:
        return None
    try:
        return AttemptCgroup.create(home, mark, memory_bytes)
    except OSError as error:
        log("without_cgroup", error=error)  # the subreaper alone finds every descendant as well
        return None


def main(arguments: list[str]) -> int:
    """Command line: `<attempt folder> [--finish <outcome> <message>]`."""
    match arguments:
        case [folder]:
            return run_supervisor(Path(folder))
        case [folder, "--finish", outcome, message] if outcome == FENCED or outcome in set(Outcome):
            return run_finish(Path(folder), outcome, message)
    print("usage: python -P -m worker.supervisor <attempt folder> [--finish <outcome> <message>]", file=sys.stderr)  # noqa: T201  # a command line's own answer
    return 2


if __name__ == "__main__":
    status = main(sys.argv[1:])
    sys.stderr.flush()
    os._exit(status)  # a long-poll may still wait in its thread
