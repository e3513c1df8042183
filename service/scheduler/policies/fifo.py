"""`fifo`: first come, first served. Nobody passes the first job that does not fit, unless it never could. Pure."""

from __future__ import annotations

from service.scheduler.capability import never_fits
from service.scheduler.jobs import Entry
from service.scheduler.placement import find_gang
from service.scheduler.policies.walk import Result, walk
from service.scheduler.queue import Lane
from service.scheduler.quota import Standing, most_gpus
from service.scheduler.scheduling_pass import Pass


def fifo(pass_: Pass) -> None:
    """Fill the pass in order of submission."""
    walk(pass_, _attempt, is_strict=True)


def _attempt(pass_: Pass, lane: Lane, entry: Entry, standing: Standing) -> Result:
    gang = find_gang(lane.index, entry.job, most_gpus(pass_.world, lane, standing))
    if gang is None:
        pass_.refuse(lane, entry, "no_room")
        return Result.NEVER if never_fits(pass_.world, lane) else Result.REFUSED
    pass_.give(entry, gang)
    return Result.GIVEN
