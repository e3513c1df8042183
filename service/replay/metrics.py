"""Figures of one replay, by the rules that all policies are compared by. Pure.

Times in hours, shares in percent. Not for: collecting what happened (`service.replay.run_record`).
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from service.replay.run_record import RunRecord
from service.replay.traces import TraceJob

HOUR: Final = 3600.0
DAY: Final = 86400.0
SHORT_SECONDS: Final = 600
"""A job counts as at least so long in its slowdown: minutes of waiting are no disaster for one of a second."""
BIG_GPUS: Final = 8
STARVED_SECONDS: Final = 24 * HOUR
STARVED_FACTOR: Final = 3
MIN_TEAM_JOBS: Final = 20
"""Teams with fewer jobs are left out of comparisons between teams: one unlucky job is no policy."""


@dataclass(frozen=True, kw_only=True)
class Figures:
    """What a replay comes to. JCT: job completion time, from submission to end."""

    jobs: int
    mean_jct_hours: float
    median_jct_hours: float
    p95_jct_hours: float
    p99_jct_hours: float
    mean_wait_hours: float
    """JCT less the job's duration: restores count as waiting."""
    max_wait_hours: float
    mean_slowdown: float
    """(JCT, at least 10 min) / (duration, at least 10 min)."""
    span_days: float
    """From the first submission to the last end."""
    utilisation_percent: float
    """GPU-seconds run, restores included, between first and last submission, of those that the pool had."""
    idle_percent: float
    """GPUs that were free and that waiting jobs asked for, of all, while any job waited in the same window."""
    preemptions_per_job: float
    """Moves included."""
    max_preemptions: int
    """Of one job."""
    big_after_1h_percent: float
    """Of the jobs of 8 or more GPUs, those that first started over an hour after submission."""
    big_after_24h_percent: float
    starved_percent: float
    """Jobs that waited in all for more than 24 h and three times their duration."""
    jain: float | None
    """Jain's index of the teams' mean slowdowns, 1: all alike. None with a single team."""
    worst_team_slowdown: float | None
    """The largest mean slowdown of a team. None with a single team."""


def figures_of(record: RunRecord) -> Figures:
    """The figures of a finished run."""
    jobs, gpus = record.trace.jobs, record.surroundings.gpus
    ended_at = [_known(at) for at in record.ended_at]
    jcts = [at - job.submitted_at for at, job in zip(ended_at, jobs, strict=True)]
    waits = [jct - job.duration for jct, job in zip(jcts, jobs, strict=True)]
    in_order = sorted(jcts)
    big = [
        _known(at) - job.submitted_at
        for at, job in zip(record.first_started_at, jobs, strict=True)
        if job.gpus >= BIG_GPUS
    ]
    slowdowns = [slowdown(job, jct) for job, jct in zip(jobs, jcts, strict=True)]
    starved = sum(
        wait > max(STARVED_SECONDS, STARVED_FACTOR * job.duration) for wait, job in zip(waits, jobs, strict=True)
    )
    window = record.trace.last_submission - record.trace.first_submission
    span = max(ended_at) - record.trace.first_submission
    by_team = team_slowdowns(jobs, slowdowns)
    return Figures(
        jobs=len(jobs),
        mean_jct_hours=mean(jcts) / HOUR,
        median_jct_hours=percentile(in_order, 50) / HOUR,
        p95_jct_hours=percentile(in_order, 95) / HOUR,
        p99_jct_hours=percentile(in_order, 99) / HOUR,
        mean_wait_hours=mean(waits) / HOUR,
        max_wait_hours=max(waits) / HOUR,
        mean_slowdown=mean(slowdowns),
        span_days=span / DAY,
        utilisation_percent=100.0 * record.window_gpu_seconds / (gpus * window) if window else 0.0,
        idle_percent=100.0 * record.idle_gpu_seconds / (gpus * (record.waiting_seconds or 1.0)),
        preemptions_per_job=sum(record.num_stops) / len(jobs),
        max_preemptions=max(record.num_stops),
        big_after_1h_percent=_share_above(big, HOUR),
        big_after_24h_percent=_share_above(big, DAY),
        starved_percent=100.0 * starved / len(jobs),
        jain=jain_index(by_team) if len(by_team) > 1 else None,
        worst_team_slowdown=max(by_team) if len(by_team) > 1 else None,
    )


def slowdown(job: TraceJob, jct: float) -> float:
    """The bounded slowdown of a job."""
    return max(1.0, jct / max(job.duration, SHORT_SECONDS))


def team_slowdowns(jobs: Sequence[TraceJob], slowdowns: Sequence[float]) -> list[float]:
    """The mean slowdown of each team that has at least MIN_TEAM_JOBS jobs."""
    of_team: defaultdict[str, list[float]] = defaultdict(list)
    for job, value in zip(jobs, slowdowns, strict=True):
        of_team[job.team].append(value)
    return [mean(values) for _, values in sorted(of_team.items()) if len(values) >= MIN_TEAM_JOBS]


def jain_index(values: Sequence[float]) -> float:
    """(sum)² / (n × sum of squares): 1 when all are equal, 1/n when one has everything."""
    return sum(values) ** 2 / (len(values) * sum(value * value for value in values))


def percentile(in_order: Sequence[float], percent: float) -> float:
    """The value that `percent` of the sorted values do not exceed, interpolated between neighbours."""
    position = (len(in_order) - 1) * percent / 100.0
    below = int(position)
    above = min(below + 1, len(in_order) - 1)
    return in_order[below] + (position - below) * (in_order[above] - in_order[below])


def mean(values: Sequence[float]) -> float:
    """The average of at least one value."""
    return math.fsum(values) / len(values)


def _share_above(values: Sequence[float], bound: float) -> float:
    return 100.0 * sum(value > bound for value in values) / len(values) if values else 0.0


def _known(at: float | None) -> float:
    if at is None:
        raise ValueError("a job has not ended: figures are made of finished runs")
    return at
