"""A pool that lives through time under the pure scheduler: jobs arrive, report, end, and leave when they are stopped.

It keeps its own books (who holds what since when, who waits, what is promised), from which a world can be built anew
at any moment. Checks hang on `on_pass`. Not for: real time, SQL, or figures over traces (`gang replay`).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable
from dataclasses import dataclass, field, replace

from service.scheduler.facts import EndedRatio, Measured, NodeView, Nomination, RunningJob, Team, User, WaitingJob
from service.scheduler.plan import Plan, PolicyOptions, decide
from service.scheduler.policies import POLICIES
from service.scheduler.world import World

TICK_SECONDS = 600.0
"""The scheduler looks at least so often, whatever happens."""
MAX_PASSES = 50
"""In one instant, each of which frees GPUs."""
REPORTS_AFTER_SECONDS = 120.0


@dataclass(frozen=True, kw_only=True)
class Arrival:
    """A job that is submitted at its `submitted_at`, and what nobody knows of it: how long it really runs."""

    job: WaitingJob
    seconds: float


@dataclass
class Holding:
    """A run, as the pool sees it."""

    facts: RunningJob
    ends_at: float
    useful_since: float
    run: int


@dataclass
class PoolInTime:
    """The pool. `run` lives until all jobs have ended or `until` is reached."""

    nodes: tuple[NodeView, ...]
    arrivals: tuple[Arrival, ...]
    policy: str = "time-left"
    options: PolicyOptions = field(default_factory=PolicyOptions)
    teams: tuple[Team, ...] = ()
    users: tuple[User, ...] = ()
    grace_seconds: float = 0.0
    """How long a stopped job takes to leave."""
    loses_work: bool = False
    """No checkpoint is written within the grace: what a stopped run did is done again."""
    restore_seconds: float = 60.0
    on_pass: Callable[[PoolInTime, Plan], None] = lambda pool, plan: None
    on_change: Callable[[PoolInTime], None] = lambda pool: None
    """Called when something has happened, before the pass."""

    def __post_init__(self) -> None:
        self.now = 0.0
        self.world = World(nodes=self.nodes, teams=self.teams, users=self.users, order=POLICIES[self.policy].order)
        self.seconds = {arrival.job.id: arrival.seconds for arrival in self.arrivals}
        self.waiting: dict[int, WaitingJob] = {}
        self.held: dict[int, Holding] = {}
        self.promised: dict[int, Nomination] = {}
        self.ratios: list[EndedRatio] = []
        self.started_at: dict[int, float] = {}
        """First start of each job."""
        self.ended_at: dict[int, float] = {}
        self.num_runs: dict[int, int] = {}
        self.num_stops = 0
        self._events: list[tuple[float, int, int, int]] = []
        """(time, kind, job, run): 0 ends, 1 leaves, 2 arrives, 3 reports."""
        self._arriving = {arrival.job.id: arrival.job for arrival in self.arrivals}
        for arrival in self.arrivals:
            heapq.heappush(self._events, (arrival.job.submitted_at, 2, arrival.job.id, 0))

    def run(self, until: float = float("inf")) -> PoolInTime:
        """Live. Raises AssertionError when jobs wait and nothing will ever happen again."""
        while len(self.ended_at) < len(self.arrivals):
            next_at = self._next_moment()
            if next_at > until:
                return self
            self.now = next_at
            while self._events and self._events[0][0] <= self.now:
                _, kind, job_id, run = heapq.heappop(self._events)
                (self._end, self._leave, self._arrive, self._report)[kind](job_id, run)
            self.on_change(self)
            self._pass()
        return self

    def rebuilt(self) -> World:
        """The world as somebody sees it who knows nothing but the books."""
        return World(
            nodes=self.nodes,
            waiting=self.waiting.values(),
            running=[holding.facts for holding in self.held.values()],
            teams=self.teams,
            users=self.users,
            nominations=self.promised.values(),
            ratios=self.ratios,
            now=self.now,
            order=POLICIES[self.policy].order,
        )

    def _next_moment(self) -> float:
        times = [self._events[0][0]] if self._events else []
        timer = self.world.next_timer(self.now)
        if timer is not None:
            assert timer > self.now, f"the next timer is {timer:g} at {self.now:g}: the pass of that instant is over"
            times.append(timer)
        if self.waiting and self.held:
            times.append(self.now + TICK_SECONDS)
        assert times, f"{sorted(self.waiting)} wait for ever in an idle pool"
        return min(times)

    def _pass(self) -> None:
        for _ in range(MAX_PASSES):
            plan = decide(self.world, self.now, self.policy, self.options, explain=True)
            for nominate in plan.nominations:
                self.promised[nominate.job_id] = Nomination(
                    job_id=nominate.job_id, gang=nominate.gang, after=nominate.after
                )
            for stop in plan.stops:
                self._begin_stop(stop.job_id)
            self.on_pass(self, plan)
            for place in plan.places:
                self._start(place.job_id)
            if not plan.stops or self.grace_seconds:
                return
            for stop in plan.stops:
                self._leave(stop.job_id, self.held[stop.job_id].run)
        raise AssertionError(f"at {self.now:g} the scheduler stops jobs in pass after pass")

    def _start(self, job_id: int) -> None:
        facts = self.world.runs[job_id].facts()
        del self.waiting[job_id]
        self.promised.pop(job_id, None)
        run = self.num_runs[job_id] = self.num_runs.get(job_id, 0) + 1
        self.started_at.setdefault(job_id, self.now)
        useful_since = self.now + (self.restore_seconds if run > 1 else 0.0)
        ends_at = useful_since + self.seconds[job_id] - facts.job.served_seconds
        self.held[job_id] = Holding(facts=facts, ends_at=ends_at, useful_since=useful_since, run=run)
        heapq.heappush(self._events, (ends_at, 0, job_id, run))
        if facts.job.will_report:
            heapq.heappush(self._events, (useful_since + REPORTS_AFTER_SECONDS, 3, job_id, run))

    def _begin_stop(self, job_id: int) -> None:
        holding = self.held[job_id]
        assert not holding.facts.is_stopping, f"job {job_id} is stopped twice"
        holding.facts = replace(holding.facts, is_stopping=True)
        self.num_stops += 1
        if self.grace_seconds:
            heapq.heappush(self._events, (self.now + self.grace_seconds, 1, job_id, holding.run))

    def _end(self, job_id: int, run: int) -> None:
        holding = self.held.get(job_id)
        if holding is None or holding.run != run:
            return
        del self.held[job_id]
        self.promised.pop(job_id, None)  # of a job that ended while it was being moved
        self.ended_at[job_id] = self.now
        job = holding.facts.job
        ratio = None if job.limit_seconds is None else self.seconds[job_id] / job.limit_seconds
        if ratio is not None:
            self.ratios.append(EndedRatio(ratio=ratio, user_id=job.user_id, team_id=job.team_id))
        self.world.ended(job_id, ratio)

    def _leave(self, job_id: int, run: int) -> None:
        holding = self.held.get(job_id)
        if holding is None or holding.run != run:
            return
        del self.held[job_id]
        job = holding.facts.job
        useful = 0.0 if self.loses_work else max(0.0, self.now - holding.useful_since)
        served = job.served_seconds + useful
        is_measured = holding.facts.measured is not None or job.measured_left is not None
        again = replace(
            job,
            wait_began_at=self.now,
            served_seconds=served,
            num_stops=job.num_stops + 1,
            measured_left=self.seconds[job_id] - served if is_measured else None,
        )
        self.waiting[job_id] = again
        self.world.stopped(job_id, again, self.now)

    def _arrive(self, job_id: int, _: int) -> None:
        job = self._arriving[job_id]
        self.waiting[job_id] = job
        self.world.add_waiting(job, self.now)

    def _report(self, job_id: int, run: int) -> None:
        holding = self.held.get(job_id)
        if holding is None or holding.run != run:
            return
        left = holding.ends_at - self.now
        holding.facts = replace(holding.facts, measured=Measured(left_seconds=left, at=self.now))
        self.world.measured(job_id, left, self.now)
