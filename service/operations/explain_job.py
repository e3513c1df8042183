"""What there is to tell of a waiting job: what is ahead of it, when it starts, what of its team's quota is in use.

From a world that is held; nothing is read from SQL. Not for: who may see what of it (`service.api.why`).
"""

from __future__ import annotations

import bisect
import heapq
import itertools
from collections.abc import Mapping
from dataclasses import dataclass

from service.scheduler.calibration import Calibration
from service.scheduler.facts import WaitingJob
from service.scheduler.forecast import Forecast, forecast, waiting_job
from service.scheduler.held_world import HeldWorld
from service.scheduler.jobs import Entry
from service.scheduler.policies import DEFAULT_POLICY, POLICIES
from service.scheduler.policies.walk import first_by_quota
from service.scheduler.queue import LaneKey
from service.scheduler.scheduling_pass import PolicyOptions
from service.scheduler.what_if import Outlook, Variant, variants, what_if
from service.scheduler.world import World

AHEAD_SHOWN = 20
FORECASTS_SHOWN = 20
"""Of a page of the queue, so many jobs get a forecast: each costs some milliseconds."""


@dataclass(frozen=True, kw_only=True)
class Standing:
    """What a job's team and owner hold of what they may hold; None: no bound."""

    held_gpus: int
    quota_gpus: int | None
    held_nodes: int
    """Whole ones."""
    quota_nodes: int | None
    cap_gpus: int | None
    user_held_gpus: int
    user_cap_gpus: int | None


@dataclass(frozen=True, kw_only=True)
class Explanation:
    """All that the held world says of one waiting job."""

    job: WaitingJob
    at: float
    """As of when, epoch seconds."""
    position: int | None
    """Its place in the queue, from 1; None while something holds it back."""
    num_ahead: int
    ahead: tuple[int, ...]
    """The last of those ahead of it, as far as they are worth showing, in the order of the queue."""
    holders: tuple[int, ...]
    """Jobs that hold GPUs."""
    left_seconds: float | None
    """Of run that it is expected to need."""
    standing: Standing
    forecast: Forecast | None
    """None: not asked for."""


def explain(held: HeldWorld, job_id: int, *, with_forecast: bool = True) -> Explanation | None:
    """What the world says of a waiting job; None: it does not wait there (yet, or any more)."""
    with held.borrow(job_id) as (world, now):
        if not world.is_waiting(job_id):
            return None
        world.set_order(POLICIES[held.policy].order)
        made = None
        if with_forecast:
            made = forecast(world, job_id, now, held.calibration, held.policy, held.options)
        return explain_in(world, job_id, now, made, held.policy)


def explain_in(
    world: World, job_id: int, now: float, made: Forecast | None, policy: str = DEFAULT_POLICY
) -> Explanation:
    """The same from a world at hand."""
    world.settle_turns()
    job = waiting_job(world, job_id)
    entry = world.queue.entries.get(job_id)
    num_ahead, ahead = _ahead_of(world, entry, policy) if entry is not None else (0, ())
    known = entry or world.nominated.get(job_id)
    return Explanation(
        job=job,
        at=now,
        position=None if job_id in world.held else num_ahead + 1,
        num_ahead=num_ahead,
        ahead=ahead,
        holders=tuple(itertools.islice(world.runs, AHEAD_SHOWN)),
        left_seconds=None if known is None else known.left,
        standing=standing_in(world, job),
        forecast=made,
    )


def standing_in(world: World, job: WaitingJob) -> Standing:
    """What the job's team and owner hold."""
    team, user = world.teams.get(job.team_id), world.users.get(job.user_id)
    return Standing(
        held_gpus=world.team_gpus.get(job.team_id, 0),
        quota_gpus=None if team is None else team.quota_gpus,
        held_nodes=world.team_nodes.get(job.team_id, 0),
        quota_nodes=None if team is None else team.quota_nodes,
        cap_gpus=None if team is None else team.cap_gpus,
        user_held_gpus=world.user_gpus.get(job.user_id, 0),
        user_cap_gpus=None if user is None else user.cap_gpus,
    )


def _ahead_of(world: World, entry: Entry, policy: str) -> tuple[int, tuple[int, ...]]:
    """How many jobs of the queue go before, those that are nominated included, and the nearest of them."""
    first, places = _first_of(world, policy)
    known = next((place for place, other in enumerate(first) if other is entry), None)
    before = [*world.nominated.values(), *first[:known]]
    if known is not None:
        return len(before), tuple(other.id for other in before[-AHEAD_SHOWN:])
    count, nearest = len(before), []
    for lane in world.queue.lanes.values():
        start, place = places.get(lane.key, 0), bisect.bisect_left(lane.entries, (entry.turn,))
        count += max(0, place - start)
        nearest += [other for _, _, other in lane.entries[max(start, place - AHEAD_SHOWN) : place]]
    nearest = heapq.nlargest(AHEAD_SHOWN, nearest, key=lambda other: other.turn)
    return count, tuple(other.id for other in [*before, *reversed(nearest)][-AHEAD_SHOWN:])


def _first_of(world: World, policy: str) -> tuple[list[Entry], Mapping[LaneKey, int]]:
    """Whom quotas put before the order of turns, and how many of each lane they are."""
    return first_by_quota(world) if world.has_quotas and POLICIES[policy].knows_standing else ([], {})


@dataclass(frozen=True, kw_only=True)
class Waiting:
    """One job of the queue."""

    id: int
    position: int | None
    """From 1; None while something holds it back."""
    left_seconds: float | None
    forecast: Forecast | None
    """None: beyond those for which a look at the queue works one out."""


@dataclass(frozen=True, kw_only=True)
class QueuePage:
    """A part of the queue."""

    at: float
    count: int
    """Of all that wait."""
    jobs: tuple[Waiting, ...]


def queue_page(held: HeldWorld, after: int, limit: int) -> QueuePage:
    """The jobs after a position: those with promised GPUs, the queue in the order of the policy, then the held ones."""
    with held.borrow() as (world, now):
        world.set_order(POLICIES[held.policy].order)
        entries = queue_in(world, held.policy)
        page = [
            Waiting(
                id=entry.id,
                position=after + number,
                left_seconds=entry.left,
                forecast=forecast(world, entry.job, now, held.calibration, held.policy, held.options)
                if number <= FORECASTS_SHOWN
                else None,
            )
            for number, entry in enumerate(entries[after : after + limit], start=1)
        ]
        start = max(0, after - len(entries))
        rest = sorted(world.held)[start : start + limit - len(page)]
        page += [Waiting(id=job_id, position=None, left_seconds=None, forecast=None) for job_id in rest]
        return QueuePage(at=now, count=len(entries) + len(world.held), jobs=tuple(page))


def queue_in(world: World, policy: str = DEFAULT_POLICY) -> list[Entry]:
    """All jobs of the queue in the order of the policy: those that have GPUs promised first."""
    world.settle_turns()
    first, places = _first_of(world, policy)
    lanes = ([entry for _, _, entry in lane.entries[places.get(lane.key, 0) :]] for lane in world.queue.lanes.values())
    return [*world.nominated.values(), *first, *heapq.merge(*lanes, key=lambda entry: entry.turn)]


def look(held: HeldWorld, job: WaitingJob, advised_limit_seconds: float | None) -> tuple[Outlook, tuple[Variant, ...]]:
    """What would become of a job, and of one that asks for less. Nothing is changed."""
    with held.borrow() as (world, now):
        return _look(world, job, now, held.policy, held.options, held.calibration, advised_limit_seconds)


def _look(
    world: World,
    job: WaitingJob,
    now: float,
    policy: str,
    options: PolicyOptions,
    calibration: Calibration,
    advised_limit_seconds: float | None,
) -> tuple[Outlook, tuple[Variant, ...]]:
    base = what_if(world, job, now, policy, options, calibration)
    found = variants(world, job, base, now, policy, options, calibration, advised_limit_seconds=advised_limit_seconds)
    return base, found
