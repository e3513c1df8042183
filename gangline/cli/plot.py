"""Curves in a terminal, drawn with braille dots (2 × 4 per character). Pure.

Not for: fetching or choosing metrics (`gangline.cli.commands.plot`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gangline.cli.text_width import pad, width_of
from gangline.cli.words import compact_number

BLANK = 0x2800
DOTS = ((0x01, 0x02, 0x04, 0x40), (0x08, 0x10, 0x20, 0x80))
"""Bit of each dot of a braille character: `DOTS[column][row from the top]`."""
NUM_LABELS = 4


@dataclass(frozen=True, kw_only=True)
class Curve:
    """Points of one curve; non-finite ones are left out and break the line."""

    steps: Sequence[float]
    values: Sequence[float]


@dataclass(frozen=True, kw_only=True)
class Scale:
    """Linear or logarithmic map of `low`..`high` to 0..1."""

    low: float
    high: float
    is_log: bool = False

    def position(self, value: float) -> float:
        """Where `value` lies, 0 at `low`, 1 at `high`."""
        if self.is_log:
            return (math.log(value) - math.log(self.low)) / (math.log(self.high) - math.log(self.low))
        # Halves, so that the widest ranges there are do not overflow.
        return (value / 2 - self.low / 2) / (self.high / 2 - self.low / 2)

    def value(self, position: float) -> float:
        """The value at a position."""
        if self.is_log:
            return math.exp(math.log(self.low) * (1 - position) + math.log(self.high) * position)
        return self.low * (1 - position) + self.high * position


@dataclass(frozen=True, kw_only=True)
class Cell:
    """One character of the drawing and the curve that drew it last; None: nobody."""

    character: str
    curve: int | None


@dataclass(frozen=True, kw_only=True)
class Drawing:
    """Rows from the top with their axis labels, and the range of steps."""

    labels: tuple[str, ...]
    rows: tuple[tuple[Cell, ...], ...]
    first_step: float
    last_step: float


def draw(curves: Sequence[Curve], *, width: int, height: int, log: bool | None = None) -> Drawing | None:
    """The drawing of some curves in `width` × `height` characters; None when there is no finite point at all.

    `log=None` chooses a logarithmic axis when all values are positive and span more than a factor of 20.
    """
    points = [_finite(curve) for curve in curves]
    flat = [point for segments in points for segment in segments for point in segment]
    if not flat:
        return None
    x_scale = _scale([step for step, _ in flat], log=False)
    y_scale = _scale([value for _, value in flat], log=log)
    bits = [[0] * width for _ in range(height)]
    owner: list[list[int | None]] = [[None] * width for _ in range(height)]
    for index, segments in enumerate(points):
        for segment in segments:
            dots = [_dot(x_scale, y_scale, step, value, width, height) for step, value in segment]
            for x, y in _joined(dots):
                bits[y // 4][x // 2] |= DOTS[x % 2][y % 4]
                owner[y // 4][x // 2] = index
    rows = tuple(
        tuple(Cell(character=chr(BLANK + bits[y][x]), curve=owner[y][x]) for x in range(width)) for y in range(height)
    )
    return Drawing(labels=_labels(y_scale, height), rows=rows, first_step=x_scale.low, last_step=x_scale.high)


def _finite(curve: Curve) -> list[list[tuple[float, float]]]:
    """The curve's finite points, as unbroken segments."""
    segments: list[list[tuple[float, float]]] = [[]]
    for step, value in zip(curve.steps, curve.values, strict=True):
        if math.isfinite(step) and math.isfinite(value):
            segments[-1].append((step, value))
        elif segments[-1]:
            segments.append([])
    return [segment for segment in segments if segment]


def _scale(values: Sequence[float], *, log: bool | None) -> Scale:
    low, high = min(values), max(values)
    is_log = low > 0 and high > low and (high / 20 > low if log is None else log)
    if low == high:
        # One value only: put it in the middle of a range around it.
        margin = abs(low) * 0.1 or 1.0
        return Scale(low=low - margin, high=high + margin)
    return Scale(low=low, high=high, is_log=is_log)


def _dot(x_scale: Scale, y_scale: Scale, step: float, value: float, width: int, height: int) -> tuple[int, int]:
    x = round(x_scale.position(step) * (width * 2 - 1))
    y = round((1 - y_scale.position(value)) * (height * 4 - 1))
    return x, y


def _joined(dots: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """The dots with straight lines between neighbours."""
    line = list(dots[:1])
    for (x0, y0), (x1, y1) in itertools.pairwise(dots):
        steps = max(abs(x1 - x0), abs(y1 - y0))
        line += [(x0 + round((x1 - x0) * i / steps), y0 + round((y1 - y0) * i / steps)) for i in range(1, steps + 1)]
    return line


def _labels(scale: Scale, height: int) -> tuple[str, ...]:
    """A label for the middle of about four rows, others empty, all of one width."""
    wanted = {round(i * (height - 1) / max(1, min(NUM_LABELS, height) - 1)) for i in range(min(NUM_LABELS, height))}
    texts = []
    for row in range(height):
        # First and last row carry the exact ends of the range.
        position = 0.5 if height == 1 else 1 - row / (height - 1)
        texts.append(compact_number(scale.value(position)) if row in wanted else "")
    widest = max(width_of(text) for text in texts)
    return tuple(pad(text, widest, right=True) for text in texts)
