"""The waiting jobs in lanes: jobs that fit or do not fit alike, each lane in the order of the policy. Pure.

A pass looks at the heads of lanes only, so that its cost does not grow with the queue.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Callable, Hashable, Iterator
from typing import Final

from service.scheduler.facts import Shape, WaitingJob
from service.scheduler.free_index import FreeIndex
from service.scheduler.jobs import Entry

LaneKey = tuple[Hashable, ...]
TurnOf = Callable[[Entry], tuple[float, ...]]
STALE_SHARE: Final = 2


class Lane:
    """Waiting jobs of one shape (and of one team or user, where their bounds tell them apart)."""

    __slots__ = (
        "ask",
        "entries",
        "index",
        "key",
        "may_borrow",
        "num_gpus",
        "rest_gpus",
        "shape",
        "team_id",
        "user_id",
    )

    def __init__(self, key: LaneKey, job: WaitingJob, index: FreeIndex):
        self.key = key
        self.shape: Shape = job.shape
        self.index = index
        least = job.least
        self.num_gpus = least.num_gpus
        self.rest_gpus = least.rest_gpus
        self.ask = (least.num_nodes, least.gpus_per_node, least.cpus_per_node, job.memory_bytes_per_node)
        self.team_id = job.team_id
        self.user_id = job.user_id
        self.may_borrow = job.is_preemptible or job.may_borrow
        self.entries: list[tuple[tuple[float, ...], int, Entry]] = []

    def asks_at_least(self, other: Lane) -> bool:
        """Whether it cannot fit where `other` did not."""
        if self is other:
            return True
        if self.index is not other.index or len(other.shape.layouts) > 1 or len(self.shape.layouts) > 1:
            return False
        if other.shape.home is not None and self.shape.home != other.shape.home:
            return False
        if other.shape.is_exclusive and not self.shape.is_exclusive:
            return False
        if other.shape.least_needs_shared_folder and not self.shape.least_needs_shared_folder:
            return False
        if other.rest_gpus > self.rest_gpus and self.ask[0] == other.ask[0]:
            return False  # as many whole shares, but none beside them
        if self.num_gpus < other.num_gpus:
            return False
        mine, theirs = self.ask, other.ask
        return mine[0] >= theirs[0] and mine[1] >= theirs[1] and mine[2] >= theirs[2] and mine[3] >= theirs[3]


class Queue:
    """All waiting jobs that may start, in lanes."""

    def __init__(self) -> None:
        self.entries: dict[int, Entry] = {}
        self.lanes: dict[LaneKey, Lane] = {}
        self.promotions: list[tuple[float, int]] = []
        """(when, job) of promotions to come; may hold jobs that are gone."""
        self.patience: list[tuple[float, int]] = []
        """(when, job) from when on others may be stopped for it."""
        self.by_left: list[tuple[float, int, Entry]] = []
        """All entries by the time they have left."""

    def add(self, entry: Entry, lane: Lane) -> None:
        """Put a job into its lane; its turn is set."""
        self.entries[entry.id] = entry
        entry.lane = lane
        bisect.insort(lane.entries, (entry.turn, entry.id, entry))
        bisect.insort(self.by_left, (entry.left, entry.id, entry))
        self.lanes.setdefault(lane.key, lane)
        heapq.heappush(self.patience, (entry.patient_at, entry.id))
        if not entry.is_promoted:
            heapq.heappush(self.promotions, (entry.promoted_at, entry.id))
            if len(self.promotions) > 64 + STALE_SHARE * len(self.entries):
                self.promotions = [item for item in self.promotions if item[1] in self.entries]
                heapq.heapify(self.promotions)

    def remove(self, job_id: int) -> Entry | None:
        """Take a job out; None: it was not in."""
        entry = self.entries.pop(job_id, None)
        if entry is None:
            return None
        lane = entry.lane
        assert isinstance(lane, Lane)
        del lane.entries[bisect.bisect_left(lane.entries, (entry.turn, entry.id))]
        del self.by_left[bisect.bisect_left(self.by_left, (entry.left, entry.id))]
        if not lane.entries:
            del self.lanes[lane.key]
        return entry

    def due_promotions(self, now: float) -> Iterator[Entry]:
        """Entries whose promotion has come; they are no longer among those to come."""
        while self.promotions and self.promotions[0][0] <= now:
            at, job_id = heapq.heappop(self.promotions)
            entry = self.entries.get(job_id)
            if entry is not None and not entry.is_promoted and entry.promoted_at == at:
                yield entry

    def next_patience(self, now: float) -> float | None:
        """When the patience of the next job ends."""
        while self.patience:
            at, job_id = self.patience[0]
            if at > now and job_id in self.entries:
                return at
            heapq.heappop(self.patience)
        return None

    def next_promotion(self) -> float | None:
        """When the next one is due."""
        while self.promotions:
            at, job_id = self.promotions[0]
            entry = self.entries.get(job_id)
            if entry is not None and not entry.is_promoted and entry.promoted_at == at:
                return at
            heapq.heappop(self.promotions)
        return None
