"""What would become of a job that is not there yet, or asked for something else. Leaves the world as it was. Pure.

Not for: the words (`service.operations.explain_job`, the CLI).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Final

from service.domain.gang_layout import GangLayout
from service.domain.reasons import Reason
from service.scheduler.calibration import Calibration
from service.scheduler.facts import WaitingJob
from service.scheduler.forecast import Forecast, forecast
from service.scheduler.jobs import PATIENCE_SECONDS
from service.scheduler.plan import decide
from service.scheduler.policies import POLICIES
from service.scheduler.scheduling_pass import PolicyOptions
from service.scheduler.world import World

LEAST_LIMIT_SECONDS: Final = 900.0
WORTH_SAYING: Final = 0.8
"""A variant that would wait for more than this share of the wait is not worth a word."""


@dataclass(frozen=True, kw_only=True)
class Outlook:
    """What the next passes would do with a job, and when it starts if not then."""

    starts_in: float | None
    """0: in the next pass. Above: once running jobs have had their minutes to end. None: in neither."""
    stops: tuple[int, ...]
    """The running jobs that would be stopped for it, by id."""
    reason: Reason | None
    """Why it would wait; None: it would not."""
    forecast: Forecast

    @property
    def seconds(self) -> float | None:
        """The likeliest time until it starts; None: not known."""
        return self.starts_in if self.starts_in is not None else self.forecast.p50


@dataclass(frozen=True, kw_only=True)
class Variant:
    """The same job asking for less."""

    kind: str
    """`gpus`, `limit` or `gpu_type`."""
    value: str
    """What to write instead: a number of GPUs, seconds, a type."""
    outlook: Outlook


def what_if(
    world: World, job: WaitingJob, now: float, policy: str, options: PolicyOptions, calibration: Calibration
) -> Outlook:
    """What would become of `job`, whether it waits already or not."""
    world.set_order(POLICIES[policy].order)
    starts, stops, reason = _next_pass(world, job, now, now, policy, options)
    if starts:
        known = Forecast(low=0.0, p50=0.0, p90=0.0, model_seconds=0.0)
        return Outlook(starts_in=0.0, stops=stops, reason=None, forecast=known)
    patient_at = max(now, job.waits_since + PATIENCE_SECONDS)
    if patient_at > now and job.held_by is None:
        starts, stops, _ = _next_pass(world, job, patient_at, now, policy, options)
    return Outlook(
        starts_in=patient_at - now if starts else None,
        stops=stops if starts else (),
        reason=reason,
        forecast=forecast(world, job, now, calibration, policy, options),
    )


def variants(
    world: World,
    job: WaitingJob,
    base: Outlook,
    now: float,
    policy: str,
    options: PolicyOptions,
    calibration: Calibration,
    *,
    advised_limit_seconds: float | None = None,
) -> tuple[Variant, ...]:
    """What the job could ask for to start clearly sooner, the soonest first."""
    if base.seconds == 0.0 or job.held_by is not None or job.home is not None:
        return ()  # one with a checkpoint goes on as it is: what asks for less would be a new job
    found = []
    for kind, value, other in _others(world, job, advised_limit_seconds):
        outlook = what_if(world, other, now, policy, options, calibration)
        if outlook.seconds is not None and (base.seconds is None or outlook.seconds < WORTH_SAYING * base.seconds):
            found.append(Variant(kind=kind, value=value, outlook=outlook))
    return tuple(sorted(found, key=lambda variant: variant.outlook.seconds or 0.0))


def _next_pass(
    world: World, job: WaitingJob, at: float, now: float, policy: str, options: PolicyOptions
) -> tuple[bool, tuple[int, ...], Reason | None]:
    """Whether a pass at that moment starts the job or frees GPUs for it; whom it stops; else why it waits."""
    world.begin()
    try:
        world.add_waiting(job, now)
        decided = decide(world, at, policy, options, explain=at == now)
    finally:
        world.undo()
    stops = tuple(stop.job_id for stop in decided.stops if stop.for_job_id == job.id)
    given = {place.job_id for place in decided.places} | {promise.job_id for promise in decided.nominations}
    if job.id in given:
        return True, stops, None
    return False, (), next((wait.reason for wait in decided.waits if wait.job_id == job.id), None)


def _others(
    world: World, job: WaitingJob, advised_limit_seconds: float | None
) -> Iterator[tuple[str, str, WaitingJob]]:
    if (half := _half(job.least)) is not None:
        yield "gpus", str(half.num_gpus), replace(job, layouts=(half,))
    if job.limit_seconds is not None:
        limits = {advised_limit_seconds} if advised_limit_seconds else {job.limit_seconds / 2, job.limit_seconds / 4}
        for limit in sorted(limits, reverse=True):
            if job.served_seconds + LEAST_LIMIT_SECONDS <= limit < job.limit_seconds:
                yield "limit", f"{limit:g}", replace(job, limit_seconds=limit)
    if job.gpu_type is not None:
        models = {gpu.model for node in world.nodes.values() for gpu in node.view.gpus}
        for model in sorted(models)[:4]:
            if job.gpu_type.casefold() not in model.casefold():
                yield "gpu_type", model, replace(job, gpu_type=model)


def _half(layout: GangLayout) -> GangLayout | None:
    """Half of its nodes, or of the GPUs on its only one."""
    if layout.num_nodes > 1:
        return replace(layout, num_nodes=layout.num_nodes // 2, rest_gpus=0)
    if layout.gpus_per_node > 1:
        share = layout.gpus_per_node // 2
        return replace(layout, gpus_per_node=share, processes_per_node=min(share, layout.processes_per_node))
    return None
