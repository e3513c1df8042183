"""How much CPU slots work: the CPU time of each rank and all that it started, as a share of a core."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from gangline.protocol.launch import AssignedGPU, encode
from gangline.protocol.names import LAUNCH_FILE
from tests.integration.worker.fake_api import a_plan
from tests.support.child import die_with_parent
from tests.support.wait import wait_until
from worker.attempt_folder import StartedRank, SupervisorRecord, write_record
from worker.gpu_use import ProcessTimes, SlotHolder, SlotMeter, read_process_times, share_out
from worker.state import AttemptState, ProcessIdentity, write_json, write_state

SUPERVISOR = 10


def holder(*ranks: int, slots: tuple[int, ...] = (0, 1), attempt_id: int = 7) -> SlotHolder:
    return SlotHolder(attempt_id=attempt_id, slots=slots, supervisor_pid=SUPERVISOR, rank_pids=ranks)


def process(parent: int, ticks: int, memory: int = 0) -> ProcessTimes:
    return ProcessTimes(parent_pid=parent, ticks=ticks, memory_bytes=memory)


def ticks(*holders: SlotHolder, **times: ProcessTimes) -> dict[tuple[int, int], float]:
    by_pid = {int(name[1:]): found for name, found in times.items()}
    return {key: share.ticks for key, share in share_out(holders, by_pid).items()}


def test_each_slot_has_the_time_of_its_rank_and_of_all_that_the_rank_started() -> None:
    times = {
        "p10": process(1, 999),
        "p20": process(SUPERVISOR, 5),
        "p21": process(20, 7),
        "p22": process(21, 1),
        "p30": process(SUPERVISOR, 3),
        "p99": process(1, 500),
    }
    assert ticks(holder(20, 30), **times) == {(7, 0): 13, (7, 1): 3}


def test_what_left_its_rank_is_shared_and_so_is_all_of_a_command_that_brings_its_own_launcher() -> None:
    orphan = {"p20": process(SUPERVISOR, 5), "p30": process(SUPERVISOR, 3), "p40": process(SUPERVISOR, 4)}
    assert ticks(holder(20, 30), p10=process(1, 0), **orphan) == {(7, 0): 7, (7, 1): 5}
    assert ticks(holder(20), p10=process(1, 0), p20=process(SUPERVISOR, 4), p21=process(20, 6)) == {
        (7, 0): 5,
        (7, 1): 5,
    }


def test_processes_of_nobody_and_circles_in_the_table_are_passed_over() -> None:
    assert ticks(holder(20, 30), p50=process(51, 1), p51=process(50, 1)) == {(7, 0): 0, (7, 1): 0}


class Attempt:
    """An attempt folder with one rank that is a real process, and a supervisor that has no other children.

    This process cannot be the supervisor: the databases and brokers of other tests come from it too.
    """

    def __init__(self, folder: Path, source: str) -> None:
        self.folder = folder / "7"
        self.folder.mkdir()
        self.child = subprocess.Popen(
            [sys.executable, "-c", source], stdout=subprocess.PIPE, preexec_fn=die_with_parent()
        )
        self.supervisor = subprocess.Popen(["sleep", "600"], preexec_fn=die_with_parent())
        plan = a_plan(7, gpus=(AssignedGPU(index=1, uuid="cpu-slot-1", kind="cpu_slot"),))
        write_json(self.folder / LAUNCH_FILE, encode(plan))
        write_state(
            self.folder,
            AttemptState(
                attempt_id=7, node_rank=0, token="gla_x", pool_id="p", node_name="n", server="http://x",
                supervisor=ProcessIdentity(pid=self.supervisor.pid, start_time=1, boot_id="b"), phase="supervised",
            ),
        )  # fmt: skip
        rank = StartedRank(rank=0, local_rank=0, pid=self.child.pid, start_time=1, started_at=1.0)
        write_record(self.folder, SupervisorRecord(ranks=(rank,)))

    def close(self) -> None:
        for process in (self.child, self.supervisor):
            process.kill()
            process.communicate()


def test_a_rank_that_computes_is_seen_and_one_that_sleeps_is_idle(tmp_path: Path) -> None:
    meter = SlotMeter(tmp_path, [0, 1])
    assert meter.read(100.0) == (), "there is nothing yet to compare it with"
    busy = Attempt(tmp_path, "import time; end = time.process_time() + 0.4\nwhile time.process_time() < end: pass\n"
                             "print(time.process_time(), flush=True); time.sleep(60)")  # fmt: skip
    try:
        assert busy.child.stdout is not None
        worked = min(1.0, float(busy.child.stdout.readline()))
        first, second = meter.read(101.0)
        assert (first.index, first.utilisation, first.memory_bytes) == (0, 0.0, 0)
        assert worked >= 0.4
        assert second.utilisation == pytest.approx(worked, abs=0.1), "its work, and its start, in one second"
        assert second.memory_bytes > 2**20
        assert meter.read(101.01) == (first, second), "a share of so short a time means nothing"
        assert meter.read(103.0)[1].utilisation == pytest.approx(0.0, abs=0.01)
    finally:
        busy.close()


def test_time_that_a_vanished_process_took_along_is_no_work_and_a_share_is_one_at_most(tmp_path: Path) -> None:
    meter = SlotMeter(tmp_path, [1])
    meter.read(100.0)
    attempt = Attempt(tmp_path, "import time; time.sleep(60)")
    try:
        wait_until(lambda: attempt.child.pid in read_process_times(), 10, "the rank does not run")
        meter._ticks = {(7, 1): 1e9}
        assert [use.utilisation for use in meter.read(101.0)] == [0.0]
        meter._ticks = {(7, 1): -1e9}
        assert [use.utilisation for use in meter.read(102.0)] == [1.0]
    finally:
        attempt.close()


def test_a_folder_that_goes_away_meanwhile_holds_no_slot(tmp_path: Path) -> None:
    (tmp_path / "8").mkdir()
    (tmp_path / "9").mkdir()
    (tmp_path / "9" / "state.json").write_text("{")
    meter = SlotMeter(tmp_path, [0])
    meter.read(100.0)
    assert [use.utilisation for use in meter.read(101.0)] == [0.0]
