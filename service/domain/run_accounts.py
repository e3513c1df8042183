"""What a run that has ended was good for: how much of it is kept, what it lost, and what the job still needs. Pure.

What is kept is what the next attempt resumes from: all up to the last durable checkpoint. Not for: GPU-seconds held
(they are counted as GPUs are freed), nor whether there is a next attempt (`service.domain.outcomes`).
"""

from __future__ import annotations

from dataclasses import dataclass

from service.domain.progress import Progress


@dataclass(frozen=True, kw_only=True)
class EndedRun:
    """An attempt that has ended; times in epoch seconds."""

    created_at: float
    """When it got its GPUs."""
    running_at: float | None
    """When all its ranks ran; None: they never did."""
    ended_at: float
    checkpointed_at: float | None
    """Its last durable checkpoint, as far as it counts."""
    num_gpus: int
    progress: Progress | None
    is_last: bool
    """No other attempt follows, so that nothing of it is done again."""


@dataclass(frozen=True, kw_only=True)
class RunAccounts:
    """What is kept of a run, and what is lost."""

    useful_seconds: float
    lost_gpu_seconds: float
    """Done again by the next attempt, and the time until that is where this one was."""
    measured_left_seconds: float | None
    """What the job needs from there on, by what the run reported; None: it did not report long enough."""


def account_run(run: EndedRun, *, least_report_seconds: float) -> RunAccounts:
    """`least_report_seconds`: how long a run must have reported for its reports to be believed."""
    if run.running_at is None:
        lost = run.num_gpus * (run.ended_at - run.created_at)
        return RunAccounts(useful_seconds=0.0, lost_gpu_seconds=lost, measured_left_seconds=None)
    kept_until = run.ended_at if run.is_last else max(run.running_at, run.checkpointed_at or 0.0)
    start_seconds = run.running_at - run.created_at
    lost_seconds = run.ended_at - kept_until + start_seconds
    return RunAccounts(
        useful_seconds=max(0.0, kept_until - run.running_at),
        lost_gpu_seconds=run.num_gpus * max(0.0, lost_seconds),
        measured_left_seconds=_left(run.progress, run.running_at, kept_until, least_report_seconds),
    )


def _left(progress: Progress | None, running_at: float, kept_until: float, least_seconds: float) -> float | None:
    if progress is None or progress.updated_at - running_at < least_seconds:
        return None
    left = progress.eta_seconds(progress.updated_at)
    return None if left is None else max(0.0, left - (kept_until - progress.updated_at))
