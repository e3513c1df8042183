"""The walk along the queue that policies share: lanes by the turns of their heads, until nothing more can fit. Pure."""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable

from service.scheduler.jobs import Entry
from service.scheduler.queue import Lane
from service.scheduler.quota import Standing, bound_of, standing_of
from service.scheduler.scheduling_pass import Pass

Attempt = Callable[[Pass, Lane, Entry, Standing], bool | None]
"""Whether the job got something; if not, it has been refused with a reason. None: and it holds nobody up."""
Key = tuple[float, ...]
BLOCKED_CODE = "behind"


def walk(pass_: Pass, attempt: Attempt, *, is_strict: bool = False) -> None:
    """Give each lane its turns. A lane that asks at least what was refused before is not looked at again in this pass.

    `is_strict`: nobody passes a job that was refused, as far as both may use the same nodes.
    """
    world = pass_.world
    heap: list[tuple[Key, int, Lane, Standing]] = []
    for number, lane in enumerate(world.queue.lanes.values()):
        standing = standing_of(world, lane)
        heap.append((_key(lane, standing), number, lane, standing))
    heapq.heapify(heap)
    # Where quotas tell teams apart they may stop different jobs: what one was refused says nothing of another.
    refused: defaultdict[int | None, list[Lane]] = defaultdict(list)
    while heap:
        key, number, lane, standing = heap[0]
        if not lane.entries:
            heapq.heappop(heap)
            continue
        if world.has_quotas:  # what was given away since may have used up the quota
            standing = standing_of(world, lane)
        fresh = _key(lane, standing)
        if fresh != key:
            heapq.heapreplace(heap, (fresh, number, lane, standing))
            continue
        entry = lane.entries[0][2]
        kin = refused[lane.team_id if world.has_quotas and not is_strict else None]
        before = next((other for other in kin if _is_blocked(lane, other, is_strict)), None)
        if before is not None:
            pass_.refuse(lane, entry, BLOCKED_CODE, ahead=before)
            heapq.heappop(heap)
            continue
        bound = bound_of(world, lane, standing)
        if bound is not None:
            pass_.refuse(lane, entry, bound.kind, limit=bound.limit, used=bound.used, asked=bound.asked)
            heapq.heappop(heap)
            continue
        is_given = attempt(pass_, lane, entry, standing)
        if not is_given:
            heapq.heappop(heap)
            if is_given is not None:
                kin.append(lane)


def _is_blocked(lane: Lane, other: Lane, is_strict: bool) -> bool:
    return lane.index is other.index if is_strict else lane.asks_at_least(other)


def _key(lane: Lane, standing: Standing) -> Key:
    turn = lane.entries[0][0]
    return (turn[0], standing, *turn[1:])
