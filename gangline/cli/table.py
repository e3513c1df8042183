"""Tables that fit: columns are dropped from the right until the rest fits the terminal. Pure.

A row may end in a note, a sentence across the columns it has no values for. Without a width (piped output) nothing is
dropped or cut. Not for: fetching or formatting values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from gangline.cli.sanitise import clean_inline
from gangline.cli.text_width import cut, pad, width_of

GAP = "  "
MIN_SHRUNK = 8
"""A shrinkable column is not cut below this many columns before others are dropped."""


@dataclass(frozen=True, kw_only=True)
class Column:
    """A column. `keep`: never dropped. `shrinks`: may be cut with an ellipsis before columns are dropped."""

    header: str
    right: bool = False
    keep: bool = False
    shrinks: bool = False


@dataclass(frozen=True, kw_only=True)
class Row:
    """Cells from the left; with fewer cells than columns, `note` fills the rest of the line."""

    cells: tuple[str, ...]
    note: str = ""
    style: str = ""
    """Key for `paint`, such as a job state; applies to the second cell."""


Paint = Callable[[str, str], str]
"""(style key, padded text) → text with colours."""


def render(
    columns: Sequence[Column], rows: Sequence[Row], *, width: int | None, paint: Paint | None = None
) -> list[str]:
    """The lines of the table, header first. `width` in columns; None: as wide as it takes."""
    table = [
        Row(cells=tuple(clean_inline(cell) for cell in row.cells), note=clean_inline(row.note), style=row.style)
        for row in rows
    ]
    widths = [
        max([width_of(column.header), *(width_of(row.cells[index]) for row in table if index < len(row.cells))])
        for index, column in enumerate(columns)
    ]
    shown = list(range(len(columns)))
    if width is not None:
        shown = _fit(columns, widths, width)
    header = _line(columns, widths, shown, tuple(column.header for column in columns), "", None)
    return [header.rstrip(), *(_row_line(columns, widths, shown, row, width, paint) for row in table)]


def _fit(columns: Sequence[Column], widths: list[int], width: int) -> list[int]:
    """Indexes of the columns to show; `widths` of shrinkable ones may be lowered in place."""
    shown = list(range(len(columns)))
    while (over := _total(widths, shown) - width) > 0:
        droppable = [index for index in shown if not columns[index].keep]
        slack = sum(max(0, widths[index] - MIN_SHRUNK) for index in shown if columns[index].shrinks)
        if slack >= over or not droppable:
            for index in (index for index in shown if columns[index].shrinks):
                taken = min(over, max(0, widths[index] - MIN_SHRUNK))
                widths[index] -= taken
                over -= taken
            return shown
        shown.remove(droppable[-1])
    return shown


def _total(widths: Sequence[int], shown: Sequence[int]) -> int:
    return sum(widths[index] for index in shown) + len(GAP) * (len(shown) - 1)


def _row_line(
    columns: Sequence[Column],
    widths: Sequence[int],
    shown: Sequence[int],
    row: Row,
    width: int | None,
    paint: Paint | None,
) -> str:
    visible = [index for index in shown if index < len(row.cells)]
    line = _line(columns, widths, visible, row.cells, row.style, paint)
    if not row.note:
        return line.rstrip()
    if width is None:
        return f"{line}{GAP}{row.note}"
    room = width - _total(widths, visible) - len(GAP)
    return f"{line}{GAP}{cut(row.note, room)}" if room >= MIN_SHRUNK else line.rstrip()


def _line(
    columns: Sequence[Column],
    widths: Sequence[int],
    shown: Sequence[int],
    cells: Sequence[str],
    style: str,
    paint: Paint | None,
) -> str:
    parts = []
    for index in shown:
        text = pad(cut(cells[index], widths[index]), widths[index], right=columns[index].right)
        parts.append(paint(style, text) if paint is not None and style and index == 1 else text)
    return GAP.join(parts)
