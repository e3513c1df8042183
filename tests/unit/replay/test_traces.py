"""Reading traces: what a file must hold, and that every fault of it is told at once."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest

from service.replay.files import read_trace
from service.replay.history import pool_of_nodes, trace_of_history
from service.replay.traces import TraceFaults, parse_trace

TRACES = Path(__file__).resolve().parents[2] / "data" / "traces"


def test_the_columns_are_found_by_name_and_others_are_ignored() -> None:
    found = parse_trace("t", ["gpus,colour,submit_s,duration_s,team,limit_s", "8,red,5,60,vision,3600", "1,,6,70.4,,"])
    first, second = found.jobs
    assert (first.gpus, first.submitted_at, first.duration, first.team, first.limit) == (8, 5, 60, "vision", 3600)
    assert (second.job_id, second.duration, second.team, second.limit) == ("1", 70, "", None)


def test_jobs_come_in_order_of_submission_and_keep_the_row_of_the_file() -> None:
    found = parse_trace("t", ["submit_s,duration_s,gpus", "9,1,1", "3,1,1", "9,2,1"])
    assert [job.row for job in found.jobs] == [1, 0, 2], "those of one second stay in the order of the file"
    assert (found.first_submission, found.last_submission) == (3, 9)


def test_all_faults_are_told_at_once_with_their_lines() -> None:
    lines = ["submit_s,duration_s,gpus", "0,60,1", "x,60,1", "1,-3,0", "2", "3,60,nan"]
    with pytest.raises(TraceFaults) as caught:
        parse_trace("bad.csv", lines)
    assert len(caught.value.faults) == 6
    assert "bad.csv: line 3: submit_s is 'x'; it takes a number from 0" in str(caught.value)
    assert "line 4: gpus is '0'; it takes a number from 1" in str(caught.value)
    assert "line 5: duration_s is ''" in str(caught.value)


def test_a_long_list_of_faults_is_cut_and_counted() -> None:
    with pytest.raises(TraceFaults, match="and 80 more"):
        parse_trace("bad.csv", ["submit_s,duration_s,gpus", *(["0,0,1"] * 100)])


@pytest.mark.parametrize(
    ("lines", "said"),
    [
        (["job_id,gpus", "a,1"], "there is no column submit_s"),
        ([], "there is no column gpus"),
        (["submit_s,duration_s,gpus"], "it holds no jobs"),
    ],
)
def test_what_is_no_trace_is_refused(lines: list[str], said: str) -> None:
    with pytest.raises(TraceFaults, match=said):
        parse_trace("t", lines)


def test_a_file_may_be_gzipped_whatever_it_is_called(tmp_path: Path) -> None:
    text = b"submit_s,duration_s,gpus\n0,60,1\n"
    (tmp_path / "plain.csv").write_bytes(text)
    (tmp_path / "packed.csv").write_bytes(gzip.compress(text))
    assert read_trace(tmp_path / "plain.csv").jobs == read_trace(tmp_path / "packed.csv").jobs


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (None, "there is no such file"),
        (b"\xff\xfe\x00", "is no CSV text"),
        (b"\x1f\x8b" + bytes(20), "cannot be read"),
        (gzip.compress(b"submit_s,duration_s,gpus\n" * 99)[:-20], "is no CSV text"),
    ],
)
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, content: bytes | None, said: str) -> None:
    path = tmp_path / "trace.csv.gz"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(TraceFaults, match=said) as caught:
        read_trace(path)
    assert str(path) in str(caught.value)


def test_the_traces_of_the_tests_are_whole() -> None:
    sizes = {name: len(read_trace(TRACES / f"{name}.csv.gz").jobs) for name in ("itp03", "itp06")}
    assert sizes == {"itp03": 3_011, "itp06": 2_396}


def item(number: int, **more: object) -> dict[str, object]:
    """A job as the server tells of it: ended after an hour on 4 GPUs."""
    told: dict[str, object] = {
        "id": number,
        "state": "succeeded",
        "submitted_at": f"2026-01-05T10:00:0{number}Z",
        "team": "vision",
        "resources": {"gpus": 8},
        "size": {"gpus": 4},
        "cost": {"gpu_seconds": 4 * 3600.0},
        "limit_seconds": None,
        "preemptible": False,
        "reports_progress": False,
    }
    return told | more


def test_a_history_has_the_jobs_that_held_gpus_and_ended_oldest_first() -> None:
    never_ran = item(3, size=None, cost={"gpu_seconds": 0.0}, state="cancelled")
    without_gpus = item(4, size={"gpus": 0}, cost={"gpu_seconds": 0.0})
    still_running = item(5, state="running")
    found = trace_of_history([still_running, without_gpus, never_ran, item(2, limit_seconds=7200.5), item(1)])
    assert [(job.job_id, job.row, job.gpus, job.duration, job.limit) for job in found.jobs] == [
        ("1", 0, 4, 3600, None),
        ("2", 1, 4, 3600, 7200),
    ]
    assert found.jobs[1].submitted_at - found.jobs[0].submitted_at == 1


def test_a_history_without_any_such_job_says_so() -> None:
    with pytest.raises(TraceFaults, match="no job that held GPUs has ended yet"):
        trace_of_history([item(1, state="running")])


def test_a_server_that_does_not_tell_what_a_replay_needs_is_named_instead_of_guessed_for() -> None:
    old = item(1)
    del old["limit_seconds"], old["preemptible"]
    with pytest.raises(TraceFaults, match="does not tell limit_seconds and preemptible of its jobs"):
        trace_of_history([item(2), old])


def test_a_pool_without_a_node_with_gpus_is_no_pool_to_replay_on() -> None:
    with pytest.raises(TraceFaults, match="no node with GPUs") as caught:
        pool_of_nodes([{"state": "lost", "gpus": [{}]}, {"state": "ready", "gpus": []}])
    assert caught.value.fix == "give --nodes and --gpus-per-node"
