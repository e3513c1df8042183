"""The attempts of this node: their folders looked at, and the actions that `worker.reconcile` decides carried out.

Everything here may be repeated: a claim with the same token gets the same answer, a process set is killed once, a
folder removed once. Not for: deciding (reconcile), ranks (the supervisor), the network beyond the claim.
"""

from __future__ import annotations

import dataclasses
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from enum import StrEnum
from pathlib import Path
from typing import Final, Protocol

from gangline.protocol.launch import LaunchPlan, encode
from gangline.protocol.names import LAUNCH_FILE, SUPERVISOR_LOG, TOKEN_PREFIXES
from gangline.protocol.outcomes import Outcome
from worker.agent_log import log
from worker.api import ApiError, Conflict, NodeApi, Refused
from worker.credential import Credential
from worker.finish import FENCED
from worker.process_set import kill_marked
from worker.reconcile import (
    Action,
    FinishFenced,
    FinishLost,
    ForgetAttempt,
    KillProcessSet,
    ObservedAttempt,
    Phase,
    SpawnSupervisor,
    StartAttempt,
    SupervisorState,
)
from worker.state import (
    AttemptState,
    SharedFolder,
    StateError,
    current_boot_id,
    is_alive,
    marker,
    read_state,
    write_json,
    write_state,
)

ATTEMPTS_FOLDER: Final = "attempts"
PATIENCE_SECONDS: Final = 10.0
"""A process that was just started gets this long to write its identity before it counts as lost."""
NOT_FOUND: Final = "not_found"
"""Code of the service's own 404. One without it comes from something in between, and says nothing of the attempt."""


class Spawner(Protocol):
    """What starts supervisors (`worker.nursery.Nursery`)."""

    def spawn_supervisor(self, attempt_folder: Path) -> int:
        """Start the supervisor of the attempt in `attempt_folder`, detached from the agent; returns its pid. Raises
        OSError. Asked twice, the second supervisor ends at once."""
        ...


class Start(StrEnum):
    """What became of a request to start an attempt."""

    STARTED = "started"
    DUPLICATE = "duplicate"
    """It is here already, past its claim."""
    NOT_OURS = "not_ours"
    """The service says so: ended, stopped, another node's, or never heard of."""
    POSTPONED = "postponed"
    """No answer, or this node could not write; the next heartbeat tries again."""


class LocalAttempts:
    """The folder `<agent data>/attempts`. One thread only. `now` is monotonic seconds."""

    def __init__(
        self,
        *,
        data: Path,
        credential: Credential,
        incarnation: str,
        api: NodeApi,
        spawner: Spawner,
        shared_folder: SharedFolder | None = None,
    ) -> None:
        """Make the folder where it is missing."""
        self._root = data / ATTEMPTS_FOLDER
        self._root.mkdir(mode=0o700, exist_ok=True)
        self._credential = credential
        self._incarnation = incarnation
        self._api = api
        self._spawner = spawner
        self._shared_folder = shared_folder
        self._boot_id = current_boot_id()
        self.started = 0
        """Attempts claimed and handed to a supervisor since the agent's start."""
        self._unreadable: set[int] = set()
        self._spawned_at: dict[int, float] = {}
        self._finishers: dict[int, subprocess.Popen[bytes]] = {}
        self._finished_at: dict[int, float] = {}

    # --- Looking -----------------------------------------------------------------------------------------------------

    def observe(self, now: float) -> tuple[ObservedAttempt, ...]:
        """Every attempt folder, by attempt id."""
        attempts = tuple(self._observe_one(attempt_id, now) for attempt_id in sorted(self._attempt_ids()))
        present = {attempt.attempt_id for attempt in attempts}
        self._unreadable &= present
        for memory in (self._spawned_at, self._finished_at):
            for attempt_id in memory.keys() - present:
                del memory[attempt_id]
        return attempts

    def _attempt_ids(self) -> Iterator[int]:
        for entry in self._root.iterdir():
            if entry.name.isascii() and entry.name.isdecimal() and entry.is_dir():
                yield int(entry.name)

    def _observe_one(self, attempt_id: int, now: float) -> ObservedAttempt:
        try:
            state = read_state(self._folder(attempt_id))
        except (OSError, StateError) as error:
            # Its supervisor may be removing the folder right now: only what is still so at the next look counts.
            is_first_look = attempt_id not in self._unreadable
            self._unreadable.add(attempt_id)
            log("state_unreadable", attempt_id=attempt_id, error=error)
            supervisor = SupervisorState.STARTING if is_first_look else SupervisorState.NONE
            return ObservedAttempt(attempt_id=attempt_id, phase=Phase.UNREADABLE, supervisor=supervisor)
        return ObservedAttempt(
            attempt_id=attempt_id, phase=Phase(state.phase), supervisor=self._supervisor_state(state, now)
        )

    def _supervisor_state(self, state: AttemptState, now: float) -> SupervisorState:
        if self._is_finishing(state.attempt_id, now):
            return SupervisorState.STARTING
        if state.supervisor is None:
            spawned_at = self._spawned_at.get(state.attempt_id)
            is_recent = spawned_at is not None and now - spawned_at < PATIENCE_SECONDS
            return SupervisorState.STARTING if is_recent else SupervisorState.NONE
        if is_alive(state.supervisor):
            return SupervisorState.ALIVE
        return SupervisorState.DEAD if state.supervisor.boot_id == self._boot_id else SupervisorState.REBOOTED

    def _is_finishing(self, attempt_id: int, now: float) -> bool:
        """Whether a finishing process runs, or failed so short a time ago that another would fail the same way."""
        process = self._finishers.get(attempt_id)
        if process is not None:
            status = process.poll()
            if status is None:
                return True
            del self._finishers[attempt_id]
            self._finished_at[attempt_id] = now
            log("finish_ended", attempt_id=attempt_id, status=status)
        finished_at = self._finished_at.get(attempt_id)
        return finished_at is not None and now - finished_at < PATIENCE_SECONDS

    # --- Acting ------------------------------------------------------------------------------------------------------

    def apply(self, action: Action, now: float) -> None:
        """Carry out one action. What fails for want of disk or processes is logged; the next look decides again."""
        try:
            match action:
                case StartAttempt():
                    self.start(action.attempt_id, now)
                case SpawnSupervisor():
                    self._spawn(action.attempt_id, now)
                case FinishLost():
                    self._finish(action.attempt_id, Outcome.SUPERVISOR_LOST, action.message)
                case FinishFenced():
                    self._finish(action.attempt_id, FENCED, "not this node's any more")
                case KillProcessSet():
                    self._kill(action.attempt_id)
                case ForgetAttempt():
                    self._forget(action.attempt_id, "not this node's any more")
        except OSError as error:
            log("action_failed", action=type(action).__name__, attempt_id=action.attempt_id, error=error)

    def start(self, attempt_id: int, now: float) -> Start:
        """Claim an attempt and start its supervisor. Called for each hint and each heartbeat that names it.

        The token is on disk before the service hears of it. So when the answer is lost, or the agent dies right here,
        the same token asks again and gets the same answer.
        """
        folder = self._folder(attempt_id)
        try:
            state = self._state_to_claim(folder, attempt_id)
            if state is None:
                return Start.DUPLICATE
            plan = self._claim(state)
            if plan is None:
                return Start.NOT_OURS
            write_json(folder / LAUNCH_FILE, encode(plan))
            claimed = dataclasses.replace(
                state, node_rank=plan.node_rank, phase=Phase.CLAIMED.value, shared_folder=self._shared_folder
            )
            write_state(folder, claimed)
            log("claimed_attempt", attempt_id=attempt_id, job_id=plan.job_id, node_rank=plan.node_rank)
            self._spawn(attempt_id, now)
            self.started += 1
        except (ApiError, OSError) as error:
            log("start_postponed", attempt_id=attempt_id, error=error)
            return Start.POSTPONED
        return Start.STARTED

    def _state_to_claim(self, folder: Path, attempt_id: int) -> AttemptState | None:
        """The state file to claim with, made when there is none; None when the claim is already answered."""
        try:
            state = read_state(folder)
            return state if state.phase == Phase.CLAIMING else None
        except FileNotFoundError:
            state = AttemptState(
                attempt_id=attempt_id,
                node_rank=None,
                token=TOKEN_PREFIXES["attempt"] + secrets.token_urlsafe(32),
                pool_id=self._credential.pool_id,
                node_name=self._credential.node_name,
                server=self._credential.server,
                phase=Phase.CLAIMING.value,
            )
            folder.mkdir(mode=0o700, exist_ok=True)
            write_state(folder, state)
            return state
        except StateError as error:
            log("state_unreadable", attempt_id=attempt_id, error=error)
            return None  # reconcile decides about it

    def _claim(self, state: AttemptState) -> LaunchPlan | None:
        """The launch plan, or None when the attempt is not ours (its folder is then gone). Raises ApiError."""
        try:
            return self._api.claim(state.attempt_id, state.token, self._incarnation)
        except Conflict as error:
            self._forget(state.attempt_id, error.code)
        except Refused as error:
            if error.code != NOT_FOUND:
                raise
            self._forget(state.attempt_id, error.code)
        return None

    def _spawn(self, attempt_id: int, now: float) -> None:
        pid = self._spawner.spawn_supervisor(self._folder(attempt_id))
        self._spawned_at[attempt_id] = now
        log("spawned_supervisor", attempt_id=attempt_id, pid=pid)

    def _finish(self, attempt_id: int, outcome: str, message: str) -> None:
        folder = self._folder(attempt_id)
        with (folder / SUPERVISOR_LOG).open("ab") as output:
            self._finishers[attempt_id] = subprocess.Popen(
                [
                    *(sys.executable, "-P", "-m", "worker.supervisor", str(folder)),
                    *("--finish", outcome, message),
                ],
                cwd=self._root,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
            )
        pid = self._finishers[attempt_id].pid
        log("finishing_attempt", attempt_id=attempt_id, pid=pid, outcome=outcome, message=message)

    def _kill(self, attempt_id: int) -> None:
        mark = marker(self._credential.pool_id, self._credential.node_name, attempt_id)
        if num_killed := kill_marked(mark):
            log("killed_process_set", attempt_id=attempt_id, processes=num_killed)

    def _forget(self, attempt_id: int, why: str) -> None:
        try:
            shutil.rmtree(self._folder(attempt_id))
        except FileNotFoundError:
            return  # its supervisor was faster
        log("forgot_attempt", attempt_id=attempt_id, why=why)

    def _folder(self, attempt_id: int) -> Path:
        return self._root / str(attempt_id)
