"""The agent against real HTTP, with real supervisors and ranks: what it starts, adopts, ends and leaves alone."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline.protocol.launch import AssignedGPU, encode
from gangline.protocol.names import LAUNCH_TASK, node_queue
from tests.integration.worker.agent_process import NODE_NAME, AgentProcess
from tests.integration.worker.fake_api import POOL_ID, FakeApi, FakeAttempt, a_plan
from tests.support.child import die_with_parent, end
from tests.support.processes import is_alive
from tests.support.redis import RedisServer
from worker.doorbell import ring
from worker.state import AttemptState, read_state, write_json, write_state

SAMPLE = Path(__file__).parents[2] / "unit" / "worker" / "samples" / "inventory-mixed.json"
UUID_1 = "GPU-8932f937-0a11-4a55-b0f4-6d1c7f2b1e07"
UUID_2 = "MIG-b2c4f9e0-52c3-5d6b-9a0a-8a7f0f4a1c11"


@pytest.fixture
def agent(tmp_path: Path, api: FakeApi) -> Iterator[AgentProcess]:
    process = AgentProcess(tmp_path, api)
    yield process
    process.close()


class HoldJob:
    """A job that appends a line to `started` and sleeps until it is released.

    The line comes from the program that goes on, not from the shell before it: a process that is becoming another
    program shows no environment for a while, and so no mark.
    """

    def __init__(self, folder: Path) -> None:
        self.started = folder / "started"
        self._release = folder / "release"
        hold = (
            'import os, sys, time\nwith open(sys.argv[1], "a") as file: file.write("x\\n")\n'
            "while not os.path.exists(sys.argv[2]): time.sleep(0.02)"
        )
        self.shell = f"exec {sys.executable} -S -c '{hold}' {self.started} {self._release}"

    def release(self) -> None:
        self._release.touch()

    def num_starts(self) -> int:
        return len(self.started.read_text().splitlines()) if self.started.exists() else 0


@pytest.fixture
def hold(tmp_path: Path) -> HoldJob:
    return HoldJob(tmp_path)


def start_hold_job(agent: AgentProcess, hold: HoldJob, attempt_id: int = 7) -> FakeAttempt:
    """Place a hold job and wait until its rank runs and is reported."""
    attempt = agent.api.place(a_plan(attempt_id, shell=hold.shell))
    agent.until(lambda: hold.num_starts() > 0 and attempt.state == "started", "the job never started")
    return attempt


def wait_for_end(agent: AgentProcess, attempt: FakeAttempt) -> dict[str, object]:
    """Wait for the final report and for the folder to be gone; returns the report."""
    agent.until(lambda: attempt.reports, "no final report")
    folder = agent.attempt_folder(attempt.plan.attempt_id)
    agent.until(lambda: not folder.exists(), "the attempt folder was left")
    return attempt.reports[0]


def exit_codes(report: dict[str, object]) -> list[object]:
    ranks = report["ranks"]
    assert isinstance(ranks, list)
    return [rank["exit_code"] for rank in ranks]


# --- Enrolment and heartbeat -----------------------------------------------------------------------------------------


def test_a_new_node_enrols_says_what_it_has_and_keeps_its_credential_private(agent: AgentProcess, api: FakeApi) -> None:
    agent.start()

    assert api.enrolled == [{"name": NODE_NAME, "address": "127.0.0.1"}]
    heartbeat = api.heartbeats[0]
    assert [gpu["uuid"] for gpu in heartbeat["inventory"]["gpus"]] == ["cpu-slot-0", "cpu-slot-1"]
    assert heartbeat["inventory"]["cpus"] == 2.0
    assert (heartbeat["attempts"], heartbeat["process_sets"], heartbeat["quarantined"]) == ([], [], {})
    assert (agent.data / "credential.json").stat().st_mode & 0o777 == 0o600
    assert agent.data.stat().st_mode & 0o777 == 0o700


def test_heartbeats_tell_how_much_each_slot_works(agent: AgentProcess, api: FakeApi) -> None:
    agent.start()
    busy = "while True: pass"
    slot = AssignedGPU(index=1, uuid="cpu-slot-1", kind="cpu_slot")
    attempt = api.place(a_plan(7, shell=f"exec {sys.executable} -S -c '{busy}'", gpus=(slot,)))

    def use() -> dict[int, float]:
        return {use["index"]: use["utilisation"] for use in api.heartbeats[-1]["gpu_use"]}

    def memory_bytes(index: int) -> int:
        return next(use["memory_bytes"] for use in api.heartbeats[-1]["gpu_use"] if use["index"] == index)

    # How large a share the others on this machine leave it is not the product's doing; a slot without work has none.
    agent.until(lambda: use().get(1, 0.0) > 0.05, f"no work is seen in {api.heartbeats[-1]}")
    assert use()[0] == 0.0
    agent.until(lambda: memory_bytes(1) > 2**20, "it is said to work without memory")
    api.stop(7)
    wait_for_end(agent, attempt)
    agent.until(lambda: use() == {0: 0.0, 1: 0.0}, "the slot is still said to work")


def test_a_restarted_agent_does_not_enrol_again_and_says_that_it_is_a_new_incarnation(
    agent: AgentProcess, api: FakeApi
) -> None:
    agent.start()
    assert agent.stop() == 0

    agent.start()

    assert len(api.enrolled) == 1
    assert len({heartbeat["incarnation"] for heartbeat in api.heartbeats}) == 2


def test_a_second_agent_on_one_folder_is_refused_with_the_fix(agent: AgentProcess) -> None:
    agent.start()

    second = subprocess.run(agent.command("--name", NODE_NAME), capture_output=True, text=True, timeout=60, check=False)

    assert second.returncode == 2
    assert "Another agent already runs on" in second.stderr
    assert "--data" in second.stderr


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--name", "node/1"], "cannot be named"),
        (["--name", NODE_NAME, "--slots", "-1"], "give --slots 0 or more"),
        (["--name", NODE_NAME, "--enrolment-token-file", "/nowhere"], "cannot be read"),
        (["--name", NODE_NAME, "--server", "nonsense"], "is no server URL"),
        (["--name", NODE_NAME, "--shared-folder", "/nowhere/shared"], "/nowhere/shared does not exist. Fix: mount it"),
        (["--name", NODE_NAME, "--shared-folder", "/proc/self"], "cannot be read and written by this account"),
    ],
)
def test_what_cannot_be_is_refused_in_one_line(agent: AgentProcess, options: list[str], sentence: str) -> None:
    refused = subprocess.run(agent.command(*options), capture_output=True, text=True, timeout=60, check=False)

    assert refused.returncode == 2
    assert sentence in refused.stderr
    assert refused.stderr.startswith("agent_refused ")
    assert refused.stderr.count("\n") == 1


def test_an_agent_with_a_shared_folder_tells_its_id_and_its_attempts_know_it(
    agent: AgentProcess, api: FakeApi, hold: HoldJob, tmp_path: Path
) -> None:
    shared = tmp_path / "shared"
    shared.mkdir()
    agent.start("--shared-folder", str(shared))
    folder_id = (shared / ".gangline-shared").read_text().strip()

    assert api.heartbeats[-1]["inventory"]["shared_folder_id"] == folder_id
    assert agent.status()["shared_folder"] == {"path": str(shared), "folder_id": folder_id}
    attempt = api.place(a_plan(7, shell=hold.shell))
    agent.until(lambda: attempt.state == "started", "not started")
    found = read_state(agent.attempt_folder(7)).shared_folder
    assert found is not None and (found.path, found.folder_id) == (str(shared), folder_id)
    hold.release()
    agent.until(lambda: attempt.state == "ended", "not ended")


def test_an_agent_without_a_shared_folder_says_so(agent: AgentProcess, api: FakeApi) -> None:
    agent.start()

    assert api.heartbeats[0]["inventory"]["shared_folder_id"] is None
    assert agent.status()["shared_folder"] is None


def test_a_wrong_enrolment_token_is_refused(agent: AgentProcess) -> None:
    agent.token_file.write_text("gle_wrong")

    refused = subprocess.run(agent.command(), capture_output=True, text=True, timeout=60, check=False)

    assert refused.returncode == 2
    assert "does not admit node" in refused.stderr
    assert "gle_wrong" not in refused.stderr


def test_a_folder_of_another_node_is_refused(agent: AgentProcess) -> None:
    agent.start()
    agent.stop()

    refused = subprocess.run(agent.command("--name", "node-2"), capture_output=True, text=True, timeout=60, check=False)

    assert refused.returncode == 2
    assert f"belongs to node '{NODE_NAME}'" in refused.stderr


# --- Starting --------------------------------------------------------------------------------------------------------


def test_an_attempt_named_by_the_heartbeat_runs_to_its_end(agent: AgentProcess, api: FakeApi) -> None:
    agent.start()

    attempt = api.place(a_plan(7, shell="echo hello; exit 3"))

    report = wait_for_end(agent, attempt)
    assert exit_codes(report) == [3]
    assert bytes(attempt.streams["log/0"]) == b"hello\n"
    assert attempt.claims == 1


def test_a_hint_starts_an_attempt_at_once_and_three_hints_start_it_once(
    agent: AgentProcess, api: FakeApi, hold: HoldJob
) -> None:
    api.interval_seconds = 60.0  # only the doorbell can be the reason
    api.launch_by_heartbeat = False
    agent.start()

    attempt = api.place(a_plan(7, shell=hold.shell))
    agent.ring(7, times=3)

    agent.until(lambda: agent.status()["hints"]["received"] == 3, "the hints never came")
    agent.until(lambda: attempt.state == "started", "the attempt never started")
    assert agent.status()["started_attempts"] == 1
    assert agent.status()["hints"]["duplicates"] == 2
    hold.release()
    agent.until(lambda: attempt.reports, "no final report")
    assert hold.num_starts() == 1
    assert attempt.claims == 1


def test_hints_that_are_none_are_dropped_and_those_of_others_leave_nothing(agent: AgentProcess, api: FakeApi) -> None:
    agent.start()
    bell = agent.status()["doorbell"]

    for message in (b"", b"launch", b"launch -1", b"launch 7x", b"launch 0", b"\xff" * 200, b"launch " + b"9" * 30):
        ring(bell, message)
    agent.ring(99)

    agent.until(lambda: agent.status()["hints"] == {"received": 8, "duplicates": 1, "dropped": 7}, "hints not counted")
    agent.until(lambda: "result=not_ours" in agent.log(), "the foreign hint was not refused")
    assert not agent.attempt_folder(99).exists()


@pytest.mark.parametrize("assigned", [[UUID_1], [UUID_2, UUID_1]])
def test_a_preset_subset_is_offered_and_a_job_sees_exactly_the_assigned_ids_in_order(
    agent: AgentProcess, api: FakeApi, assigned: list[str]
) -> None:
    """O-36: ids are handed on as they are, never counted or turned into numbers."""
    agent.start("--recorded-inventory", str(SAMPLE), CUDA_VISIBLE_DEVICES=f"MIG-b2c4,{UUID_1},3")

    offered = api.heartbeats[0]["inventory"]["gpus"]
    gpus = tuple(AssignedGPU(index=index, uuid=uuid) for index, uuid in enumerate(assigned))
    attempt = api.place(a_plan(7, shell="echo $CUDA_VISIBLE_DEVICES", gpus=gpus))

    assert [gpu["uuid"] for gpu in offered] == [UUID_2, UUID_1, "3"]
    wait_for_end(agent, attempt)
    assert attempt.streams["log/0"].decode().strip() == ",".join(assigned)


def test_a_claim_whose_answer_was_lost_is_made_again_with_the_same_token_and_runs_once(
    agent: AgentProcess, api: FakeApi, hold: HoldJob
) -> None:
    api.lost_claim_answers = 2
    agent.start()

    attempt = start_hold_job(agent, hold)

    assert attempt.claims == 3
    assert read_state(agent.attempt_folder(7)).token == attempt.token
    hold.release()
    wait_for_end(agent, attempt)
    assert hold.num_starts() == 1


def test_an_attempt_that_was_claimed_but_never_supervised_is_run_by_the_next_agent(
    agent: AgentProcess, api: FakeApi, hold: HoldJob
) -> None:
    # The agent was killed between the claim and the spawn.
    plan = a_plan(7, shell=hold.shell)
    attempt = api.place(plan)
    attempt.state, attempt.token = "claimed", "gla_before"
    folder = agent.attempt_folder(7)
    folder.mkdir(parents=True)
    state = AttemptState(
        attempt_id=7,
        node_rank=0,
        token="gla_before",
        pool_id=POOL_ID,
        node_name=NODE_NAME,
        server=api.url,
        phase="claimed",
    )
    write_state(folder, state)
    write_json(folder / "launch.json", encode(plan))

    agent.start()

    agent.until(lambda: attempt.state == "started", "the attempt was stranded")
    hold.release()
    wait_for_end(agent, attempt)
    assert hold.num_starts() == 1
    assert attempt.claims == 0


# --- Stopping, dying, coming back (O-03, O-27) ------------------------------------------------------------------------


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGKILL])
def test_a_job_goes_on_while_its_agent_is_gone_and_is_adopted_by_the_next(
    agent: AgentProcess, api: FakeApi, hold: HoldJob, number: signal.Signals
) -> None:
    agent.start()
    attempt = start_hold_job(agent, hold)
    ranks = agent.marked(7)
    supervisor = read_state(agent.attempt_folder(7)).supervisor

    agent.stop(number)

    assert ranks
    assert agent.marked(7) == ranks
    assert attempt.reports == []
    agent.start()
    agent.until(lambda: "adopted_attempt" in agent.log(), "not adopted")
    agent.until(lambda: api.heartbeats[-1]["attempts"] == [7], "not reported")
    assert api.heartbeats[-1]["process_sets"] == [7]
    assert agent.marked(7) == ranks
    assert read_state(agent.attempt_folder(7)).supervisor == supervisor
    hold.release()
    assert exit_codes(wait_for_end(agent, attempt)) == [0]
    assert hold.num_starts() == 1


def test_a_job_that_ends_while_its_agent_is_gone_is_reported_all_the_same(agent: AgentProcess, hold: HoldJob) -> None:
    agent.start()
    attempt = start_hold_job(agent, hold)
    agent.stop()

    hold.release()

    assert exit_codes(wait_for_end(agent, attempt)) == [0]


def test_a_killed_supervisor_is_finished_for_and_no_process_is_left(
    agent: AgentProcess, api: FakeApi, hold: HoldJob
) -> None:
    agent.start()
    attempt = start_hold_job(agent, hold)
    supervisor = read_state(agent.attempt_folder(7)).supervisor
    assert supervisor is not None

    os.kill(supervisor.pid, signal.SIGKILL)

    report = wait_for_end(agent, attempt)
    failure = report["failure"]
    assert isinstance(failure, dict)
    assert failure["outcome"] == "supervisor_lost"
    assert report["process_set_empty"] is True
    assert agent.marked(7) == []


def test_after_a_reboot_the_attempt_is_reported_lost_and_a_process_with_the_old_pid_lives_on(
    agent: AgentProcess, api: FakeApi, hold: HoldJob
) -> None:
    agent.start()
    attempt = start_hold_job(agent, hold)
    agent.stop()
    folder = agent.attempt_folder(7)
    state = read_state(folder)
    assert state.supervisor is not None
    os.kill(state.supervisor.pid, signal.SIGKILL)
    bystander = subprocess.Popen(["sleep", "600"], preexec_fn=die_with_parent())
    try:
        # The old boot's supervisor had by chance the pid of a process of this boot.
        reused = dataclasses.replace(state.supervisor, pid=bystander.pid, boot_id="another-boot")
        write_state(folder, dataclasses.replace(state, supervisor=reused))

        agent.start()

        report = wait_for_end(agent, attempt)
        failure = report["failure"]
        assert isinstance(failure, dict)
        assert failure["outcome"] == "supervisor_lost"
        assert "restarted" in failure["message"]
        assert is_alive(bystander.pid)
    finally:
        end(bystander)


# --- Ending what must not run ----------------------------------------------------------------------------------------


def test_ranks_whose_folder_was_wiped_are_killed_and_processes_that_only_look_like_them_live_on(
    agent: AgentProcess, api: FakeApi, hold: HoldJob
) -> None:
    """O-53: neither name nor arguments decide, and the mark must be exactly this pool's and node's."""
    agent.start()
    mark = f"{POOL_ID}/{NODE_NAME}/7"
    foreign_marks = [f"{POOL_ID}/node-2/7", f"other-pool/{NODE_NAME}/7", f"{POOL_ID}/{NODE_NAME}/", f"x{mark}"]
    wait = "import sys; sys.stdin.read()"
    foreign = [
        subprocess.Popen(
            [sys.executable, "-c", wait, "worker.supervisor", f"GANGLINE_ATTEMPT={mark}", "7"],
            stdin=subprocess.PIPE,
            preexec_fn=die_with_parent(),
            env={**os.environ, **({"GANGLINE_ATTEMPT": other} if other else {})},
        )
        for other in ["", *foreign_marks]
    ]
    try:
        start_hold_job(agent, hold)
        ranks = agent.marked(7)

        shutil.rmtree(agent.attempt_folder(7))

        agent.until(lambda: not agent.marked(7), "the ranks were left")
        agent.until(lambda: api.heartbeats[-1]["process_sets"] == [], "foreign processes are reported as ours")
        assert ranks
        assert [process.poll() for process in foreign] == [None] * len(foreign)
    finally:
        for process in foreign:
            end(process, first=signal.SIGKILL)


def test_a_fenced_attempt_is_killed_and_forgotten(agent: AgentProcess, api: FakeApi, hold: HoldJob) -> None:
    agent.start()
    attempt = start_hold_job(agent, hold)

    api.fence(7)

    agent.until(lambda: not agent.marked(7), "the ranks were left")
    agent.until(lambda: not agent.attempt_folder(7).exists(), "the folder was left")
    assert attempt.reports == []


def test_a_fenced_attempt_whose_supervisor_is_frozen_loses_its_ranks_all_the_same(
    agent: AgentProcess, api: FakeApi, hold: HoldJob
) -> None:
    agent.start()
    start_hold_job(agent, hold)
    supervisor = read_state(agent.attempt_folder(7)).supervisor
    assert supervisor is not None
    os.kill(supervisor.pid, signal.SIGSTOP)
    try:
        api.fence(7)

        agent.until(lambda: not agent.marked(7), "the ranks were left")
    finally:
        os.kill(supervisor.pid, signal.SIGCONT)
    agent.until(lambda: not agent.attempt_folder(7).exists(), "the folder was left")


def test_an_outage_of_the_service_leaves_jobs_untouched(agent: AgentProcess, api: FakeApi, hold: HoldJob) -> None:
    agent.start()
    attempt = start_hold_job(agent, hold)
    ranks = agent.marked(7)

    for status in (503, 401, 404):
        api.outage = status
        failed = agent.log().count("heartbeat_failed")
        agent.until(lambda failed=failed: agent.log().count("heartbeat_failed") > failed, "the outage went unnoticed")
    api.outage = None

    agent.until(lambda: "heartbeat_recovered" in agent.log(), "not recovered")
    assert agent.marked(7) == ranks
    hold.release()
    assert exit_codes(wait_for_end(agent, attempt)) == [0]


# --- The Celery child ------------------------------------------------------------------------------------------------


def send_hints(broker_url: str, *arguments: object) -> None:
    """Publish hints as the service's dispatcher does."""
    from celery import Celery

    app = Celery(broker=broker_url)
    app.conf.task_ignore_result = True
    for argument in arguments:
        app.send_task(LAUNCH_TASK, args=[argument], queue=node_queue(NODE_NAME), retry=False)
    app.close()


def celery_pid(agent: AgentProcess, *, other_than: int | None = None) -> int:
    """Pid of the running Celery child."""

    def current() -> int | None:
        pid = agent.status().get("celery_pid")
        return pid if pid is not None and pid != other_than and is_alive(pid) else None

    return int(agent.until(current, "no Celery child"))


@pytest.fixture
def quiet_api(api: FakeApi) -> FakeApi:
    """A service whose heartbeats start nothing and come seldom: only hints can."""
    api.interval_seconds = 60.0
    api.launch_by_heartbeat = False
    return api


def test_hints_reach_the_agent_through_a_real_broker_and_nonsense_is_dropped(
    agent: AgentProcess, quiet_api: FakeApi, redis_server: RedisServer, hold: HoldJob
) -> None:
    agent.start(GANGLINE_BROKER_URL=redis_server.url)
    attempt = quiet_api.place(a_plan(7, shell=hold.shell))

    send_hints(redis_server.url, "7", None, True, -7, 7.0, [7], 7, 7, 7)

    agent.until(lambda: attempt.state == "started", "the hint did not start the attempt")
    agent.until(lambda: agent.status()["hints"]["duplicates"] == 2, "duplicates not counted")
    agent.until(lambda: agent.log().count("dropped_hint task=gangline.launch") == 6, "nonsense not dropped")
    assert agent.status()["hints"] == {"received": 3, "duplicates": 2, "dropped": 0}
    hold.release()
    wait_for_end(agent, attempt)
    assert hold.num_starts() == 1


def test_a_message_that_is_no_json_ends_the_celery_child_and_the_next_hint_works(
    agent: AgentProcess, quiet_api: FakeApi, redis_server: RedisServer
) -> None:
    agent.start(GANGLINE_BROKER_URL=redis_server.url)
    first = celery_pid(agent)
    send_hints(redis_server.url, 99)
    agent.until(lambda: agent.status()["hints"]["received"] == 1, "the child does not listen")

    assert redis_server.command("LPUSH", node_queue(NODE_NAME), "poison").startswith(":")

    agent.until(lambda: not is_alive(first), "the poison did nothing")
    attempt = quiet_api.place(a_plan(7, shell="true"))
    send_hints(redis_server.url, 7)
    wait_for_end(agent, attempt)
    assert celery_pid(agent) != first


def test_the_celery_child_does_not_outlive_an_agent_that_was_killed(
    agent: AgentProcess, quiet_api: FakeApi, redis_server: RedisServer
) -> None:
    agent.start(GANGLINE_BROKER_URL=redis_server.url)
    child = celery_pid(agent)

    agent.stop(signal.SIGKILL)

    agent.until(lambda: not is_alive(child), "the Celery child lives on")


def test_the_broker_url_is_no_argument_of_any_process(
    agent: AgentProcess, quiet_api: FakeApi, redis_server: RedisServer
) -> None:
    agent.start(GANGLINE_BROKER_URL=redis_server.url)

    arguments = Path(f"/proc/{celery_pid(agent)}/cmdline").read_bytes()

    assert redis_server.url.encode() not in arguments
    assert redis_server.url not in agent.log()


def test_a_deep_data_folder_gets_a_short_doorbell_and_keeps_it(tmp_path: Path, api: FakeApi) -> None:
    deep = tmp_path / ("d" * 60) / ("e" * 60)
    deep.mkdir(parents=True)
    agent = AgentProcess(deep, api)
    try:
        agent.start()
        bell = Path(agent.status()["doorbell"])
        assert len(os.fsencode(bell)) <= 100
        agent.stop(signal.SIGKILL)
        agent.start()
        assert json.loads((agent.data / "status.json").read_text())["doorbell"] == str(bell)
        agent.ring(99)
        agent.until(lambda: agent.status()["hints"]["received"] == 1, "the bell does not ring")
        agent.stop()
        assert not bell.parent.exists()
    finally:
        agent.close()
