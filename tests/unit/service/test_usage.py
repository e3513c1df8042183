"""Sums of usage: GPU-hours held, busy and lost, by user, team and ISO week; weeks and windows cut exactly."""

from __future__ import annotations

import random
from datetime import UTC, datetime
from itertools import pairwise
from typing import Any

import pytest

from service.domain.usage import AttemptUse, HeldShare, UsageRow, check_axes, sum_usage, week_of, weeks_between

HOUR = 3600.0
DAY = 24 * HOUR
MONDAY = datetime(2026, 11, 30, tzinfo=UTC).timestamp()
ALWAYS = {"since": 0.0, "until": 1e11}


def attempt(*shares: tuple[int, float, float], **facts: Any) -> AttemptUse:
    """An attempt by its shares: GPUs, since, until (hours after that Monday)."""
    held = tuple(HeldShare(num_gpus=gpus, since=MONDAY + a * HOUR, until=MONDAY + b * HOUR) for gpus, a, b in shares)
    ended_at = max(share.until for share in held)
    defaults: dict[str, Any] = {
        "job_id": 1, "user": "ann", "team": "red", "busy_gpu_seconds": 0.0, "lost_gpu_seconds": 0.0,
    }  # fmt: skip
    return AttemptUse(**{**defaults, "ended_at": ended_at, **facts}, shares=held)


def hours(rows: tuple[UsageRow, ...]) -> dict[tuple[str, ...], Any]:
    """(held, busy, lost, jobs) in GPU-hours by key."""
    return {
        row.key: (
            row.held_gpu_seconds / HOUR, row.busy_gpu_seconds / HOUR, row.lost_gpu_seconds / HOUR, row.num_jobs,
        )
        for row in rows
    }  # fmt: skip


def test_held_time_counts_every_share_from_allocation_to_release() -> None:
    rows, total = sum_usage([attempt((4, 0, 2), (2, 0, 3))], ["user"], **ALWAYS)
    assert hours(rows) == {("ann",): (14.0, 0.0, 0.0, 1)}
    assert total.held_gpu_seconds == 14 * HOUR


def test_an_attempt_that_crosses_weeks_is_split_at_monday_midnight_utc() -> None:
    rows, total = sum_usage([attempt((2, -3, 170), busy_gpu_seconds=173 * HOUR)], ["week"], **ALWAYS)
    assert hours(rows) == {
        ("2026-W48",): (6.0, pytest.approx(3.0), 0.0, 1),
        ("2026-W49",): (336.0, pytest.approx(168.0), 0.0, 1),
        ("2026-W50",): (4.0, pytest.approx(2.0), 0.0, 1),
    }
    assert (total.held_gpu_seconds, total.num_jobs) == (346 * HOUR, 1), "a job of three weeks is one job"


def test_only_what_lies_in_the_window_counts() -> None:
    used = [attempt((1, 0, 10), busy_gpu_seconds=5 * HOUR), attempt((8, 20, 30), user="bob", job_id=2)]
    rows, _ = sum_usage(used, ["user"], since=MONDAY + 6 * HOUR, until=MONDAY + 20 * HOUR)
    assert hours(rows) == {("ann",): (4.0, pytest.approx(2.0), 0.0, 1)}


def test_what_a_preemption_lost_counts_where_the_attempt_ended() -> None:
    lost = attempt((1, -3, 3), lost_gpu_seconds=2 * HOUR)
    rows, total = sum_usage([lost], ["week"], **ALWAYS)
    assert {key: row[2] for key, row in hours(rows).items()} == {("2026-W48",): 0.0, ("2026-W49",): 2.0}
    assert total.lost_gpu_seconds == 2 * HOUR
    assert sum_usage([lost], ["week"], since=0.0, until=MONDAY)[1].lost_gpu_seconds == 0.0


def test_jobs_are_counted_once_however_many_attempts_they_had() -> None:
    used = [attempt((1, 0, 1)), attempt((1, 2, 3)), attempt((1, 4, 5), job_id=2)]
    assert hours(sum_usage(used, ["team"], **ALWAYS)[0]) == {("red",): (3.0, 0.0, 0.0, 2)}


def test_axes_are_combined_in_the_order_that_was_asked_for() -> None:
    used = [attempt((1, 0, 1)), attempt((1, 0, 1), user="bob", team="blue", job_id=2)]
    rows, _ = sum_usage(used, ["week", "team", "user"], **ALWAYS)
    assert [row.key for row in rows] == [("2026-W49", "blue", "bob"), ("2026-W49", "red", "ann")]


@pytest.mark.parametrize("by", [[], ["users"], ["user", "user"], ["week", ""]])
def test_an_axis_that_is_unknown_or_given_twice_is_refused(by: list[str]) -> None:
    with pytest.raises(ValueError, match="give user, team, week"):
        check_axes(by)


@pytest.mark.parametrize(
    ("day", "week"), [("2026-12-31", "2026-W53"), ("2027-01-03", "2026-W53"), ("2027-01-04", "2027-W01")]
)
def test_a_week_belongs_to_the_year_of_most_of_its_days(day: str, week: str) -> None:
    assert week_of(datetime.fromisoformat(f"{day}T12:00:00+00:00").timestamp()) == week


def test_weeks_of_a_span_join_without_gap_and_each_lies_in_one_week() -> None:
    dice = random.Random(1)
    for _ in range(200):
        since = MONDAY + dice.uniform(-400, 400) * DAY
        until = since + dice.uniform(0.01, 60) * DAY
        parts = list(weeks_between(since, until))
        assert parts[0][0] == since
        assert parts[-1][1] == until
        assert all(end == begin for (_, end), (begin, _) in pairwise(parts))
        assert all(week_of(begin) == week_of(end - 0.001) for begin, end in parts)


def test_by_whatever_axes_the_rows_add_up_to_the_same_total() -> None:
    dice = random.Random(2)
    used = []
    for job_id in range(60):
        begin = dice.uniform(-500, 500)
        shares = [(dice.randint(1, 8), begin, begin + dice.uniform(0.1, 400)) for _ in range(dice.randint(1, 3))]
        busy, lost = dice.uniform(0, 900), dice.choice([0.0, dice.uniform(0, 90)])
        person = {"user": dice.choice("abc"), "team": dice.choice("xy"), "job_id": job_id}
        used.append(attempt(*shares, busy_gpu_seconds=busy, lost_gpu_seconds=lost, **person))
    window = {"since": MONDAY - 300 * HOUR, "until": MONDAY + 300 * HOUR}
    for by in (["user"], ["team", "week"], ["week", "user", "team"]):
        rows, total = sum_usage(used, by, **window)
        for column in ("held_gpu_seconds", "busy_gpu_seconds", "lost_gpu_seconds"):
            assert sum(getattr(row, column) for row in rows) == pytest.approx(getattr(total, column))
        assert total == sum_usage(used, ["user"], **window)[1] or total.held_gpu_seconds == pytest.approx(
            sum_usage(used, ["user"], **window)[1].held_gpu_seconds
        )
