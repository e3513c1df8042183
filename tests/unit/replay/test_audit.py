"""The check of a finished replay: each fault planted once, and seen."""

from __future__ import annotations

import pytest

from service.replay.audit import faults_of
from service.replay.run_record import RunInterval, RunRecord
from tests.unit.replay.small_traces import gang, run, trace


def finished() -> RunRecord:
    """Two jobs of 4 GPUs beside each other on one node, both faultless."""
    return run(trace((5, 100, 4), (5, 200, 4)))


def with_run(record: RunRecord, number: int, **changes: object) -> RunRecord:
    record.runs[number] = record.runs[number]._replace(**changes)  # type: ignore[arg-type]
    return record


def test_a_faultless_run_passes() -> None:
    assert faults_of(finished()) == []


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"shares": gang((1, (0, 1, 2, 3))).shares}, "GPU 0 of node 1 was held by jobs a and b"),
        ({"shares": gang((1, (4, 5))).shares}, "job b ran on 2 of its 4 GPUs"),
        ({"shares": gang((2, (0, 1, 2, 3))).shares}, "job b ran on GPU 0 of node 2, not there"),
        ({"shares": gang((1, (4, 5, 6, 8))).shares}, "job b ran on GPU 8 of node 1, not there"),
        ({"started_at": 0}, "job b started at 0, before its submission"),
        ({"restore_seconds": 60}, "job b got 140 s of work done, it has 200 s"),
        ({"left_at": 205.5}, "job b ended at 205, its last run at 205.5"),
    ],
)
def test_a_fault_of_a_run_is_told(changes: dict[str, object], said: str) -> None:
    assert any(said in fault for fault in faults_of(with_run(finished(), 1, **changes)))


def test_a_job_that_never_ended_is_told() -> None:
    record = finished()
    record.ended_at[1] = None
    assert faults_of(record) == ["job b never ended"]


def test_two_runs_of_one_job_must_not_overlap() -> None:
    record = finished()
    record.runs[1] = record.runs[1]._replace(left_at=105)
    record.runs.append(RunInterval(1, 100, 205, 5, gang((1, (0, 1, 2, 3))).shares))
    assert "two runs of job b overlap" in faults_of(record)
