"""`gang show` of jobs that ran more than once: what belongs to which attempt, in words, as a fake server tells it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.integration.client.fake_rest_server import Answer, FakeServer, a_job
from tests.integration.client.gang_process import gang

DAY = "2026-01-05T"
FIRST = {"number": 1, "outcome": "preempted", "started_at": f"{DAY}10:00:04Z", "ended_at": f"{DAY}10:04:40Z"}
SECOND = {"id": 9, "number": 2, "state": "running", "started_at": f"{DAY}10:05:42Z", "nodes": []}
STOPPED = {
    "outcome": "preempted",
    "sentence": "The job was stopped and starts again: job 7 needs its GPUs.",
    "fix": "Nothing to do: it starts again by itself.",
    "ranks": [
        {"rank": 0, "node": "node-1", "signal": "SIGTERM", "stopped_by_us": True},
        {"rank": 1, "node": "node-1", "exit_code": 3},
    ],
}


def show(server: FakeServer, tmp_path: Path, **facts: Any) -> str:
    server.add(a_job(12, submitted_at=f"{DAY}10:00:00Z", started_at=f"{DAY}10:00:04Z", **facts))
    return gang(server, tmp_path, "show", "12", TZ="UTC").out


def times(server: FakeServer, tmp_path: Path, **facts: Any) -> str:
    (line,) = [line for line in show(server, tmp_path, **facts).splitlines() if line.startswith("  times ")]
    return line.removeprefix("  times").strip()


def test_a_waiting_job_does_not_run_and_says_that_it_ran_before(server: FakeServer, tmp_path: Path) -> None:
    line = times(server, tmp_path, state="waiting", last_attempt=FIRST)

    assert "running for" not in line
    assert line.endswith("started 2026-01-05 10:00 (waited 4s), ran before: attempt 1, 4m36s, until 2026-01-05 10:04")


def test_an_attempt_that_never_ran_is_not_said_to_have_run(server: FakeServer, tmp_path: Path) -> None:
    line = times(server, tmp_path, state="waiting", last_attempt={**FIRST, "started_at": None})

    assert "ran before: attempt 1, not started, until" in line


def test_after_a_restart_the_second_wait_and_the_run_of_that_attempt_are_told(
    server: FakeServer, tmp_path: Path
) -> None:
    line = times(server, tmp_path, attempt=SECOND, last_attempt=FIRST)

    assert "first started 2026-01-05 10:00 (waited 4s)" in line
    assert "attempt 2 started 2026-01-05 10:05 (waited 1m02s), running for " in line


@pytest.mark.parametrize(
    ("attempt", "says"),
    [
        ({**SECOND, "number": 1}, "running for "),
        ({**SECOND, "number": 1, "state": "launching", "started_at": None}, ""),
        ({**SECOND, "state": "launching", "started_at": None}, ""),
    ],
)
def test_running_for_is_said_only_where_ranks_run(
    server: FakeServer, tmp_path: Path, attempt: dict[str, Any], says: str
) -> None:
    line = times(server, tmp_path, attempt=attempt)

    assert ("running for " in line, "attempt" in line) == (bool(says), False)


@pytest.mark.parametrize(
    ("last", "ended"),
    [
        (FIRST, "ended 2026-01-05 12:00 (ran 4m36s)"),
        ({**FIRST, "number": 3}, "ended 2026-01-05 12:00 (attempt 3 ran 4m36s)"),
        (None, "ended 2026-01-05 12:00"),
    ],
)
def test_an_ended_job_says_how_long_its_last_attempt_ran(
    server: FakeServer, tmp_path: Path, last: dict[str, Any] | None, ended: str
) -> None:
    facts = {"state": "cancelled", "ended_at": f"{DAY}12:00:00Z", "last_attempt": last}

    assert times(server, tmp_path, **facts).endswith(ended)


@pytest.mark.parametrize("attempt", [None, SECOND], ids=["waits", "runs again"])
def test_why_an_attempt_ended_is_told_as_of_the_last_attempt_and_without_a_fix(
    server: FakeServer, tmp_path: Path, attempt: dict[str, Any] | None
) -> None:
    state = "waiting" if attempt is None else "running"

    out = show(server, tmp_path, state=state, attempt=attempt, last_attempt=FIRST, cause=STOPPED)

    assert "before     last attempt (1): The job was stopped and starts again: job 7 needs its GPUs.\n" in out
    assert "rank 1 on node-1: exit code 3" in out
    assert not any(words in out for words in ("cause", "SIGTERM", "fix", "ranks"))


def test_why_a_job_ended_is_told_with_all_ranks_and_the_fix(server: FakeServer, tmp_path: Path) -> None:
    out = show(server, tmp_path, state="failed", ended_at=f"{DAY}12:00:00Z", last_attempt=FIRST, cause=STOPPED)

    assert "  cause      The job was stopped" in out
    assert "  ranks      0 on node-1: signal SIGTERM, stopped by Gangline\n" in out
    assert "  fix        Nothing to do" in out
    assert "last attempt" not in out


def test_why_of_a_running_job_says_nothing_of_the_attempt_before(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12, attempt=SECOND, last_attempt=FIRST, cause=STOPPED))
    answer = Answer(body={"id": 12, "state": "running", "reason": None, "can_ever_start": None})
    server.overrides["GET /jobs/12/why"] = lambda request: answer

    assert gang(server, tmp_path, "why", "12").out == "12 gpt is running; nothing holds it up.\n"


@pytest.mark.parametrize(("number", "shown"), [(1000, "top"), (101, "top"), (100, "100"), (-50, "-50")])
def test_a_priority_above_all_numbers_is_shown_as_top(
    server: FakeServer, tmp_path: Path, number: int, shown: str
) -> None:
    assert f"  priority   {shown}\n" in show(server, tmp_path, priority=number)
