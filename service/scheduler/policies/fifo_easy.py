"""`fifo+easy`: first come, first served, with EASY backfill. The yardstick, and what Slurm's defaults come to. Pure.

The first job that does not fit gets a reservation by the hard limits of those who run. Others may pass it if their own
limit ends before it, or on GPUs that it will not need. After A. Mu'alem and D. Feitelson, IEEE TPDS 12(6), 2001.
"""

from __future__ import annotations

import heapq

from service.scheduler.jobs import Entry
from service.scheduler.placement import find_gang
from service.scheduler.policies.walk import is_bound
from service.scheduler.queue import Lane
from service.scheduler.quota import most_gpus, standing_of
from service.scheduler.reservation import Reservation, find_beside, latest_end, reserve
from service.scheduler.scheduling_pass import Pass

Item = tuple[tuple[float, ...], int, int, Lane]


def fifo_easy(pass_: Pass) -> None:
    """Fill the pass."""
    _Easy(pass_).run()


class _Easy:
    """The walk over the whole queue in order; lanes drop out when nothing of theirs can fit any more."""

    def __init__(self, pass_: Pass):
        self.pass_ = pass_
        self.world = pass_.world
        self.reservation: Reservation | None = None
        self.short_refused: list[Lane] = []
        self.long_refused: list[Lane] = []

    def run(self) -> None:
        """Take the jobs in their turn."""
        heap: list[Item] = [
            (lane.entries[0][0], number, 0, lane) for number, lane in enumerate(self.world.queue.lanes.values())
        ]
        heapq.heapify(heap)
        while heap:
            _, number, place, lane = heapq.heappop(heap)
            next_place = self._look(lane, place)
            if next_place is not None and next_place < len(lane.entries):
                heapq.heappush(heap, (lane.entries[next_place][0], number, next_place, lane))

    def _look(self, lane: Lane, place: int) -> int | None:
        """The place of the lane to look at next; None: nothing of the lane fits any more."""
        entry = lane.entries[place][2]
        if self.reservation is not None:
            if lane.num_gpus > lane.index.num_free or self._is_refused(lane, self.short_refused):
                self.pass_.refuse(lane, entry, "behind", ahead=lane)
                return None
            is_short = self._ends_before(entry)
            if not is_short and self._is_refused(lane, self.long_refused):
                return place + 1
        standing = standing_of(self.world, lane)
        if is_bound(self.pass_, lane, entry, standing):
            return None
        if self.reservation is None or self._ends_before(entry):
            gang = find_gang(lane.index, entry.job, most_gpus(self.world, lane, standing))
        else:
            gang = find_beside(lane.index, entry.job, self.reservation)
        if gang is not None:
            if self.reservation is not None and not self._ends_before(entry):
                self.reservation.take(gang, entry.job)
            self.pass_.give(entry, gang)
            return place
        if self.reservation is None:
            # There is none for what never fits, so that it holds nobody up.
            world, now = self.world, self.pass_.now
            self.reservation = reserve(world, lane.index, entry.job, now, lambda run: latest_end(world, run, now))
            self.pass_.refuse(lane, entry, "no_room")
            return place + 1
        self.pass_.refuse(lane, entry, "reserved")
        (self.short_refused if self._ends_before(entry) else self.long_refused).append(lane)
        return place + 1

    def _ends_before(self, entry: Entry) -> bool:
        if self.reservation is None:
            return True
        job = entry.job
        if job.limit_seconds is None:
            return False
        return self.pass_.now + job.limit_seconds <= self.reservation.at

    @staticmethod
    def _is_refused(lane: Lane, refused: list[Lane]) -> bool:
        return any(lane.asks_at_least(other) for other in refused)
