"""How a user names a job: `12`, a name (the latest of mine), `-1` (my last), `-2` (the one before). Pure.

Not for: asking the server (`gangline.client.client`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_LAST = re.compile(r"-([1-9][0-9]{0,2})")
_ID = re.compile(r"[1-9][0-9]{0,17}")


@dataclass(frozen=True)
class ById:
    """A job by its id."""

    id: int


@dataclass(frozen=True)
class ByName:
    """The latest of my jobs with this name."""

    name: str


@dataclass(frozen=True)
class ByAge:
    """My last job (1), the one before (2), …"""

    back: int


Reference = ById | ByName | ByAge


def parse_reference(text: str | int) -> Reference:
    """Read a job reference. Digits are always an id. Raises ValueError for an empty one or a number that is no id."""
    if isinstance(text, int):
        if text == 0:
            raise ValueError("0 is not a job: ids begin at 1, -1 is your last job")
        return ById(text) if text > 0 else ByAge(-text)
    word = text.strip().removeprefix("#")
    if not word:
        raise ValueError("an empty job reference: give an id, a name, or -1 for your last job")
    if _ID.fullmatch(word):
        return ById(int(word))
    if last := _LAST.fullmatch(word):
        return ByAge(int(last.group(1)))
    if word.lstrip("-").isdigit():
        raise ValueError(f"{text!r} is not a job: ids begin at 1, -1 is your last job")
    return ByName(word)
