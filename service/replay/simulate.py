"""The event loop of a replay: arrivals, ends and reports of a trace, and after each instant a pass of the scheduler.

The scheduler is the production one and knows nothing of the true durations; only this loop does. A preempted job keeps
all its work and pays a restore at its next start. Pure. Not for: what is assumed of users (`service.replay.limits`),
checking a run (`service.replay.audit`) or judging it (`service.replay.metrics`).
"""

from __future__ import annotations

import dataclasses
import heapq
from collections.abc import Callable
from typing import Final, Protocol

from service.replay.gangs import layout_of
from service.replay.limits import Assumptions, is_preemptible, limit_of, report_factor, will_report
from service.replay.run_record import RunInterval, RunRecord, Surroundings
from service.replay.traces import Trace
from service.scheduler.facts import PlacedGang, WaitingJob
from service.scheduler.plan import Plan

REPORT_AFTER_SECONDS: Final = 120
"""Useful run of each start before its first report."""
MAX_PASSES: Final = 1_000
"""In one instant, each of which stops jobs: more is a scheduler that runs in a circle."""
PROGRESS_STEP: Final = 64
"""Ended jobs between two calls of `on_progress`."""

_ENDS, _REPORTS = 0, 1
_NEVER: Final = float("inf")


class Engine(Protocol):
    """The scheduler under replay: it is told what happens, and decides."""

    def arrived(self, job: WaitingJob, now: float) -> None:
        """A job is submitted."""

    def ended(self, job_id: int, now: float, ratio: float | None) -> None:
        """A job is done; `ratio` is its real time over its limit."""

    def stopped(self, job_id: int, job: WaitingJob, now: float) -> None:
        """A preempted job has left its GPUs and waits again, as `job`."""

    def measured(self, job_id: int, left_seconds: float, now: float, rate: float) -> None:
        """A running job reports how long it will take, a value that shrinks by `rate` in each second."""

    def decide(self, now: float) -> Plan:
        """One pass. Its decisions count as carried out: what it places runs, what it stops is stopping."""

    def next_timer(self, now: float) -> float | None:
        """The first instant at which a pass may decide otherwise though nothing has happened."""


class SimulationFault(Exception):
    """The scheduler did what it must not, or left a job waiting for ever."""


def simulate(
    trace: Trace,
    engine: Engine,
    surroundings: Surroundings,
    assumptions: Assumptions,
    seed: int,
    on_progress: Callable[[int], None] | None = None,
) -> RunRecord:
    """Run all jobs of a trace to their ends under `engine`, which knows the pool of `surroundings`.

    `on_progress` gets the number of jobs that have ended since it was last called. Raises SimulationFault.
    """
    return _Simulation(trace, engine, surroundings, assumptions, seed).run(on_progress or (lambda count: None))


class _Simulation:
    """The state of one replay. Jobs are known by their place in the trace; to the scheduler by row + 1."""

    def __init__(
        self,
        trace: Trace,
        engine: Engine,
        surroundings: Surroundings,
        assumptions: Assumptions,
        seed: int,
    ):
        self.trace, self.engine = trace, engine
        self.surroundings, self.assumptions, self.seed = surroundings, assumptions, seed
        count = len(trace.jobs)
        self.team_ids = {team: number for number, team in enumerate(trace.teams, start=1)}
        self.place_of = {job.row + 1: place for place, job in enumerate(trace.jobs)}
        self.waiting: list[WaitingJob | None] = [None] * count
        """What the scheduler was last told of each job that has arrived."""
        self.done: list[float] = [0] * count
        """Useful seconds of the runs that are over."""
        self.num_runs = [0] * count
        self.started_at: list[float] = [0] * count
        self.useful_since: list[float] = [0] * count
        self.ends_at: list[float] = [_NEVER] * count
        self.order = [0] * count
        self.is_running = [False] * count
        self.is_stopping = [False] * count
        self.factor: list[float | None] = [None] * count
        """Of the last report; it still colours what is known of the job while it waits."""
        self.gangs: list[PlacedGang | None] = [None] * count
        self.num_starts = 0
        self.num_arrived = 0
        self.num_ended = 0
        self.events: list[tuple[float, int, int, int, int]] = []
        """(time, kind, order of start, place, run): a heap. An entry of a run that is over means nothing."""
        self.record = RunRecord.of(trace, surroundings)

    def run(self, on_progress: Callable[[int], None]) -> RunRecord:
        """See `simulate`."""
        count, told = len(self.trace.jobs), 0
        timer = _NEVER
        while self.num_ended < count:
            now = self._next_instant(timer)
            self.record.advance(now)
            self._ends(now)
            self._arrivals(now)
            self._reports(now)
            self._passes(now)
            timer = self._next_timer(now)
            if self.num_ended - told >= PROGRESS_STEP:
                on_progress(self.num_ended - told)
                told = self.num_ended
        on_progress(self.num_ended - told)
        return self.record

    # --- What happens by itself ------------------------------------------------------------------------------------

    def _next_instant(self, timer: float) -> float:
        events, jobs = self.events, self.trace.jobs
        while events and self.num_runs[events[0][3]] != events[0][4]:
            heapq.heappop(events)
        now = min(timer, events[0][0] if events else _NEVER)
        if self.num_arrived < len(jobs):
            now = min(now, jobs[self.num_arrived].submitted_at)
        if now == _NEVER:
            stuck = [job.job_id for job, at in zip(jobs, self.record.ended_at, strict=True) if at is None]
            raise SimulationFault(
                f"{len(stuck)} jobs wait for ever, with {self.record.free_gpus} of {self.surroundings.gpus} GPUs free: "
                + ", ".join(stuck[:10])
            )
        return now

    def _next_timer(self, now: float) -> float:
        timer = self.engine.next_timer(now)
        if timer is None:
            return _NEVER
        if timer <= now:
            raise SimulationFault(f"the next timer is {timer:g} at {now:g}: the pass of that instant is over")
        return timer

    def _ends(self, now: float) -> None:
        """Jobs that are done, and preempted ones whose grace is over, in the order in which they started."""
        events = self.events
        while events and events[0][0] == now and events[0][1] == _ENDS:
            _, _, _, place, run = heapq.heappop(events)
            if self.num_runs[place] == run:
                self._leave(place, now)

    def _arrivals(self, now: float) -> None:
        jobs = self.trace.jobs
        while self.num_arrived < len(jobs) and jobs[self.num_arrived].submitted_at == now:
            place = self.num_arrived
            job = jobs[place]
            self.num_arrived += 1
            waiting = WaitingJob(
                id=job.row + 1,
                team_id=self.team_ids[job.team],
                priority=0,
                submitted_at=job.submitted_at,
                layouts=(layout_of(job.gpus, self.surroundings.gpus_per_node),),
                gpu_type=None,
                memory_bytes_per_node=0,
                limit_seconds=limit_of(self.assumptions.limits, self.seed, job),
                is_preemptible=is_preemptible(self.assumptions.preemptible_share, self.seed, job),
                will_report=will_report(self.assumptions.reporting_share, self.seed, job),
            )
            self.waiting[place] = waiting
            self.record.waits(job.gpus)
            self.engine.arrived(waiting, now)

    def _reports(self, now: float) -> None:
        """First reports of runs. Ends of this instant are gone already, so only reports are on top."""
        events, jobs = self.events, self.trace.jobs
        while events and events[0][0] == now:
            _, _, _, place, run = heapq.heappop(events)
            if self.num_runs[place] == run:
                job = jobs[place]
                factor = report_factor(self.assumptions.report_error, self.seed, job.row, run)
                self.factor[place] = factor
                self.engine.measured(job.row + 1, (self.ends_at[place] - now) * factor, now, factor)

    # --- What the scheduler decides --------------------------------------------------------------------------------

    def _passes(self, now: float) -> None:
        """A pass, and further ones as long as they free GPUs at once."""
        for _ in range(MAX_PASSES):
            plan = self.engine.decide(now)
            for place in plan.places:
                self._start(place.job_id, place.gang, now)
            for stop in plan.stops:
                self._stop(stop.job_id, now)
            if not plan.stops or self.surroundings.grace_seconds:
                return
        raise SimulationFault(f"after {MAX_PASSES} passes at {now:g} the scheduler still stops jobs")

    def _start(self, job_id: int, gang: PlacedGang, now: float) -> None:
        place = self.place_of[job_id]
        if self.is_running[place] or self.waiting[place] is None or self.record.ended_at[place] is not None:
            raise SimulationFault(f"at {now:g} the scheduler starts job {job_id}, which does not wait")
        job = self.trace.jobs[place]
        restore = self.surroundings.restore_seconds if self.num_runs[place] else 0
        useful_since = now + restore
        ends_at = useful_since + (job.duration - self.done[place])
        run, order = self.num_runs[place], self.num_starts
        self.num_starts += 1
        self.started_at[place], self.useful_since[place], self.ends_at[place] = now, useful_since, ends_at
        self.order[place], self.is_running[place], self.gangs[place] = order, True, gang
        self.record.starts(place, job.gpus, now)
        heapq.heappush(self.events, (ends_at, _ENDS, order, place, run))
        reports_at = useful_since + REPORT_AFTER_SECONDS
        waiting = self.waiting[place]
        if waiting is not None and waiting.will_report and reports_at < ends_at:
            heapq.heappush(self.events, (reports_at, _REPORTS, order, place, run))

    def _stop(self, job_id: int, now: float) -> None:
        """It runs on for the grace and then leaves, unless it is done before."""
        place = self.place_of[job_id]
        if not self.is_running[place] or self.is_stopping[place]:
            raise SimulationFault(f"at {now:g} the scheduler stops job {job_id}, which does not run or stops already")
        self.is_stopping[place] = True
        leaves_at = now + self.surroundings.grace_seconds
        if leaves_at == now:
            self._leave(place, now)
        else:
            heapq.heappush(self.events, (leaves_at, _ENDS, self.order[place], place, self.num_runs[place]))

    def _leave(self, place: int, now: float) -> None:
        """A run is over: the job is done, or waits again with what it has got done."""
        job, waiting, gang = self.trace.jobs[place], self.waiting[place], self.gangs[place]
        assert waiting is not None and gang is not None
        started_at, useful_since = self.started_at[place], self.useful_since[place]
        is_done = now >= self.ends_at[place]
        self.done[place] += max(0, now - useful_since)
        self.num_runs[place] += 1
        self.is_running[place] = self.is_stopping[place] = False
        self.record.runs.append(RunInterval(place, started_at, now, useful_since - started_at, gang.shares))
        if is_done:
            self.num_ended += 1
            self.record.ends(place, job.gpus, now)
            self.engine.ended(waiting.id, now, job.duration / waiting.limit_seconds if waiting.limit_seconds else None)
            return
        self.record.stops(place, job.gpus)
        factor = self.factor[place]
        again = dataclasses.replace(
            waiting,
            wait_began_at=now,
            served_seconds=self.done[place],
            num_stops=self.record.num_stops[place],
            measured_left=None if factor is None else (job.duration - self.done[place]) * factor,
        )
        self.waiting[place] = again
        self.engine.stopped(waiting.id, again, now)
