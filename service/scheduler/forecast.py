"""When a waiting job will start: a range, from the policy run forward and from experience with past forecasts. Pure.

Not for: promises (those read hard limits, `promises`), nor whether it starts right now (`what_if`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from service.scheduler.calibration import LEAST_SECONDS, SOON_SECONDS, Calibration, size_class
from service.scheduler.facts import WaitingJob
from service.scheduler.look_ahead import look_ahead
from service.scheduler.policies import DEFAULT_POLICY, POLICIES
from service.scheduler.scheduling_pass import PolicyOptions
from service.scheduler.world import World

LOW_SHARE: Final = 0.005
HIGH_SHARE: Final = 0.943
"""The range shown: from the one share of the jobs of a kind to the other, of those that wait for over ten minutes."""
HIGH_SHARE_SOON: Final = 0.95
"""The same of jobs that should start within minutes and do not: only these are interested in the far end."""
NEAR_SECONDS: Final = 240.0
"""From there on a middle of ten minutes is said at least: patience and protection end then, or not for long."""
USUAL_REACH: Final = 3.7
"""Far end over middle, before there is experience; it was 3.0 to 3.9 in all replays, for waits of any length."""
USUAL_REACH_SOON: Final = 25.0
"""The same of jobs that should start within minutes: of some, hours come after all."""
LEAST_REACH: Final = 3.3
"""The same at least: the last hundred waits were alike only because no crowd had come yet."""


@dataclass(frozen=True, kw_only=True)
class Forecast:
    """Seconds from now until a job starts; all None where that is not known."""

    low: float | None = None
    p50: float | None = None
    """As many jobs of this kind start earlier as later; what is foretold as four to ten minutes is said as ten."""
    p90: float | None = None
    why_unknown: str | None = None
    model_seconds: float | None = None
    """What running the policy forward gave, before experience mended it."""
    size: int = 0
    """The size class that it was mended by."""

    @property
    def is_known(self) -> bool:
        """Whether there is a range."""
        return self.p50 is not None


def forecast(
    world: World,
    job: WaitingJob | int,
    now: float,
    calibration: Calibration,
    policy: str = DEFAULT_POLICY,
    options: PolicyOptions | None = None,
) -> Forecast:
    """When a job that waits, or would wait, starts. Leaves the world as it is. Raises KeyError: it does not wait."""
    world.set_order(POLICIES[policy].order)
    if isinstance(job, int):
        job = waiting_job(world, job)
    if job.held_by is not None and job.not_before is None:
        return Forecast(why_unknown=f"{job.held_by.text} Nobody can tell when that ends.")
    pause = max(0.0, (job.not_before or 0.0) - now)
    if not world.nodes:
        return Forecast(why_unknown="The pool has no nodes.")
    from_now = job if job.not_before is None else _without_pause(job)
    prospect = look_ahead(world, from_now, now, policy, options or PolicyOptions())
    if prospect is None:
        return Forecast(why_unknown="As the pool is now it never starts, whatever ends.")
    size = size_class(job.least.num_gpus, max((node.size for node in world.nodes.values()), default=0))
    return mended(prospect.seconds, size, calibration, now, pause)


def mended(seconds: float, size: int, calibration: Calibration, now: float, pause: float = 0.0) -> Forecast:
    """A range from what the model gave and how far it was off before."""
    if seconds == 0.0:
        return Forecast(low=pause, p50=pause, p90=pause, model_seconds=0.0, size=size)
    base, is_late = max(LEAST_SECONDS, seconds), seconds > SOON_SECONDS
    low, middle = (base * factor for factor in calibration.factors(size, seconds, (LOW_SHARE, 0.5), now))
    # Who starts within minutes after all needs no forecast: the far end, and the middle of a longer wait, are for those
    # who do not.
    shares = (0.5, HIGH_SHARE if is_late else HIGH_SHARE_SOON)
    middle_of_late, high = calibration.late_seconds(size, seconds, shares, now)
    trust, trust_in_late = (calibration.trust(size, seconds, are_late=late) for late in (is_late, True))
    p50 = _between(base, middle_of_late if is_late else middle, trust)
    if seconds > NEAR_SECONDS:
        p50 = max(p50, SOON_SECONDS)
    usual = p50 * (USUAL_REACH if is_late else USUAL_REACH_SOON)
    p90 = max(LEAST_REACH * p50, _between(usual, high, trust_in_late))
    return Forecast(
        low=pause + min(low, p50),
        p50=pause + p50,
        p90=pause + p90,
        model_seconds=seconds,
        size=size,
    )


def _between(usual: float, learnt: float, trust: float) -> float:
    """From what is usual to what was learnt, on the logarithmic scale, as far as that is trusted (0 to 1)."""
    return float(usual ** (1.0 - trust) * learnt**trust)


def waiting_job(world: World, job_id: int) -> WaitingJob:
    """The job as it waits. Raises KeyError."""
    entry = world.queue.entries.get(job_id) or world.nominated.get(job_id)
    return entry.job if entry is not None else world.held[job_id]


def _without_pause(job: WaitingJob) -> WaitingJob:
    return replace(job, not_before=None, held_by=None)
