"""The scheduler's world, lent to whoever has to explain it: the leader's own where it runs in this process.

Elsewhere the world is read from SQL and kept for moments. Also keeps the experience with forecasts. One borrower at a
time, and the scheduler counts as one: `lock`. Part of the scheduler's shell. Not for: what is told (`explain_job`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from service import clock
from service.db.session import Database
from service.scheduler.calibration import Calibration
from service.scheduler.forecast import forecast
from service.scheduler.load_world import load_world
from service.scheduler.scheduling_pass import PolicyOptions
from service.scheduler.world import World
from service.settings import Settings

KEEP_FACTOR: Final = 3.0
"""A world that was read from SQL is good enough to explain from for so many times as long as reading it took."""
LEARN_SECONDS: Final = 10.0
"""Between two forecasts that are made to be learnt from."""


class HeldWorld:
    """One of a process. Never wait for it with a database connection in hand: the leader may need that one."""

    def __init__(self, database: Database, settings: Settings):
        self._database = database
        self._settings = settings
        self._world: World | None = None
        self._is_leaders = False
        self._now = self._at = self._good_for = self._learnt_at = 0.0
        self.lock = threading.RLock()
        """Held by the scheduler while it changes its world."""
        self.calibration = Calibration()

    @property
    def options(self) -> PolicyOptions:
        """What the settings say of the policy."""
        return PolicyOptions(preemption=self._settings.preemption)

    @property
    def policy(self) -> str:
        """The pool's policy."""
        return self._settings.policy

    def keep(self, world: World, now: float) -> None:
        """The leader's world as of `now`. Call with `lock` held, after each pass; learns from who has started."""
        self._world, self._is_leaders = world, True
        self._now, self._at = now, clock.monotonic()
        self.learn(world, now)

    def drop(self) -> None:
        """The leader's world is no longer good, or it leads no more."""
        self._world, self._is_leaders = None, False

    @contextmanager
    def borrow(self, job_id: int | None = None) -> Iterator[tuple[World, float]]:
        """The world and the present time, epoch seconds of the database. Change nothing but between begin and undo.

        `job_id`: a job that is asked for; a world that was read before it came is not good enough then.
        """
        with self.lock:
            since = clock.monotonic() - self._at
            is_known = job_id is None or (self._world is not None and self._world.is_waiting(job_id))
            is_good = self._is_leaders or (since <= self._good_for and is_known)
            if self._world is None or not is_good:
                began = clock.monotonic()
                with self._database.read() as connection:
                    self._now = self._database.now(connection)
                    self._world, _ = load_world(connection, self._now, self._settings)
                self._is_leaders, self._at, since = False, clock.monotonic(), 0.0
                self._good_for = KEEP_FACTOR * (self._at - began)
                self.learn(self._world, self._now)
            world, version = self._world, self._world.version
            try:
                yield world, self._now + since
            finally:
                world.version = version  # a look is no change: the leader need not plan again for it

    def learn(self, world: World, now: float) -> None:
        """Judge the forecasts of jobs that have started, and make one more: a sample of the jobs is enough."""
        calibration = self.calibration
        for job_id in list(calibration.open_jobs):
            if job_id in world.runs:
                calibration.started(job_id, now)
            elif job_id not in world.queue.entries and job_id not in world.nominated:
                calibration.gone(job_id)
        if abs(now - self._learnt_at) < LEARN_SECONDS:
            return
        self._learnt_at = now
        known = set(calibration.open_jobs)
        fresh = next((job_id for job_id in reversed(world.queue.entries) if job_id not in known), None)
        if fresh is not None:
            made = forecast(world, fresh, now, calibration, self.policy, self.options)
            if made.model_seconds is not None:
                calibration.foretold(fresh, made.size, made.model_seconds, now)
