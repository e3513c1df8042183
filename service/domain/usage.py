"""Who used the pool: GPU-seconds held, busy and lost to preemption, by user, team and ISO week. Pure.

Held time is exact: each share of an attempt counts from its allocation to its release, cut at the ends of the window
and, by week, at Monday 00:00 UTC. Busy time is known per attempt only, so it is spread evenly over what was held. What
a preemption lost counts where the attempt ended. Not for: reading rows (`service.operations.load_usage`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Final

AXES: Final = ("user", "team", "week")
"""What usage can be listed by, in any combination and order."""


@dataclass(frozen=True, kw_only=True)
class HeldShare:
    """GPUs that an attempt held on one node."""

    num_gpus: int
    since: float
    until: float
    """Its release; now, for what is still held."""

    @property
    def gpu_seconds(self) -> float:
        """GPU-seconds of the whole share, wherever they lie."""
        return self.num_gpus * (self.until - self.since)


@dataclass(frozen=True, kw_only=True)
class AttemptUse:
    """One attempt that held GPUs in the window, with all its shares at full length."""

    job_id: int
    user: str
    team: str
    busy_gpu_seconds: float
    lost_gpu_seconds: float
    ended_at: float | None
    shares: tuple[HeldShare, ...]


@dataclass(frozen=True, kw_only=True)
class UsageRow:
    """What one user, team or week (or a combination) used. `key` follows the axes that were asked for."""

    key: tuple[str, ...]
    held_gpu_seconds: float
    busy_gpu_seconds: float
    lost_gpu_seconds: float
    num_jobs: int
    """Jobs that held a GPU; one that ran in two weeks counts in both, and once in a total."""


@dataclass
class _Sum:
    held: float = 0.0
    busy: float = 0.0
    lost: float = 0.0
    jobs: set[int] = field(default_factory=set)

    def row(self, key: tuple[str, ...]) -> UsageRow:
        return UsageRow(
            key=key,
            held_gpu_seconds=self.held,
            busy_gpu_seconds=self.busy,
            lost_gpu_seconds=self.lost,
            num_jobs=len(self.jobs),
        )


def sum_usage(
    attempts: Iterable[AttemptUse], by: Sequence[str], *, since: float, until: float
) -> tuple[tuple[UsageRow, ...], UsageRow]:
    """Rows by key, and their total, for the time from `since` to `until`. Raises ValueError for an unknown axis."""
    check_axes(by)
    sums: defaultdict[tuple[str, ...], _Sum] = defaultdict(_Sum)
    total = _Sum()
    for attempt in attempts:
        for at, held in _held_parts(attempt, since, until, by_week="week" in by):
            _add(sums[_key(attempt, by, at)], attempt, held)
            _add(total, attempt, held)
        if attempt.lost_gpu_seconds and attempt.ended_at is not None and since <= attempt.ended_at < until:
            sums[_key(attempt, by, attempt.ended_at)].lost += attempt.lost_gpu_seconds
            total.lost += attempt.lost_gpu_seconds
    return tuple(sums[key].row(key) for key in sorted(sums)), total.row(())


def check_axes(by: Sequence[str]) -> None:
    """Raise ValueError that names every axis that is unknown or given twice."""
    wrong = [axis for axis in by if axis not in AXES] + sorted({axis for axis in by if by.count(axis) > 1})
    if wrong or not by:
        raise ValueError(f"by={','.join(by)!r}: give {', '.join(AXES)}, each once at most, joined by commas")


def week_of(at: float) -> str:
    """The ISO week of an instant in UTC: `2026-W48`. It is the week's year, which may not be the day's."""
    year, week, _ = datetime.fromtimestamp(at, UTC).isocalendar()
    return f"{year}-W{week:02d}"


def weeks_between(since: float, until: float) -> Iterator[tuple[float, float]]:
    """The parts of a span that lie in one ISO week each."""
    while since < until:
        day = datetime.fromtimestamp(since, UTC)
        monday = day.replace(hour=0, minute=0, second=0, microsecond=0) - timedelta(days=day.weekday())
        end = min(until, (monday + timedelta(days=7)).timestamp())
        yield since, end
        since = end


def _held_parts(attempt: AttemptUse, since: float, until: float, *, by_week: bool) -> Iterator[tuple[float, float]]:
    """(an instant in the part, GPU-seconds held) for each part of the attempt in the window."""
    for share in attempt.shares:
        begin, end = max(share.since, since), min(share.until, until)
        if begin >= end:
            continue
        for start, stop in weeks_between(begin, end) if by_week else ((begin, end),):
            yield start, share.num_gpus * (stop - start)


def _add(sums: _Sum, attempt: AttemptUse, held: float) -> None:
    whole = sum(share.gpu_seconds for share in attempt.shares)
    sums.held += held
    sums.busy += attempt.busy_gpu_seconds * held / whole
    sums.jobs.add(attempt.job_id)


def _key(attempt: AttemptUse, by: Sequence[str], at: float) -> tuple[str, ...]:
    values = {"user": attempt.user, "team": attempt.team, "week": ""}
    if "week" in by:
        values["week"] = week_of(at)
    return tuple(values[axis] for axis in by)
