"""Whether more time for a running job breaks a promise: a start by hard limits that would come later. Pure.

Promises are made to the first job that does not fit, by policies that reserve (`fifo+easy`, and `time-left` where jobs
are not stopped for others), and to the first promoted one. A nomination cannot be delayed so: those who leave for it
are stopping already. Not for: estimates, on which nobody relies.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from service.scheduler.facts import WaitingJob
from service.scheduler.policies import POLICIES
from service.scheduler.queue import Lane
from service.scheduler.quota import takes_whole_nodes
from service.scheduler.reservation import latest_end, reserve
from service.scheduler.scheduling_pass import Pass, PolicyOptions
from service.scheduler.world import World

RESERVING: Final = "fifo+easy"


@dataclass(frozen=True, kw_only=True)
class BrokenPromise:
    """A job that would start later than promised."""

    job_id: int
    promised_at: float
    """When it starts at the latest as things are, epoch seconds."""
    then_at: float | None
    """With the longer limit; None: nobody could say any more."""


def find_broken_promise(
    world: World, now: float, policy: str, options: PolicyOptions, job_id: int, limit_seconds: float
) -> BrokenPromise | None:
    """The promise that a limit of `limit_seconds` in all for a running job breaks, or None. Leaves the world as it
    was."""
    run = world.runs.get(job_id)
    if run is None:
        return None
    chosen = POLICIES[policy]
    world.set_order(chosen.order)
    world.begin()
    try:
        world.release_due(now)
        world.settle_turns()
        pass_ = Pass(world, now, options)
        pass_.start_ready()
        chosen.run(pass_)
        found = _reserved(pass_, is_easy=chosen.name == RESERVING)
        if found is None:
            return None
        lane, job = found
        longer = run.limit_end + limit_seconds - (run.job.limit_seconds or 0.0)
        before = reserve(world, lane.index, job, now, lambda other: latest_end(world, other, now))
        if before is None:
            return None
        after = reserve(
            world, lane.index, job, now, lambda other: longer if other.id == job_id else latest_end(world, other, now)
        )
    finally:
        world.undo()
    if after is not None and after.at <= before.at:
        return None
    return BrokenPromise(job_id=job.id, promised_at=before.at, then_at=None if after is None else after.at)


def _reserved(pass_: Pass, *, is_easy: bool) -> tuple[Lane, WaitingJob] | None:
    """The job that the pass has reserved for: the first promoted one that did not fit; by policies that reserve for
    others too, the first of those (without easy, of those with whole nodes)."""
    for refusal in pass_.refusals:
        if refusal.entry.is_promoted and not is_easy:
            return refusal.lane, replace(refusal.entry.job)
    if not is_easy and pass_.options.preemption == "all":
        return None
    for refusal in pass_.refusals:
        if refusal.code == "no_room" and (is_easy or takes_whole_nodes(refusal.lane)):
            return refusal.lane, replace(refusal.entry.job)
    return None
