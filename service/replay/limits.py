"""What the traces do not tell and a replay assumes: limits, who may be preempted, who reports and how well. Pure.

Everything is drawn from generators seeded by (seed, row), each kind from its own: two policies of one seed see the
same users, and a larger share of reporting jobs contains the smaller one.
"""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Final

from service.replay.traces import TraceJob

MINUTE, HOUR, DAY = 60, 3600, 86400
MENU: Final = (15 * MINUTE, HOUR, 4 * HOUR, 12 * HOUR, DAY, 2 * DAY, 4 * DAY, 7 * DAY, 14 * DAY, 60 * DAY)
"""The limits that people choose from."""
LIMIT_KINDS: Final = ("human", "true", "x5", "recorded")
"""`human`: too long by a factor of 1 to 10 and rounded up to the menu. `true`: the real time. `x5`: five times that.
`recorded`: the limit in the source, never below the real time; a job without one there has none."""


@dataclass(frozen=True, kw_only=True)
class Assumptions:
    """What is assumed of the users of a trace."""

    limits: str = "human"
    preemptible_share: float | None = 1.0
    """None: those that the source says may be."""
    reporting_share: float | None = 1.0
    """None: those that the source says did."""
    report_error: float = 0.2
    """A report is off by a factor from 1 - this to 1 + this, drawn for each run of a job."""


def human_limit(seed: int, job: TraceJob) -> int:
    """Seconds of the limit that somebody might have given: real time x 10^U(0, 1), rounded up to the menu.

    Above the menu it is the longest of it; never below the real time.
    """
    wish = job.duration * 10.0 ** random.Random(f"{seed}:{job.row}").random()
    chosen = next((limit for limit in MENU if limit >= wish), MENU[-1])
    return max(chosen, job.duration)


def limit_of(kind: str, seed: int, job: TraceJob) -> int | None:
    """Seconds of the job's hard limit under one of LIMIT_KINDS; None: it has none."""
    if kind == "true":
        return job.duration
    if kind == "x5":
        return 5 * job.duration
    if kind == "recorded":
        return None if job.limit is None else max(job.limit, job.duration)
    return human_limit(seed, job)


def is_preemptible(share: float | None, seed: int, job: TraceJob) -> bool:
    """Whether a job may be preempted, where `share` (0 to 1) of all may; None: as recorded."""
    return _recorded(job.is_preemptible, job) if share is None else _is_among(share, "preemptible", seed, job.row)


def will_report(share: float | None, seed: int, job: TraceJob) -> bool:
    """Whether a job reports its progress, where `share` (0 to 1) of all do; None: as recorded."""
    return _recorded(job.reports, job) if share is None else _is_among(share, "reports", seed, job.row)


def _recorded(value: bool | None, job: TraceJob) -> bool:
    if value is None:
        raise ValueError(f"the source of job {job.job_id} does not tell it: only a history is replayed as recorded")
    return value


def _is_among(share: float, kind: str, seed: int, row: int) -> bool:
    if share >= 1.0:
        return True
    return share > 0.0 and random.Random(f"{kind}:{seed}:{row}").random() < share


def report_factor(error: float, seed: int, row: int, run: int) -> float:
    """Reported over real time left in the job's run number `run`, from 0."""
    if error == 0.0:
        return 1.0
    return random.Random(f"error:{seed}:{row}:{run}").uniform(1.0 - error, 1.0 + error)
