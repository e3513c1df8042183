"""The scheduler's world, lent to whoever has to explain it: the leader's own where it runs in this process.

Elsewhere the world is read from SQL, with the experience that the leader wrote down, and kept for moments. One borrower
at a time, and the scheduler counts as one: `lock`. Part of the scheduler's shell. Not for: what is told
(`explain_job`).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from service import clock
from service.db.session import Database
from service.scheduler.calibration import Calibration
from service.scheduler.experience import load_experience
from service.scheduler.load_world import load_world
from service.scheduler.scheduling_pass import PolicyOptions
from service.scheduler.world import World
from service.settings import Settings

KEEP_FACTOR: Final = 3.0
"""A world that was read from SQL is good enough to explain from for so many times as long as reading it took."""


class HeldWorld:
    """One of a process. Never wait for it with a database connection in hand: the leader may need that one."""

    def __init__(self, database: Database, settings: Settings):
        self._database = database
        self._settings = settings
        self._world: World | None = None
        self._is_leaders = False
        self._now = self._at = self._good_for = 0.0
        self.lock = threading.RLock()
        """Held by the scheduler while it changes its world."""
        self.calibration = Calibration()
        """What the leader has learnt from its forecasts, as far as it is known here."""

    @property
    def options(self) -> PolicyOptions:
        """What the settings say of the policy."""
        return PolicyOptions(preemption=self._settings.preemption)

    @property
    def policy(self) -> str:
        """The pool's policy."""
        return self._settings.policy

    def keep(self, world: World, now: float, calibration: Calibration) -> None:
        """The leader's world as of `now`, and its experience. Call with `lock` held, after each turn."""
        self._world, self._is_leaders = world, True
        self._now, self._at = now, clock.monotonic()
        self.calibration = calibration

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
                    self.calibration = load_experience(connection)
                self._is_leaders, self._at, since = False, clock.monotonic(), 0.0
                self._good_for = KEEP_FACTOR * (self._at - began)
            world, version = self._world, self._world.version
            try:
                yield world, self._now + since
            finally:
                world.version = version  # a look is no change: the leader need not plan again for it
