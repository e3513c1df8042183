"""Figures of a benchmark: percentiles, the table beside peers and goals, the line of JSON. Pure.

Not for: measuring.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Row:
    """One figure as the table shows it. `peer` and `goal` are None where there is none."""

    key: str
    """Its name in the line of JSON."""
    title: str
    unit: str
    peer: float | None = None
    peer_name: str = ""
    goal: float | None = None
    is_more_better: bool = field(default=False, kw_only=True)

    def verdict(self, value: float) -> str:
        """Whether it reaches the goal, or how far it is from it; and whether it is at least as good as the peer."""
        told = []
        if self.goal is not None:
            told.append("goal met" if self._reaches(value, self.goal) else f"MISSES goal: {value / self.goal:.2f} × it")
        if self.peer is not None:
            told.append("beats peer" if self._reaches(value, self.peer) else "MISSES peer")
        return ", ".join(told)

    def _reaches(self, value: float, other: float) -> bool:
        return value >= other if self.is_more_better else value <= other


def percentile(values: Sequence[float], percent: float) -> float:
    """The smallest value that at least `percent` per cent do not exceed. Raises ValueError without any."""
    if not values:
        raise ValueError("no values, so no percentile")
    return sorted(values)[max(0, math.ceil(len(values) * percent / 100) - 1)]


def table(rows: Sequence[Row], figures: Mapping[str, float]) -> str:
    """The figures beside peer and goal. Raises KeyError when one is missing."""
    lines = [("", "ours", "best peer", "goal", "")]
    for row in rows:
        value = figures[row.key]
        peer = "" if row.peer is None else f"{_number(row.peer)} ({row.peer_name})"
        goal = "" if row.goal is None else _number(row.goal)
        lines.append((row.title, f"{_number(value)} {row.unit}".strip(), peer, goal, row.verdict(value)))
    widths = [max(len(line[column]) for line in lines) for column in range(5)]
    return "\n".join("  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)) for line in lines)


def json_line(rows: Sequence[Row], figures: Mapping[str, float]) -> str:
    """One line of JSON with exactly the rows' keys. Raises KeyError for a missing figure, ValueError for no number."""
    return json.dumps({row.key: round(figures[row.key], 3) for row in rows}, allow_nan=False)


def _number(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
