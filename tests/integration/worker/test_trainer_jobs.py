"""Recipes and entries under a real supervisor: the plan file, hangs, results, stops, memory. The ranks are a stand-in
for the trainer (`fake_trainer`) with the real pulse."""

from __future__ import annotations

import dataclasses
import os
import secrets
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gangline.protocol.launch import RunPlan, encode
from tests.integration.worker.fake_api import FakeApi, a_plan
from tests.integration.worker.supervised import Supervised
from tests.support.ci import cannot_run
from tests.support.wait import BUSY_SECONDS, wait_until
from trainer.plan.parallel_plan import RankLayout
from trainer.plan.training_plan import RunTarget, TrainingSpec, TrainSettings, plan_training, read_plan
from worker.cgroup import AttemptCgroup, current_home
from worker.nursery import Nursery
from worker.shared_folder import verify_shared_folder
from worker.state import SharedFolder, read_state, write_state

Supervise = Callable[..., Supervised]
Actions = list[list[Any]]
FLOOR = 1.0
"""Seconds that a phase may go without a move, in tests that wait for a hang."""
LONG = 60.0
FAKE_TRAINER = Path(__file__).with_name("fake_trainer.py")


@pytest.fixture
def supervise(tmp_path: Path, api: FakeApi, nursery: Nursery) -> Iterator[Supervise]:
    """Start the supervisor of an entry that plays `actions` on all ranks, or those of each rank."""
    started: list[Supervised] = []
    python = tmp_path / "python"
    python.write_text(f'#!/bin/sh\nexec {sys.executable} -P {FAKE_TRAINER} "$@"\n')
    python.chmod(0o755)

    def start(
        actions: Actions | dict[str, Actions],
        *,
        num_ranks: int = 1,
        is_started: bool = True,
        training: dict[str, Any] | None = None,
        **changes: Any,
    ) -> Supervised:
        args = actions if isinstance(actions, dict) else {"all": actions}
        values = {
            "run": RunPlan(kind="entry"),
            "python": str(python),
            "processes_per_node": num_ranks,
            "world_size": num_ranks,
            "training": training or a_training(args, num_ranks=changes.get("world_size", num_ranks)),
        }
        plan = dataclasses.replace(a_plan(len(started), **{**values, **changes}), pool_id=f"pool-{os.getpid()}")
        supervised = Supervised(tmp_path / "agent", api, plan, nursery)
        started.append(supervised)
        return supervised.start() if is_started else supervised

    yield start
    for supervised in started:
        supervised.close()


def a_training(args: dict[str, Any], *, num_ranks: int = 1, **changes: Any) -> dict[str, Any]:
    """A plan file as the service sends it: without a folder for checkpoints."""
    spec = TrainingSpec(run=RunTarget(entry="play:task", args=args), train=TrainSettings(steps=3, batch_size=16))
    plan = plan_training(spec, RankLayout(ranks_per_node=num_ranks))
    record = encode(dataclasses.replace(plan, checkpoint_subfolder="attempt-7", resume_from=(), **changes))
    return {**record, "is_checkpoint_root_shared": False}


def until_output(run: Supervised, data: bytes, rank: int = 0) -> None:
    wait_until(lambda: data in run.output(rank), BUSY_SECONDS, lambda: f"{run.output(rank)!r}; {run.log()}")


# --- Start -----------------------------------------------------------------------------------------------------------


def test_the_plan_file_holds_the_plan_and_this_nodes_folder_for_checkpoints(
    supervise: Supervise, tmp_path: Path
) -> None:
    go = tmp_path / "go"
    run = supervise([["say", "ready"], ["wait_for", str(go)]])
    until_output(run, b"ready")

    text = (run.folder / "plan.json").read_text()
    root = tmp_path / "agent" / "jobs" / str(run.plan.job_id) / "checkpoints"
    plan = read_plan(text)
    assert (plan.checkpoint_root, plan.is_checkpoint_root_shared) == (str(root), False)
    assert (plan.checkpoint_subfolder, plan.resume_from, plan.train.steps) == ("attempt-7", (), 3)
    assert (root / "attempt-7").is_dir()
    go.touch()
    assert run.report()["failure"] is None


def test_with_a_shared_folder_all_nodes_save_checkpoints_in_the_same_place(
    supervise: Supervise, api: FakeApi, tmp_path: Path
) -> None:
    run, shared = with_shared_folder(supervise, tmp_path)
    run.start()
    until_output(run, b"ready")

    plan = read_plan((run.folder / "plan.json").read_text())
    root = Path(shared.path) / "jobs" / f"{run.plan.pool_id}-{run.plan.job_id}" / "checkpoints"
    assert (plan.checkpoint_root, plan.is_checkpoint_root_shared) == (str(root), True)
    assert (root / "attempt-7").is_dir()
    api.stop(run.plan.attempt_id)
    assert run.report()["ranks"][0]["exit_code"] == 76


def test_a_shared_folder_that_is_not_mounted_any_more_is_not_written_to(supervise: Supervise, tmp_path: Path) -> None:
    run, shared = with_shared_folder(supervise, tmp_path)
    (Path(shared.path) / ".gangline-shared").unlink()

    report = run.start().report()

    assert report["failure"]["outcome"] == "launch_failed"
    assert "is not mounted" in report["failure"]["message"]
    assert list(Path(shared.path).iterdir()) == []


def with_shared_folder(supervise: Supervise, tmp_path: Path) -> tuple[Supervised, SharedFolder]:
    (tmp_path / "shared").mkdir()
    shared = verify_shared_folder(tmp_path / "shared")
    actions = [["say", "ready"], ["wait_for_stop"], ["end", 76]]
    training = {**a_training({"all": actions}), "is_checkpoint_root_shared": True}
    run = supervise([], training=training, is_started=False)
    write_state(run.folder, dataclasses.replace(read_state(run.folder), shared_folder=shared))
    return run, shared


def test_a_plan_that_counts_on_a_shared_folder_does_not_start_without_one(supervise: Supervise) -> None:
    failure = supervise([], training={**a_training({}), "is_checkpoint_root_shared": True}).report()["failure"]

    assert failure["outcome"] == "launch_failed"
    assert "has no shared folder" in failure["message"]


@pytest.mark.parametrize("training", [{"version": 99}, {**a_training({}), "version": 99}, a_training({}, num_ranks=2)])
def test_a_plan_that_cannot_be_read_or_run_is_a_config_error(supervise: Supervise, training: dict[str, Any]) -> None:
    run = supervise([], training=training)
    failure = run.report()["failure"]

    assert (failure["outcome"], run.attempt.pids) == ("config_error", {})


def test_a_missing_interpreter_of_an_entry_is_an_environment_error(supervise: Supervise) -> None:
    assert supervise([], python="python9.99").report()["failure"]["outcome"] == "environment_error"


# --- Hangs -----------------------------------------------------------------------------------------------------------


def test_a_rank_that_stops_moving_is_named_and_its_stack_is_in_its_log(supervise: Supervise) -> None:
    begun_at = time.monotonic()
    run = supervise(
        {
            "0": [["enter", "training", FLOOR], ["move", 20, 7], ["wait_still_for_stop"], ["end", 0]],
            "1": [["enter", "training", FLOOR], ["move", 19, 7], ["spin"]],
        },
        num_ranks=2,
    )
    report = run.report()

    failure = report["failure"]
    assert (failure["outcome"], failure["rank"], failure["moves"]) == ("hang", 1, 20)
    assert "in training at step 7; 1 s were allowed. Behind: rank 1." in failure["message"]
    assert failure["fix"].startswith(f"gang logs {run.plan.job_id} --rank 1 ")
    assert "raise train.hang_after" in failure["fix"], "it may only have been slow"
    assert b"fake_trainer.py" in run.output(1) and b"in spin" in run.output(1)
    assert b"in wait_still_for_stop" in run.output(0)
    assert all(rank["stopped_by_us"] for rank in report["ranks"])
    assert report["ranks"][1]["signal"] == "SIGKILL"
    assert [sent["failure"]["outcome"] for sent in run.attempt.failing] == ["hang"]
    assert time.monotonic() - begun_at < BUSY_SECONDS


def test_a_rank_that_is_stopped_is_named_though_others_moved_less(supervise: Supervise) -> None:
    run = supervise(
        {
            "0": [["enter", "training", FLOOR], ["move", 5], ["hang"]],
            "1": [["enter", "training", FLOOR], ["move", 9], ["stop_myself"]],
        },
        num_ranks=2,
    )
    report = run.report()

    assert (report["failure"]["outcome"], report["failure"]["rank"]) == ("hang", 1)
    assert "Behind: rank 1 (stopped by a signal)." in report["failure"]["message"]
    assert b"in hang" in run.output(0)
    assert run.marked() == []


def test_a_long_first_step_is_no_hang(supervise: Supervise, tmp_path: Path) -> None:
    """The other rank already trains; the floor of the one that compiles counts for both."""
    done = str(tmp_path / "done")
    run = supervise(
        {
            "0": [["enter", "training", 0.2], ["pause", 4.0], ["result", "succeeded"], ["touch", done]],
            "1": [["enter", "compiling", LONG], ["wait_for", done]],
        },
        num_ranks=2,
    )
    report = run.report()

    assert (report["failure"], report["result"]) == (None, "succeeded")


def test_slow_steps_are_no_hang(supervise: Supervise) -> None:
    steps = [["enter", "training", 0.2], ["move", 1, 1, 4.0], ["pause", 3.5], ["result", "succeeded"]]

    assert supervise(steps).report()["failure"] is None


def test_one_rank_that_moves_is_enough(supervise: Supervise, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = supervise(
        {
            "0": [["enter", "training", 4.0], ["say", "waits"], ["wait_for", str(go)], ["result", "succeeded"]],
            "1": [["enter", "training", 4.0], ["say", "moving"], ["keep_moving", str(go)]],
        },
        num_ranks=2,
    )
    until_output(run, b"waits")
    until_output(run, b"moving", rank=1)
    stand_still_seconds(7.0)
    go.touch()

    assert run.report()["failure"] is None


def stand_still_seconds(seconds: float) -> None:
    """What is watched here is that nothing happens, so there is nothing else to wait for."""
    deadline = time.monotonic() + seconds
    wait_until(lambda: time.monotonic() >= deadline, seconds + 5, "time stands still")


def test_time_in_which_the_supervisor_stood_still_is_no_hang(supervise: Supervise, tmp_path: Path) -> None:
    go = tmp_path / "go"
    run = supervise([["enter", "training", 10.0], ["say", "ready"], ["wait_for", str(go)], ["result", "succeeded"]])
    until_output(run, b"ready")
    assert run.pid is not None
    rank = run.attempt.pids[0]

    for pid in (run.pid, rank):  # as when the machine sleeps
        os.kill(pid, signal.SIGSTOP)
    stand_still_seconds(12.0)
    for pid in (run.pid, rank):
        os.kill(pid, signal.SIGCONT)
    stand_still_seconds(1.5)
    go.touch()

    assert run.report()["failure"] is None


def test_a_hang_ends_within_the_two_seconds_that_hung_ranks_get(supervise: Supervise) -> None:
    run = supervise([["enter", "training", FLOOR], ["spin"]], stop_grace_seconds=LONG)
    (rank,) = run.report()["ranks"]

    assert rank["ended_at"] - rank["started_at"] < LONG
    assert (rank["signal"], rank["killed_after_grace"]) == ("SIGKILL", True)


def test_a_peers_hang_is_ours_too_when_we_stood_still_as_long(supervise: Supervise, api: FakeApi) -> None:
    """The other node saw it first; the rank that is furthest behind may be here.

    It is ours from 12 s on. The supervisor notices the last move up to a second late, or later on a busy machine.
    """
    run = supervise([["enter", "training", 15.0], ["move", 6], ["say", "ready"], ["hang"]])
    until_output(run, b"ready")
    stand_still_seconds(14.5)
    api.stop(run.plan.attempt_id, "peer_failure", LONG)
    failure = run.report()["failure"]

    assert (failure["outcome"], failure["moves"]) == ("hang", 7)
    assert b"in hang" in run.output()


def test_a_stop_for_a_peer_that_failed_is_no_hang(supervise: Supervise, api: FakeApi) -> None:
    run = supervise([["enter", "training", LONG], ["say", "ready"], ["wait_still_for_stop"], ["end", 68]])
    until_output(run, b"ready")
    api.stop(run.plan.attempt_id, "peer_failure", LONG)
    report = run.report()

    assert (report["failure"], report["stop_intent"]) == (None, "peer_failure")


def test_a_cancel_does_not_wait_for_stacks(supervise: Supervise, api: FakeApi) -> None:
    run = supervise([["enter", "training", LONG], ["say", "ready"], ["spin"]])
    until_output(run, b"ready")
    asked_at = time.monotonic()
    api.stop(run.plan.attempt_id, "cancel", 0.2)
    report = run.report()

    assert (report["failure"], report["stop_intent"]) == (None, "cancel")
    assert time.monotonic() - asked_at < LONG


# --- How it ends -----------------------------------------------------------------------------------------------------


def test_a_rank_that_dies_in_teardown_after_the_result_has_not_failed(supervise: Supervise, tmp_path: Path) -> None:
    go = tmp_path / "go"
    died = tmp_path / "died"
    run = supervise(
        {
            "0": [["result", "succeeded"], ["touch", str(died)], ["wait_for", str(go)]],
            "1": [["wait_for", str(died)], ["say", "dies"], ["abort"]],
        },
        num_ranks=2,
    )
    until_output(run, b"dies", rank=1)
    wait_until(lambda: len(run.marked()) == 1, BUSY_SECONDS, "rank 1 did not end")
    stand_still_seconds(0.5)
    go.touch()
    report = run.report()

    assert (report["result"], report["stop_intent"], run.attempt.failing) == ("succeeded", None, [])
    assert [(rank["exit_code"], rank["signal"]) for rank in report["ranks"]] == [(0, None), (None, "SIGABRT")]
    assert report["ranks"][0]["stopped_by_us"] is False


def test_a_rank_that_dies_without_a_result_has_failed(supervise: Supervise) -> None:
    run = supervise({"0": [["wait_for_stop"], ["end", 0]], "1": [["abort"]]}, num_ranks=2)
    report = run.report()

    assert (report["result"], report["stop_intent"]) == (None, "peer_failure")


def test_ranks_that_made_room_end_one_after_another(supervise: Supervise, api: FakeApi, tmp_path: Path) -> None:
    """Only one is asked, as when the other node's supervisor was: the rest agree on a step, and the first to end is
    not a failure that ends the others in the middle of their last write."""
    ready, ended = str(tmp_path / "ready"), str(tmp_path / "ended")
    run = supervise(
        {
            "0": [["touch", ready], ["wait_for", ended], ["pause", 1.0], ["result", "preempted"], ["end", 75]],
            "1": [["wait_for", ready], ["touch", ended], ["end", 75]],
        },
        num_ranks=2,
    )
    report = run.report()

    assert (report["result"], report["stop_intent"], run.attempt.failing) == ("preempted", None, [])
    assert [(rank["exit_code"], rank["stopped_by_us"]) for rank in report["ranks"]] == [(75, False), (75, False)]


def test_a_preempted_training_has_its_grace_and_its_result(supervise: Supervise, api: FakeApi) -> None:
    run = supervise(
        [["say", "ready"], ["wait_for_stop"], ["event", "checkpoint"], ["result", "preempted"], ["end", 75]]
    )
    until_output(run, b"ready")
    api.stop(run.plan.attempt_id, "preempt", LONG)
    report = run.report()

    assert (report["result"], report["stop_intent"], report["failure"]) == ("preempted", "preempt", None)
    assert report["ranks"][0]["exit_code"] == 75
    assert b'"checkpoint"' in bytes(run.attempt.streams["events/0"])


def test_75_without_any_result_is_a_failure_after_all(supervise: Supervise) -> None:
    run = supervise({"0": [["wait_for_stop"], ["end", 0]], "1": [["end", 75]]}, num_ranks=2)

    assert run.report()["stop_intent"] == "peer_failure"


@pytest.mark.parametrize(("code", "is_peer_loss"), [(68, True), (65, False)])
def test_a_lost_peer_is_told_by_the_exit_code_whatever_the_log_says(
    supervise: Supervise, tmp_path: Path, code: int, is_peer_loss: bool
) -> None:
    text = 'Traceback (most recent call last):\n  File "x.py", line 1\nRuntimeError: gloo: Connection closed by peer\n'
    ready = str(tmp_path / "ready")
    run = supervise(
        {
            "0": [["touch", ready], ["wait_for_stop"], ["end", code]],
            "1": [["say", text if code == 65 else "no word of it"], ["wait_for", ready], ["end", code]],
        },
        num_ranks=2,
        stop_grace_seconds=LONG,
    )

    assert [rank["is_peer_loss"] for rank in run.report()["ranks"]] == [is_peer_loss, is_peer_loss]


def test_i10_the_death_of_a_supervisor_ends_a_training_as_it_does_a_script(supervise: Supervise) -> None:
    run = supervise({"all": [["enter", "training", LONG], ["say", "ready"], ["spin"]]}, num_ranks=2)
    until_output(run, b"ready")
    until_output(run, b"ready", rank=1)
    assert run.pid is not None

    os.kill(run.pid, signal.SIGKILL)
    wait_until(lambda: not run.is_running(), BUSY_SECONDS, "the supervisor did not die")
    command = [sys.executable, "-P", "-m", "worker.supervisor", str(run.folder)]
    subprocess.run(
        [*command, "--finish", "supervisor_lost", "It died."], timeout=BUSY_SECONDS, capture_output=True, check=True
    )
    report = run.report()

    assert (report["failure"]["outcome"], report["result"]) == ("supervisor_lost", None)
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert run.marked() == []


# --- Memory ----------------------------------------------------------------------------------------------------------


def can_limit_memory() -> bool:
    """Whether a cgroup here holds processes to their memory; found out by making one."""
    home = current_home()
    if home is None:
        return False
    try:
        group = AttemptCgroup.create(home, f"test/{os.getpid()}/{secrets.randbelow(1 << 30)}", 64 << 20)
    except OSError:
        return False
    group.remove()
    return group.limits_memory


def test_more_memory_than_asked_for_is_an_out_of_memory_kill_or_an_error(supervise: Supervise) -> None:
    run = supervise([["say", "ready"], ["allocate", 512 << 20], ["say", "survived"]], memory_bytes=256 << 20)
    report = run.report()

    (rank,) = report["ranks"]
    assert b"survived" not in run.output()
    if can_limit_memory():
        assert (rank["signal"], rank["stopped_by_us"]) == ("SIGKILL", False)
        assert report["oom_kills"] >= 1
    else:
        assert (rank["exit_code"], report["oom_kills"]) == (66, 0)


def test_memory_within_the_limit_is_had(supervise: Supervise) -> None:
    run = supervise([["allocate", 128 << 20], ["result", "succeeded"]], memory_bytes=512 << 20)

    assert (run.report()["result"], run.output()) == ("succeeded", b"allocated 128 MiB\n")


def test_o12_a_rank_that_dies_of_a_bus_error_names_shared_memory_and_its_size(supervise: Supervise) -> None:
    report = supervise([["bus_error"]]).report()

    facts = os.statvfs("/dev/shm")
    error = report["ranks"][0]["error"]
    assert report["shared_memory_bytes"] == facts.f_blocks * facts.f_frsize
    assert error["type"] == "BusError"
    assert "shared memory (/dev/shm, " in error["message"] and "--shm-size" in error["message"]


def test_o12_a_full_shared_memory_is_named_with_its_size_and_the_next_attempt_starts_clean(
    supervise: Supervise, tmp_path: Path
) -> None:
    """4 MiB of it, a loader worker with batches of 16 MiB; then a second job in the same place."""
    if os.geteuid() != 0 or shutil.which("unshare") is None:
        cannot_run("mount namespaces need root and `unshare`", "Run as root, with util-linux installed.")
    seen = tmp_path / "seen"
    first = supervise([["load_by_worker", 16 << 20]], is_started=False)
    second = supervise([["load_by_worker", 2 << 20], ["result", "succeeded"]], is_started=False)
    supervisor = f"{sys.executable} -P -m worker.supervisor"
    script = (
        f"mount -t tmpfs -o size=4m tmpfs /dev/shm && {supervisor} {first.folder}; "
        f"ls -A /dev/shm > {seen}; {supervisor} {second.folder}"
    )
    subprocess.run(["unshare", "--mount", "sh", "-c", script], timeout=120, capture_output=True, check=True)
    report = first.report()

    error = report["ranks"][0]["error"]
    assert report["shared_memory_bytes"] == 4 << 20
    assert "Bus error" in error["message"] and "/dev/shm, 4 MiB on this node" in error["message"]
    assert seen.read_text() == ""
    assert second.report()["result"] == "succeeded"


def test_o12_nothing_of_an_attempt_stays_in_shared_memory_and_nothing_of_others_goes(supervise: Supervise) -> None:
    others = Path("/dev/shm", f"torch_{os.getpid()}_{secrets.token_hex(4)}")
    own_choice = Path("/dev/shm", f"gl-test-cache-{secrets.token_hex(4)}")
    psm = Path("/dev/shm", f"psm_{secrets.token_hex(8)}")
    others.touch()
    try:
        run = supervise(
            [
                *(["leave_shared_memory", name] for name in ("torch_{pid}_1", own_choice.name)),
                *(["use_shared_memory", psm.name], ["say", "ready"], ["spin"]),
            ],
            stop_grace_seconds=0.3,
        )
        until_output(run, b"ready\n")
        rank = run.attempt.pids[0]
        assert psm.exists() and Path("/dev/shm", f"torch_{rank}_1").exists()
        run.api.stop(run.plan.attempt_id, "cancel", 0.3)
        run.report()

        assert not psm.exists() and not Path("/dev/shm", f"torch_{rank}_1").exists()
        assert others.exists()
        assert own_choice.exists(), "a file that the job named itself is its own"
    finally:
        others.unlink()
        own_choice.unlink(missing_ok=True)
        psm.unlink(missing_ok=True)
