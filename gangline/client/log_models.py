"""Records of what a job wrote: log pages and lines, gaps, curves. Frozen, with the field names of REST.

Not for: jobs themselves (`gangline.client.models`, whose `build` makes these too).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, kw_only=True)
class LogPage:
    """A piece of one rank's log. `next_offset` is the byte to ask from next; `end`: nothing will ever follow."""

    rank: int
    attempt: int | None = None
    offset: int = 0
    next_offset: int = 0
    size: int = 0
    text: str = ""
    end: bool = False
    state: str = ""
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class LogLine:
    """What a rank wrote, a whole line or (last, or very long) a part of one, with its line end. `offset` in bytes."""

    rank: int
    text: str
    offset: int
    attempt: int | None = None


@dataclass(frozen=True, kw_only=True)
class Gap:
    """Bytes `start` to `end` of a rank's log are gone (cut or purged)."""

    rank: int
    start: int
    end: int
    attempt: int | None = None


@dataclass(frozen=True, kw_only=True)
class Series:
    """One metric of an attempt, reduced by the server: per bucket the step and last, lowest and highest value."""

    step: tuple[float, ...] = ()
    last: tuple[float, ...] = ()
    min: tuple[float, ...] = ()
    max: tuple[float, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Metrics:
    """Curves of a job's attempt by metric name."""

    attempt: int | None
    keys: dict[str, Series]
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
