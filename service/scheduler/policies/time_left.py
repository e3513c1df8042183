"""`time-left`, the default: the job with the least time left goes first, and others are stopped for it where it pays.

The rules and what each is worth: deploy/docs/decisions/0019. Where the pool stops jobs only to give a team its quota
back, the first large gang that does not fit gets a reservation instead. A promoted job that nothing can be stopped for
gets one in any pool, by hard limits, so that no flood of small jobs keeps it waiting. Pure.
"""

from __future__ import annotations

from typing import Final

from service.scheduler.facts import PlacedGang
from service.scheduler.jobs import Entry
from service.scheduler.making_room import find_cleared, find_moves
from service.scheduler.placement import find_gang
from service.scheduler.policies.walk import Result, walk
from service.scheduler.queue import Lane
from service.scheduler.quota import Standing, asked_gpus, most_gpus, takes_whole_nodes
from service.scheduler.reservation import Reservation, find_beside, latest_end, reserve
from service.scheduler.scheduling_pass import Pass
from service.scheduler.victims import Room, find_reclaim, find_room

BACKFILL_SHARE: Final = 0.3
"""Of its limit, what a job is taken to run when it is let onto reserved nodes: no promise hangs on it."""


def time_left(pass_: Pass) -> None:
    """Fill the pass."""
    walk(pass_, _TimeLeft(pass_.options.preemption == "all").attempt)


def _take(pass_: Pass, entry: Entry, room: Room, why: str) -> None:
    for run in room.victims:
        pass_.stop(run, entry, why)
    pass_.give(entry, room.gang)


def _reclaim(pass_: Pass, lane: Lane, entry: Entry, standing: Standing) -> bool:
    """Give a team its quota back. A quota is one of GPUs: nothing is taken back for processors alone."""
    if not pass_.world.has_quotas or standing is not Standing.IN_QUOTA or pass_.options.preemption == "none":
        return False
    if not asked_gpus(lane):
        return False
    room = find_reclaim(pass_.world, lane, entry, pass_.now)
    if room is None:
        return False
    _take(pass_, entry, room, "reclaim")
    return True


def _make_room(pass_: Pass, lane: Lane, entry: Entry, standing: Standing) -> bool:
    """Gather scattered GPUs for a gang of whole nodes."""
    world, now = pass_.world, pass_.now
    moves = find_moves(world, lane, entry, now)
    if moves is not None:
        for run, gang in moves.moves:
            pass_.move(run, entry, gang)
        pass_.give(entry, moves.gang)
        return True
    if entry.num_gpus > lane.shape.layouts[-1].gpus_per_node:
        room = find_cleared(world, lane, entry, standing, now)
        if room is not None:
            _take(pass_, entry, room, "clear")
            return True
    return False


class _TimeLeft:
    """The attempts of one pass, and the reservation that it makes if any."""

    def __init__(self, may_stop_where_it_pays: bool):
        self.may_stop_where_it_pays = may_stop_where_it_pays
        self.reservation: Reservation | None = None
        self.is_promise = False
        """The reservation is a promoted job's: hard limits alone count beside it."""

    def attempt(self, pass_: Pass, lane: Lane, entry: Entry, standing: Standing) -> Result:
        """Place a job, beside the reservation if there is one; else make room for it, if that pays."""
        gang = self._find(pass_, lane, entry, standing)
        if gang is not None:
            if self.reservation is not None and not self._ends_before(pass_, entry):
                self.reservation.take(gang, entry.job)
            pass_.give(entry, gang)
            return Result.GIVEN
        if _reclaim(pass_, lane, entry, standing):
            return Result.GIVEN
        if self.may_stop_where_it_pays:
            code, numbers = self._stop_others(pass_, lane, entry, standing)
            if code is None:
                return Result.GIVEN
        else:
            code, numbers = ("no_room" if self.reservation is None else "reserved"), {}
        pass_.refuse(lane, entry, code, **numbers)
        if self.reservation is None:
            self._reserve(pass_, lane, entry)
            return Result.REFUSED
        # Another may end before the reserved moment where this one does not.
        return Result.PASSED_BY if not self._ends_before(pass_, entry) else Result.REFUSED

    def _stop_others(
        self, pass_: Pass, lane: Lane, entry: Entry, standing: Standing
    ) -> tuple[str | None, dict[str, float]]:
        """(None, …) if room was made; else why not."""
        if not asked_gpus(lane):  # GPUs would idle until its processors are done
            return ("no_room" if self.reservation is None else "reserved"), {}
        if pass_.now < entry.patient_at and not entry.is_promoted:
            return "patience", {"until": entry.patient_at}
        room = find_room(pass_.world, lane, entry, standing, pass_.now)
        if isinstance(room, Room):
            if self.reservation is not None and any(
                share.node_id in self.reservation.kept for share in room.gang.shares
            ):
                return "reserved", {}
            _take(pass_, entry, room, "promoted" if entry.is_promoted else "less_time_left")
            return None, {}
        if self.reservation is None and takes_whole_nodes(lane) and _make_room(pass_, lane, entry, standing):
            return None, {}
        if self.reservation is not None and find_gang(lane.index, entry.job) is not None:
            return "reserved", {}
        return room.code, room.numbers

    def _reserve(self, pass_: Pass, lane: Lane, entry: Entry) -> None:
        world, now = pass_.world, pass_.now
        if entry.is_promoted:
            self.reservation = reserve(world, lane.index, entry.job, now, lambda run: latest_end(world, run, now))
            self.is_promise = self.reservation is not None
        elif not self.may_stop_where_it_pays and takes_whole_nodes(lane):
            self.reservation = reserve(world, lane.index, entry.job, now, lambda run: now + run.left(world.ratios, now))

    def _find(self, pass_: Pass, lane: Lane, entry: Entry, standing: Standing) -> PlacedGang | None:
        if self.reservation is None or self._ends_before(pass_, entry):
            return find_gang(lane.index, entry.job, most_gpus(pass_.world, lane, standing))
        return find_beside(lane.index, entry.job, self.reservation)

    def _ends_before(self, pass_: Pass, entry: Entry) -> bool:
        assert self.reservation is not None
        job = entry.job
        if job.limit_seconds is None:
            return False
        # Each attempt may run for the whole limit; what is likely is told by what is left of it.
        likely = BACKFILL_SHARE * (job.limit_seconds - job.served_seconds)
        run_seconds = job.limit_seconds if self.is_promise else likely
        return pass_.now + run_seconds <= self.reservation.at
