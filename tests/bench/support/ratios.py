"""Ratios of interleaved measurements with a confidence interval. Pure.

Runs that are compared take turns, so that what else the machine does falls on all of them alike. Each turn gives one
ratio; the figure is their median, and its interval comes from drawing the turns anew (bootstrap, percentiles).
Not for: measuring, or showing (`figures`).
"""

from __future__ import annotations

import dataclasses
import random
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from tests.bench.support.figures import Row, percentile

CONFIDENCE_PERCENT: Final = 95.0
NUM_DRAWS: Final = 4_000
LOW, HIGH = "_low", "_high"


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median and where it lies with 95 % confidence."""

    median: float
    low: float
    high: float

    def named(self, key: str) -> dict[str, float]:
        """As figures: `key`, `key_low`, `key_high`."""
        return {key: self.median, key + LOW: self.low, key + HIGH: self.high}


def median_interval(values: Sequence[float], *, seed: int = 0) -> Interval:
    """The median of `values` and its bootstrap interval; the same seed gives the same one.

    Raises ValueError for fewer than two: one turn says nothing about how far it can be trusted.
    """
    if len(values) < 2:
        raise ValueError(f"{len(values)} measurements give no confidence interval; at least 2 are needed")
    chance = random.Random(seed)
    medians = [statistics.median(chance.choices(values, k=len(values))) for _ in range(NUM_DRAWS)]
    outside = (100 - CONFIDENCE_PERCENT) / 2
    return Interval(
        median=statistics.median(values),
        low=percentile(medians, outside),
        high=percentile(medians, 100 - outside),
    )


def ratio_interval(ours: Sequence[float], theirs: Sequence[float]) -> Interval:
    """ours ÷ theirs, turn by turn: the two have one value per turn, in order. Raises ValueError for other lengths."""
    return median_interval([one / other for one, other in zip(ours, theirs, strict=True)])


def turn_order(names: Sequence[str], turn: int) -> list[str]:
    """Who runs when in a turn: forwards in even ones, backwards in odd ones, so that a steady drift cancels out."""
    return list(names) if turn % 2 == 0 else list(reversed(names))


def batch_for(seconds: float, tried: Mapping[int, float]) -> int:
    """Samples per step that take about `seconds`, where the two numbers of samples in `tried` took so long.

    At least 1. A step costs something whatever its size, so it is a line, not a proportion. Raises ValueError when the
    larger batch was not slower: what else the machine did decided.
    """
    (few, short), (many, long) = sorted(tried.items())
    if long <= short:
        raise ValueError(f"{many} samples took {long:.4f} s, {few} took {short:.4f} s: the machine is too busy to tell")
    return max(1, round(few + (seconds - short) * (many - few) / (long - short)))


def interval_rows(row: Row) -> tuple[Row, Row, Row]:
    """The row of a figure and those of its interval, for the line of JSON."""
    return row, Row(row.key + LOW, row.title, row.unit), Row(row.key + HIGH, row.title, row.unit)


def titled(row: Row, figures: Mapping[str, float]) -> Row:
    """The row with its interval in the title, for the table. Raises KeyError when it is missing."""
    low, high = figures[row.key + LOW], figures[row.key + HIGH]
    return dataclasses.replace(row, title=f"{row.title} ({low:.3f} to {high:.3f})")
