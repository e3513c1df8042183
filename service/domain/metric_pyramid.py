"""Curves in bounded space: for each metric, buckets of steps at widths 1, 8, 64, … with min, max and last. Pure.

Each level keeps its newest `KEPT_BUCKETS` buckets, so that any range is drawn from at most `MAX_POINTS` of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

LEVEL_FACTOR = 8
NUM_LEVELS = 7
MAX_POINTS = 2_000
KEPT_BUCKETS = 2_048


@dataclass(frozen=True, kw_only=True)
class Bucket:
    """One bucket: finite minimum and maximum, and the last value (`last_text` when it was not finite)."""

    key: str
    level: int
    bucket: int
    step: int
    minimum: float | None
    maximum: float | None
    last: float | None
    last_text: str | None
    count: int


def width(level: int) -> int:
    """Steps in one bucket of a level."""
    return int(LEVEL_FACTOR**level)


def buckets_of(points: Iterable[tuple[int, str, float | str]]) -> list[Bucket]:
    """The buckets that `points` (step, key, value in order of arrival) fall into, on every level."""
    merged: dict[tuple[str, int, int], Bucket] = {}
    for step, key, value in points:
        number = value if isinstance(value, float) else None
        text = None if isinstance(value, float) else str(value)
        for level in range(NUM_LEVELS):
            place = (key, level, step // width(level))
            fresh = Bucket(
                key=key,
                level=level,
                bucket=place[2],
                step=step,
                minimum=number,
                maximum=number,
                last=number,
                last_text=text,
                count=1,
            )
            merged[place] = merge(merged[place], fresh) if place in merged else fresh
    return list(merged.values())


def merge(older: Bucket, newer: Bucket) -> Bucket:
    """Two parts of one bucket as one."""
    return replace(
        newer,
        minimum=_pick(min, older.minimum, newer.minimum),
        maximum=_pick(max, older.maximum, newer.maximum),
        count=older.count + newer.count,
    )


def _pick(choose: Callable[[list[float]], float], a: float | None, b: float | None) -> float | None:
    present = [value for value in (a, b) if value is not None]
    return choose(present) if present else None


def level_for(first_step: int, last_step: int, points: int) -> int:
    """The finest level that draws these steps in at most `points` buckets."""
    allowed = max(1, min(points, MAX_POINTS))
    for level in range(NUM_LEVELS):
        if last_step // width(level) - first_step // width(level) + 1 <= allowed:
            return level
    return NUM_LEVELS - 1
