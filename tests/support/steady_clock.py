"""The service's clock without the machine's pauses: for tests that play every step by hand.

Deadlines of the service are seconds: a node that said nothing for five gets no work. A machine that stands still
between two steps of a test would let them pass. Not for: tests of real processes, which live in real time.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Iterator

import pytest
from sqlalchemy import Connection

from service import clock
from service.db.session import Database

LARGEST_STEP_SECONDS = 0.005


class SteadyClock:
    """Goes on with the clock that it reads, but between two readings by `LARGEST_STEP_SECONDS` at most."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.catch_up()

    def catch_up(self) -> None:
        """It is as late as the machine says."""
        with self._lock:
            self._read = self._shown = time.time()

    def show(self, read: float) -> float:
        """The time when the clock of the machine, or of its database, says `read`, in epoch seconds."""
        with self._lock:
            self._shown += min(max(0.0, read - self._read), LARGEST_STEP_SECONDS)
            self._read = max(self._read, read)
            return self._shown


@contextlib.contextmanager
def steady_time(database: Database) -> Iterator[SteadyClock]:
    """This process and `database` read a steady clock; other databases on PostgreSQL keep their own."""
    steady, process_epoch, database_now = SteadyClock(), clock.epoch, database.now

    def now(connection: Connection) -> float:
        return steady.show(database_now(connection))

    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(clock, "epoch", lambda: steady.show(process_epoch()))
        if not database.is_sqlite:  # SQLite's clock is that of the process
            patched.setattr(database, "now", now)
        yield steady
