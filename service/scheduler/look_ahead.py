"""Runs the policy itself forward on a small copy of the pool, every job ending when it is expected to. Pure.

The scheduler that decides is the one that foretells, so stops, patience, protection, quotas and whole nodes are all in
it. Jobs still to arrive are not: what they do to a wait is learnt from past forecasts (`calibration`).
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass, replace
from typing import Final

from service.scheduler.estimates import LEAST_LEFT_SECONDS
from service.scheduler.facts import WaitingJob
from service.scheduler.jobs import FOREVER, Run
from service.scheduler.plan import PolicyOptions, decide
from service.scheduler.small_copy import small_copy
from service.scheduler.world import World

MOST_PASSES: Final = 90
"""Steps into the future; most jobs start within 15."""
STEP_SHARE: Final = 0.06
"""A step is at least this share of the time gone by: what lies far ahead need not be known to the minute."""
MOST_PASSES_OF_PART: Final = 14
STEP_SHARE_OF_PART: Final = 0.3
"""The same where only a part of the pool is looked at: finer steps would tell no more."""
MOST_SECONDS: Final = 60 * 86_400.0
OPENS: Final = -1
"""Stands for a job in the list of moments when a protected run may be stopped."""
RETURNS: Final = -2
"""Stands for a job in the list of moments when a node that was cordoned or drained for a time gets work again."""


@dataclass(frozen=True, kw_only=True)
class Prospect:
    """What running the policy forward came to."""

    seconds: float
    """Until the job starts; where the steps were used up, drawn out from how far the queue before it had come."""
    num_passes: int
    is_drawn_out: bool = False
    num_stopped: int = 0
    """Runs that are stopped for somebody until then."""


def look_ahead(world: World, job: WaitingJob, now: float, policy: str, options: PolicyOptions) -> Prospect | None:
    """When a job starts if every other ends when expected; None: never, as the pool is. Leaves the world as it is."""
    copy = small_copy(world, job, now)
    ahead = _Ahead(copy.world, job.id, now, policy, options)
    if copy.is_whole:
        return ahead.run(MOST_PASSES, STEP_SHARE, copy.weight)
    return ahead.run(MOST_PASSES_OF_PART, STEP_SHARE_OF_PART, copy.weight)


class _Ahead:
    """One run into the future."""

    def __init__(self, world: World, job_id: int, now: float, policy: str, options: PolicyOptions):
        self.world, self.job_id, self.began, self.now = world, job_id, now, now
        self.policy, self.options = policy, options
        self.ends: dict[int, float] = {}
        self.moments: list[tuple[float, int]] = []
        self.num_stopped = self.num_before = self.num_started = 0
        for run in world.runs.values():
            self._expect(run)
            if now < run.open_at < FOREVER:
                heapq.heappush(self.moments, (run.open_at, OPENS))
        for node in world.nodes.values():
            if node.view.blocked_until is not None:
                heapq.heappush(self.moments, (max(now, node.view.blocked_until), RETURNS))

    def run(self, most_passes: int, step_share: float, weight: float) -> Prospect | None:
        """Step from moment to moment until the job has started."""
        own = self.world.queue.entries.get(self.job_id)
        self.num_before = 0 if own is None else sum(e.turn < own.turn for e in self.world.queue.entries.values())
        for number in range(1, most_passes + 1):
            if self._pass():
                return self._prospect((self.now - self.began) * max(1.0, weight), number)
            moment = self._next()
            if moment is None or moment - self.began > MOST_SECONDS:
                return None
            self._go_to(max(moment, self.now + step_share * (self.now - self.began)))
        share = max(1.0, self.num_before) / max(1.0, self.num_started)
        return self._prospect((self.now - self.began) * max(1.5, share, weight), most_passes, is_drawn_out=True)

    def _prospect(self, seconds: float, number: int, *, is_drawn_out: bool = False) -> Prospect:
        return Prospect(seconds=seconds, num_passes=number, is_drawn_out=is_drawn_out, num_stopped=self.num_stopped)

    def _pass(self) -> bool:
        """Whether the job starts now. Those who are stopped leave at once and wait again."""
        world = self.world
        while True:
            decided = decide(world, self.now, self.policy, self.options)
            for place in decided.places:
                if place.job_id == self.job_id:
                    return True
                self.num_started += 1
                self._expect(world.runs[place.job_id])
            leaving = [run_id for run_id, run in world.runs.items() if run.is_stopping]
            for run_id in leaving:
                self._leave(run_id)
            if not leaving:
                return False

    def _leave(self, run_id: int) -> None:
        run = self.world.runs[run_id]
        left = max(LEAST_LEFT_SECONDS, self.ends.pop(run_id, self.now) - self.now)
        self.num_stopped += 1
        again = replace(run.job, wait_began_at=self.now, num_stops=run.job.num_stops + 1, measured_left=left)
        self.world.stopped(run_id, again, self.now)

    def _expect(self, run: Run) -> None:
        """When a run ends: as measured, else by the usual part of its limit."""
        world, job = self.world, run.job
        left = run.left(world.ratios, self.now)
        if run.measured is None and job.measured_left is None:
            left *= world.ratios.silent_of(job) / world.ratios.of(job)
        end = self.now + max(LEAST_LEFT_SECONDS, left)
        self.ends[run.id] = end
        heapq.heappush(self.moments, (end, run.id))

    def _next(self) -> float | None:
        moments = self.moments
        while moments and moments[0][1] >= 0 and self.ends.get(moments[0][1]) != moments[0][0]:
            heapq.heappop(moments)
        timer = self.world.next_timer(self.now)
        times = [moments[0][0]] if moments else []
        return min([*times, *([] if timer is None else [timer])], default=None)

    def _go_to(self, moment: float) -> None:
        self.now = moment
        while self.moments and self.moments[0][0] <= moment:
            at, job_id = heapq.heappop(self.moments)
            if job_id == RETURNS:
                self._unblock()
            elif job_id != OPENS and self.ends.get(job_id) == at:
                del self.ends[job_id]
                self.world.ended(job_id)

    def _unblock(self) -> None:
        for node in list(self.world.nodes.values()):
            if node.view.blocked_until is not None and node.view.blocked_until <= self.now:
                self.world.set_node(replace(node.view, blocked_by=None, blocked_until=None))
