"""How many terminal columns a text takes, and cutting it to fit. Pure.

Not for: making text safe (`sanitise`); call that first.
"""

from __future__ import annotations

import unicodedata

ELLIPSIS = "…"


def width_of(text: str) -> int:
    """Columns of plain text (no escape sequences): wide characters take two, combining ones none."""
    if text.isascii():
        return len(text)
    return sum(_columns(character) for character in text)


def cut(text: str, width: int) -> str:
    """`text` in at most `width` columns, with an ellipsis when something is left out."""
    if width_of(text) <= width:
        return text
    if width < 1:
        return ""
    kept, used = [], 0
    for character in text:
        used += _columns(character)
        if used > width - 1:
            break
        kept.append(character)
    return "".join(kept).rstrip() + ELLIPSIS


def pad(text: str, width: int, *, right: bool = False) -> str:
    """`text` filled up to `width` columns, on its left when `right`-aligned."""
    fill = " " * max(0, width - width_of(text))
    return fill + text if right else text + fill


def _columns(character: str) -> int:
    if unicodedata.combining(character) or unicodedata.category(character) in ("Mn", "Me", "Cf"):
        return 0
    return 2 if unicodedata.east_asian_width(character) in ("W", "F") else 1
