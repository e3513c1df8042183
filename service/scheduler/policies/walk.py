"""The walk along the queue that policies share: lanes by the turns of their heads, until nothing more can fit. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable
from enum import Enum

from service.scheduler.jobs import Entry
from service.scheduler.queue import Lane, LaneKey
from service.scheduler.quota import Standing, bound_of, count_in, standing_of
from service.scheduler.scheduling_pass import Pass
from service.scheduler.world import World


class Result(Enum):
    """What came of an attempt to let a job start. All but the first were refused with a reason."""

    GIVEN = "given"
    REFUSED = "refused"
    """Nobody who asks at least as much is looked at again in this pass."""
    PASSED_BY = "passed by"
    """It does not start because of itself alone: the next of its lane may."""
    NEVER = "never"
    """It could not start on the empty pool either, so it holds nobody up."""


Attempt = Callable[[Pass, Lane, Entry, Standing], Result]
Key = tuple[float, ...]
BLOCKED_CODE = "behind"
MOST_PASSED_BY = 100
"""Of each lane in one pass."""


def walk(pass_: Pass, attempt: Attempt, *, is_strict: bool = False) -> None:
    """Give each lane its turns. A lane that asks at least what was refused before is not looked at again in this pass.

    `is_strict`: nobody passes a job that was refused, as far as both may use the same nodes.
    """
    world = pass_.world
    heap: list[tuple[Key, int, Lane, Standing, int]] = []
    for number, lane in enumerate(world.queue.lanes.values()):
        standing = standing_of(world, lane)
        heap.append((_key(lane, standing, 0), number, lane, standing, 0))
    heapq.heapify(heap)
    # Where quotas tell teams apart they may stop different jobs: what one was refused says nothing of another.
    refused: defaultdict[int | None, list[Lane]] = defaultdict(list)
    while heap:
        key, number, lane, standing, place = heap[0]
        if place >= len(lane.entries):
            heapq.heappop(heap)
            continue
        if world.has_quotas:  # what was given away since may have used up the quota
            standing = standing_of(world, lane)
        fresh = _key(lane, standing, place)
        if fresh != key:
            heapq.heapreplace(heap, (fresh, number, lane, standing, place))
            continue
        entry = lane.entries[place][2]
        kin = refused[lane.team_id if world.has_quotas and not is_strict else None]
        if not _may_try(pass_, lane, entry, standing, kin, is_strict):
            heapq.heappop(heap)
            continue
        result = attempt(pass_, lane, entry, standing)
        if result is Result.PASSED_BY and place < MOST_PASSED_BY:
            heapq.heapreplace(heap, (key, number, lane, standing, place + 1))
        elif result is not Result.GIVEN:
            heapq.heappop(heap)
        if result is Result.REFUSED:
            kin.append(lane)


def first_by_quota(world: World) -> tuple[list[Entry], dict[LaneKey, int]]:
    """The jobs of the queue that `walk` comes to before all that is left borrows, if each gets what it asks for.

    Of each lane also how many they are: all behind them come in the order of their turns. What a job would take counts,
    so whoever comes beyond the quota of the same team borrows.
    """
    known = world.team_gpus, world.team_nodes, world.user_gpus
    world.team_gpus, world.team_nodes, world.user_gpus = (counts.copy() for counts in known)
    try:
        return _first_by_quota(world)
    finally:
        world.team_gpus, world.team_nodes, world.user_gpus = known


def _first_by_quota(world: World) -> tuple[list[Entry], dict[LaneKey, int]]:
    first: list[Entry] = []
    places: defaultdict[LaneKey, int] = defaultdict(int)
    heap = []
    for number, lane in enumerate(world.queue.lanes.values()):
        standing = standing_of(world, lane)
        heap.append((_key(lane, standing, 0), number, lane, standing))
    heapq.heapify(heap)
    num_in_quota = sum(item[3] is Standing.IN_QUOTA for item in heap)
    while num_in_quota:
        key, number, lane, before = heap[0]
        standing = standing_of(world, lane)
        num_in_quota -= before is not standing  # whoever borrows goes on borrowing
        fresh = _key(lane, standing, places[lane.key])
        if fresh != key:
            heapq.heapreplace(heap, (fresh, number, lane, standing))
            continue
        first.append(lane.entries[places[lane.key]][2])
        if bound_of(world, lane, standing) is None:
            count_in(world, lane)
        places[lane.key] += 1
        if places[lane.key] < len(lane.entries):
            heapq.heapreplace(heap, (_key(lane, standing, places[lane.key]), number, lane, standing))
        else:
            heapq.heappop(heap)
            num_in_quota -= standing is Standing.IN_QUOTA
    return first, places


def _may_try(pass_: Pass, lane: Lane, entry: Entry, standing: Standing, refused: list[Lane], is_strict: bool) -> bool:
    """Whether neither a job before it nor a quota or cap keeps the job from being tried; if one does, it is told."""
    before = next((other for other in refused if _is_blocked(lane, other, is_strict)), None)
    if before is not None:
        pass_.refuse(lane, entry, BLOCKED_CODE, ahead=before)
        return False
    return not is_bound(pass_, lane, entry, standing)


def is_bound(pass_: Pass, lane: Lane, entry: Entry, standing: Standing) -> bool:
    """Whether a quota or cap keeps the job from starting; if one does, it is told."""
    bound = bound_of(pass_.world, lane, standing)
    if bound is not None:
        pass_.refuse(lane, entry, bound.kind, limit=bound.limit, used=bound.used, asked=bound.asked)
    return bound is not None


def _is_blocked(lane: Lane, other: Lane, is_strict: bool) -> bool:
    return lane.index is other.index if is_strict else lane.asks_at_least(other)


def _key(lane: Lane, standing: Standing, place: int) -> Key:
    turn = lane.entries[place][0]
    return (turn[0], standing, *turn[1:])
