"""What a user's own ended jobs say of the time limit that they ask for now. Pure.

Not for: reading those jobs (`service.operations.load_limit_history`), nor what a shorter limit would gain (`what_if`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

HISTORY_JOBS: Final = 40
"""How many of the user's last ended jobs of about the same size are looked at."""
LEAST_JOBS: Final = 5
"""Fewer tell nothing."""
ENOUGH_SHARE: Final = 0.95
"""Of those jobs, how many the advised limit must have been enough for."""
ROOM: Final = 1.25
"""The advised limit is longer than what was enough by this factor."""
WORTH_SAYING: Final = 0.7
"""A limit above this share of the one asked for is not worth a word."""
SENSIBLE_LIMITS: Final = tuple(
    minutes * 60.0
    for minutes in (15, 30, 60, 120, 180, 240, 360, 480, 720, 1080, 1440, 2160, 2880, 4320, 5760, 10080, 20160)
)
"""Limits that people choose: 15 minutes to 14 days."""
SIZE_FACTOR: Final = 2
"""Jobs of half to twice as many GPUs are of about the same size."""


@dataclass(frozen=True, kw_only=True)
class EndedJob:
    """One job that ran to its end by itself."""

    limit_seconds: float
    run_seconds: float
    """Useful run of all its attempts together."""


@dataclass(frozen=True, kw_only=True)
class LimitAdvice:
    """A limit that would have been enough."""

    num_jobs: int
    """That it rests on."""
    used_share: float
    """Median of what they used of their limits, 0 to 1."""
    limit_seconds: float
    """The advised one."""
    num_enough: int
    """Of those jobs, how many would have ended within it if it stood in the same proportion to their limits."""

    def sentence(self, gained_seconds: float | None = None) -> str:
        """For the user; `gained_seconds`: how much sooner a job would start with it, None: not known."""
        whose = f"Your last {self.num_jobs} jobs of about this size used {self.used_share:.0%} of their limit"
        better = f"{words_of(self.limit_seconds)} would have been enough for {self.num_enough} of them"
        gained = ""
        if gained_seconds is not None and gained_seconds >= 60.0:
            gained = f" and would start about {words_of(gained_seconds)} sooner"
        return f"{whose}; {better}{gained}."


def advise_limit(history: Sequence[EndedJob], limit_seconds: float | None) -> LimitAdvice | None:
    """A shorter limit for a job that asks for `limit_seconds`; None: nothing to say.

    `history` are ended jobs that had a limit, newest first. A job that used a fifth of its limit speaks for a fifth of
    the new one: people are wrong by about the same factor each time.
    """
    ended = [job for job in history[:HISTORY_JOBS] if job.limit_seconds > 0.0]
    if limit_seconds is None or len(ended) < LEAST_JOBS:
        return None
    shares = sorted(min(1.0, job.run_seconds / job.limit_seconds) for job in ended)
    enough = shares[min(len(shares) - 1, int(len(shares) * ENOUGH_SHARE))]
    wanted = enough * ROOM * limit_seconds
    advised = next((limit for limit in SENSIBLE_LIMITS if limit >= wanted), None)
    if advised is None or advised > WORTH_SAYING * limit_seconds:
        return None
    return LimitAdvice(
        num_jobs=len(shares),
        used_share=shares[len(shares) // 2],
        limit_seconds=advised,
        num_enough=sum(share * limit_seconds <= advised for share in shares),
    )


def words_of(seconds: float) -> str:
    """A length of time in its largest unit: `45 s`, `20 min`, `4 h`, `2 days`; halves of hours are kept."""
    if seconds < 90.0:
        return f"{round(seconds)} s"
    if seconds < 90.0 * 60.0:
        return f"{round(seconds / 60.0)} min"
    if seconds < 48.0 * 3600.0:
        return f"{round(seconds / 1800.0) / 2:g} h"
    return f"{round(seconds / 43200.0) / 2:g} days"
