"""Priorities of jobs: numbers, and the words for them. Pure."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

LEAST_PRIORITY: Final = -100
MOST_PRIORITY: Final = 100
"""Of everybody; above it is only `top`."""
TOP_PRIORITY: Final = 1_000
"""Only for users whom an admin has granted it."""
PRIORITY_WORDS: Final[Mapping[str, int]] = {"low": -50, "normal": 0, "high": 50, "top": TOP_PRIORITY}


def read_priority(value: Any) -> int:
    """The number that a word or a number means. ValueError says what is wrong; after `; ` what to write instead."""
    if isinstance(value, str) and value in PRIORITY_WORDS:
        return PRIORITY_WORDS[value]
    if isinstance(value, bool) or not isinstance(value, int):
        words = ", ".join(PRIORITY_WORDS)
        raise ValueError(f"must be one of {words}, or a whole number from {LEAST_PRIORITY} to {MOST_PRIORITY}")
    if value > MOST_PRIORITY:
        raise ValueError(f"must be at most {MOST_PRIORITY}; above that there is only top, which an admin grants")
    if value < LEAST_PRIORITY:
        raise ValueError(f"must be at least {LEAST_PRIORITY}")
    return value


def is_top(priority: int) -> bool:
    """Whether it is above what everybody may use."""
    return priority > MOST_PRIORITY


def priority_text(priority: int) -> str:
    """The word for a number where there is one, else the number."""
    return next((word for word, number in PRIORITY_WORDS.items() if number == priority), str(priority))
