"""`plan(world, now)`: what should happen now, as data. Pure: no clock, database or random.

A gang starts whole or not at all, and holds nothing while it waits. Each job that does not start gets a reason. Not
for: who goes first (`service.scheduler.policies`), nor the words of reasons (`service.scheduler.why`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from service.domain.reasons import Reason
from service.scheduler.facts import WaitingJob
from service.scheduler.jobs import Entry
from service.scheduler.policies import DEFAULT_POLICY, POLICIES
from service.scheduler.scheduling_pass import Nominate, Pass, Place, PolicyOptions, Refusal, Stop
from service.scheduler.why import back_off, reason_for, reason_of_nomination
from service.scheduler.world import World

__all__ = ["Nominate", "Place", "Plan", "PolicyOptions", "Refusal", "Stop", "Wait", "decide", "plan"]


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Leave this job waiting, for this reason."""

    job_id: int
    reason: Reason


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions of one pass."""

    stops: Sequence[Stop]
    places: Sequence[Place]
    nominations: Sequence[Nominate]
    waits: tuple[Wait, ...] = ()
    """Every job that goes on waiting; empty where reasons were not asked for."""


def plan(
    world: World,
    now: float,
    policy: str = DEFAULT_POLICY,
    options: PolicyOptions | None = None,
    *,
    explain: bool = True,
) -> Plan:
    """Decide for every waiting job. `now` is epoch seconds of the database clock. Leaves the world as it was."""
    world.set_order(POLICIES[policy].order)
    world.begin()
    try:
        return decide(world, now, policy, options, explain=explain)
    finally:
        world.undo()


def decide(
    world: World,
    now: float,
    policy: str = DEFAULT_POLICY,
    options: PolicyOptions | None = None,
    *,
    explain: bool = False,
) -> Plan:
    """Like `plan`, and leaves the decisions in the world: placed jobs run, stopped ones are stopping."""
    chosen = POLICIES[policy]
    world.set_order(chosen.order)
    world.release_due(now)
    world.settle_turns()
    pass_ = Pass(world, now, options or PolicyOptions())
    pass_.start_ready()
    chosen.run(pass_)
    waits = tuple(_waits(pass_)) if explain else ()
    return Plan(stops=pass_.stops, places=pass_.places, nominations=pass_.nominations, waits=waits)


def _waits(pass_: Pass) -> Iterator[Wait]:
    """The reason of every job that goes on waiting, found once for each lane."""
    world, now = pass_.world, pass_.now
    refused = {id(refusal.lane): refusal for refusal in reversed(pass_.refusals)}
    for lane in world.queue.lanes.values():
        refusal = refused.get(id(lane))
        entries: list[Entry] = [entry for _, _, entry in lane.entries]
        for entry, reason in reason_for(pass_, lane, entries, refusal):
            yield Wait(job_id=entry.id, reason=reason)
    for job in world.held.values():
        yield Wait(job_id=job.id, reason=_of_held(job, now))
    for job_id in world.nominated:
        yield Wait(job_id=job_id, reason=reason_of_nomination(world, world.nominations[job_id], now))


def _of_held(job: WaitingJob, now: float) -> Reason:
    if job.held_by is not None:
        return job.held_by
    return back_off((job.not_before or now) - now)
