"""Parts of a training job on a node: plan file, shared folder, shared memory, limits on memory."""

from __future__ import annotations

import dataclasses
import json
import mmap
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest

from gangline.protocol.launch import AssignedGPU, LaunchPlan, RunPlan, encode
from tests.unit.worker.test_launcher import a_plan, commands
from trainer.plan.parallel_plan import RankLayout
from trainer.plan.problem import PlanError
from trainer.plan.training_plan import RunTarget, TrainingSpec, TrainSettings, plan_training, read_plan
from worker.credential import AgentError
from worker.launcher import data_limit_bytes
from worker.plan_file import CheckpointRoot, NoSharedFolderError, checkpoint_root, fill_plan, lay_out_training
from worker.shared_folder import ID_FILE, SharedFolderError, check_shared_folder, verify_shared_folder
from worker.shared_memory import SharedMemoryTrace, files_in_use, is_left_over, remove_left_over
from worker.spawn import spawn
from worker.state import SharedFolder, process_facts

SHARED = SharedFolder(path="/mnt/all", folder_id="x")
NOT_SHARED = {"is_checkpoint_root_shared": False}
ROOT = CheckpointRoot(folder=Path("/data/jobs/12/checkpoints"), is_shared=False)


def a_training(**changes: Any) -> dict[str, Any]:
    spec = TrainingSpec(run=RunTarget(entry="a.b:c"), train=TrainSettings(steps=1, batch_size=8))
    plan = plan_training(spec, RankLayout(ranks_per_node=4))
    return {**encode(plan), "checkpoint_subfolder": "attempt-17", "resume_from": [], **changes}


def a_recipe(**changes: Any) -> LaunchPlan:
    values = {"run": RunPlan(kind="recipe"), "training": a_training(**NOT_SHARED)}
    return a_plan(**{**values, **changes})


# --- Plan file -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["recipe", "entry"])
def test_each_rank_runs_the_trainer_on_the_plan_file(kind: str) -> None:
    first, second = commands(a_recipe(run=RunPlan(kind=kind), env={"PYTHONPATH": "/mine"}))

    assert first.arguments == ("python3", "-P", "-m", "trainer", "run", "/data/attempts/17/plan.json")
    assert first.working_folder == Path("/data/attempts/17/code")
    expected = {
        "RANK": "3",
        "LOCAL_RANK": "1",
        "GANGLINE_PULSE_FILE": "/data/attempts/17/pulses/rank-3",
        "GANGLINE_RESULT_FILE": "/data/attempts/17/result.json",
        "GANGLINE_OFFSETS_FILE": "/data/attempts/17/offsets.json",
        "PYTHONPATH": "/data/python:/mine",  # a trainer.py of the job's own is not meant
    }
    assert {name: second.environment[name] for name in expected} == expected


def test_the_service_says_whether_checkpoints_lie_in_the_shared_folder() -> None:
    shared = a_recipe(training=a_training(is_checkpoint_root_shared=True))
    unsaid = a_training()
    del unsaid["is_checkpoint_root_shared"]

    assert checkpoint_root(shared, Path("/data"), SHARED) == CheckpointRoot(
        folder=Path("/mnt/all/jobs/pool-12/checkpoints"), is_shared=True
    )
    for training in (a_training(**NOT_SHARED), unsaid):
        assert checkpoint_root(a_recipe(training=training), Path("/data"), SHARED) == ROOT
    with pytest.raises(NoSharedFolderError, match="node-2 has no shared folder"):
        checkpoint_root(shared, Path("/data"), None)


def test_a_node_with_another_shared_folder_than_the_plan_counts_on_does_not_start() -> None:
    shared = {"training": a_training(is_checkpoint_root_shared=True)}
    assert checkpoint_root(a_recipe(**shared, shared_folder_id="x"), Path("/data"), SHARED).is_shared
    with pytest.raises(NoSharedFolderError, match=r"has the shared folder x \(/mnt/all\), and the plan counts on y"):
        checkpoint_root(a_recipe(**shared, shared_folder_id="y"), Path("/data"), SHARED)


def test_the_plan_file_is_the_services_plan_with_this_nodes_folder(tmp_path: Path) -> None:
    root = CheckpointRoot(folder=tmp_path / "jobs" / "12" / "checkpoints", is_shared=False)
    plan = fill_plan(a_training(), 4, root)
    lay_out_training(tmp_path, plan)

    sent = read_plan((tmp_path / "plan.json").read_text())
    assert sent == plan
    assert dataclasses.replace(sent, checkpoint_root=None) == read_plan(json.dumps(a_training(**NOT_SHARED)))
    assert (root.folder / "attempt-17").is_dir()


@pytest.mark.parametrize("training", [None, {}, a_training(version=9), a_training(train={"steps": 0})])
def test_a_plan_that_cannot_be_read_is_refused(training: dict[str, Any] | None) -> None:
    with pytest.raises(PlanError):
        fill_plan(training, 4, ROOT)


def test_a_plan_for_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(PlanError, match="2 were started"):
        fill_plan(a_training(), 2, ROOT)


# --- Shared folder ---------------------------------------------------------------------------------------------------


def test_agents_that_see_the_same_folder_read_the_same_id(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "other").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "one")
    found: list[SharedFolder] = []
    threads = [threading.Thread(target=lambda: found.append(verify_shared_folder(tmp_path / "one"))) for _ in range(16)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)

    assert len(found) == 16
    assert {one.folder_id for one in found} == {verify_shared_folder(tmp_path / "link").folder_id}
    assert verify_shared_folder(tmp_path / "other").folder_id not in {one.folder_id for one in found}
    assert [path.name for path in (tmp_path / "one").iterdir()] == [ID_FILE]


def test_a_shared_folder_that_is_not_there_is_refused_with_the_fix(tmp_path: Path) -> None:
    with pytest.raises(AgentError, match=r"does not exist. Fix: mount it"):
        verify_shared_folder(tmp_path / "none")
    (tmp_path / "file").touch()
    with pytest.raises(AgentError, match="does not exist"):
        verify_shared_folder(tmp_path / "file")


def test_a_shared_folder_that_cannot_be_written_is_refused_with_the_fix() -> None:
    with pytest.raises(AgentError, match=r"cannot be read and written .* Fix: give"):
        verify_shared_folder(Path("/proc/self"))  # read-only for root as well


def test_another_folder_under_the_same_name_is_noticed(tmp_path: Path) -> None:
    shared = verify_shared_folder(tmp_path)
    check_shared_folder(shared)

    (tmp_path / ID_FILE).write_text("0" * 32)
    with pytest.raises(SharedFolderError, match="is another one"):
        check_shared_folder(shared)
    (tmp_path / ID_FILE).unlink()
    with pytest.raises(SharedFolderError, match="is not mounted"):
        check_shared_folder(shared)


# --- Shared memory ---------------------------------------------------------------------------------------------------

NAMES = {
    "torch_7_abc_0": True,
    "torch_8_abc_0": False,
    "__KMP_REGISTERED_LIB_7_0": True,
    "psm_12ab": True,
    "psm_34cd": False,
    "my-data": False,
    "torch_cache": False,
}


@pytest.mark.parametrize("name", NAMES)
def test_a_library_s_file_is_left_over_when_its_process_is_gone_or_was_ours(name: str) -> None:
    used = frozenset({"psm_12ab", "my-data", "torch_8_abc_0", "torch_cache"})

    assert is_left_over(name, used=used, is_alive=lambda pid: pid == 8) is NAMES[name]


@pytest.fixture
def ended_pid() -> int:
    process = subprocess.Popen([sys.executable, "-S", "-c", ""])
    process.wait()
    return process.pid


def test_what_somebody_uses_or_made_before_is_not_removed(tmp_path: Path, ended_pid: int) -> None:
    unused, used, old = (tmp_path / f"torch_{ended_pid}_{name}" for name in ("unused", "used", "old"))
    old.write_bytes(b"x")
    trace = SharedMemoryTrace(tmp_path, since=old.stat().st_ctime + 0.001)
    while used.exists() is False or used.stat().st_ctime < old.stat().st_ctime + 0.001:
        for path in (used, unused):
            path.write_bytes(b"x" * mmap.PAGESIZE)
    with used.open("r+b") as file, mmap.mmap(file.fileno(), 0):
        file.close()

        assert files_in_use([os.getpid()], tmp_path) == {used.name}
        assert trace.clean() == (unused.name,)
    assert {path.name for path in tmp_path.iterdir()} == {used.name, old.name}


def test_what_an_ended_process_used_is_removed(tmp_path: Path) -> None:
    path = tmp_path / "psm_12ab"
    trace = SharedMemoryTrace(tmp_path, since=0.0)
    with path.open("wb"):
        trace.look([os.getpid()])
        assert trace.clean() == ()

    assert trace.clean() == ("psm_12ab",)
    assert remove_left_over(frozenset(), since=0.0, folder=tmp_path / "none") == ()


# --- Memory ----------------------------------------------------------------------------------------------------------


def test_only_trainers_without_gpus_are_limited_rank_by_rank() -> None:
    slots = (AssignedGPU(index=0, uuid="cpu-slot-0", kind="cpu_slot"),)

    assert data_limit_bytes(a_recipe(memory_bytes=4 << 30, gpus=slots)) == 2 << 30
    assert data_limit_bytes(a_recipe(memory_bytes=None, gpus=slots)) is None
    assert data_limit_bytes(a_recipe(memory_bytes=4 << 30)) is None
    assert data_limit_bytes(a_plan(memory_bytes=4 << 30, gpus=slots)) is None


@pytest.mark.parametrize(("limit", "expected"), [(None, b"had it\n"), (64 << 20, b"MemoryError\n")])
def test_an_allocation_beyond_the_limit_fails_in_the_process_itself(
    tmp_path: Path, limit: int | None, expected: bytes
) -> None:
    log_file = tmp_path / "log"
    code = "try:\n  x = bytearray(128 << 20); print('had it')\nexcept MemoryError: print('MemoryError')"
    pid = spawn(
        program=sys.executable,
        arguments=(sys.executable, "-c", code),
        environment={},
        working_folder=tmp_path,
        log_file=log_file,
        data_limit_bytes=limit,
    )

    assert os.waitpid(pid, 0)[1] == 0
    assert log_file.read_bytes() == expected


def test_a_process_says_whether_it_is_stopped() -> None:
    process = subprocess.Popen(
        [sys.executable, "-S", "-c", "import os, signal; os.kill(0, signal.SIGSTOP)"], process_group=0
    )
    try:
        os.waitid(os.P_PID, process.pid, os.WSTOPPED | os.WNOWAIT)
        facts = process_facts(process.pid)
        assert facts is not None
        assert facts.state == "T"
    finally:
        process.kill()
        process.wait()
