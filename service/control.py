"""Scheduler, sweeper and dispatcher under one lease: threads of the API, or a process of their own."""

from __future__ import annotations

import logging
import math
import os
import socket
import uuid

from service import clock
from service.background import BackgroundThread
from service.db.leadership import SeenLease, give_up_lease, renew_lease, see_lease, take_lease
from service.db.session import Database
from service.errors import DatabaseUnavailable
from service.events.bus import Bus
from service.events.dispatcher import Dispatcher, HintHealth
from service.operations.sweep import Sweeper
from service.scheduler.cycle import Scheduler
from service.scheduler.held_world import HeldWorld
from service.settings import Settings

log = logging.getLogger("gangline.control")


class LeaseWatch:
    """Waits until the lease has not been renewed for its length by our own monotonic clock.

    So that a jump of the database's clock takes it from nobody who lives, and keeps it for nobody who is gone.
    """

    def __init__(self, holder: str, lease_seconds: float):
        self._holder = holder
        self._lease_seconds = lease_seconds
        self._seen: SeenLease | None = None
        self._seen_at = 0.0

    def take(self, database: Database, monotonic_now: float) -> int | None:
        """The new epoch once the lease is free or has run out; None while another holds it."""
        seen = see_lease(database)
        if seen != self._seen:
            self._seen, self._seen_at = seen, monotonic_now
        has_run_out = monotonic_now - self._seen_at > self._lease_seconds
        unchanged = self._seen if has_run_out else None
        return take_lease(database, self._holder, lease_seconds=math.inf, unchanged=unchanged)


class ControlThreads(BackgroundThread):
    """Waits for the lease, then runs the three threads until it is lost or the process stops; then waits again."""

    def __init__(
        self, database: Database, settings: Settings, bus: Bus, hints: HintHealth, held: HeldWorld | None = None
    ):
        super().__init__("control")
        self._held = held
        self._database = database
        self._settings = settings
        self._bus = bus
        self._hints = hints
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"
        self._waiting = LeaseWatch(self._holder, settings.leader_lease_seconds)

    def run(self) -> None:
        """See `BackgroundThread`."""
        while not self._stopping.is_set():
            try:
                epoch = self._take()
            except DatabaseUnavailable as error:
                log.warning("lease_not_taken why=%s", error.detail)
                epoch = None
            if epoch is None:
                self._stopping.wait(self._settings.leader_lease_seconds / 5)
                continue
            log.info("leader epoch=%s holder=%s", epoch, self._holder)
            self._lead(epoch)

    def _take(self) -> int | None:
        if self._database.is_sqlite:
            # Only one process opens the file, so whoever holds the lease there is gone.
            return take_lease(self._database, self._holder, lease_seconds=-math.inf)
        return self._waiting.take(self._database, clock.monotonic())

    def _lead(self, epoch: int) -> None:
        scheduler = Scheduler(self._database, self._settings, self._bus, epoch, self._held)
        sweeper = Sweeper(self._database, self._settings, epoch)
        dispatcher = Dispatcher(self._database, self._bus, self._settings.broker_url, self._hints)
        threads = (scheduler, sweeper, dispatcher)
        for thread in threads:
            thread.start()
        try:
            self._hold(epoch)
        finally:
            for thread in threads:
                thread.stop()

    def _hold(self, epoch: int) -> None:
        """Renew the lease until it is lost or the process stops."""
        if self._database.is_sqlite:
            self._stopping.wait()
            return
        while not self._stopping.wait(self._settings.leader_lease_seconds / 3):
            try:
                if not renew_lease(self._database, epoch):
                    log.warning("lease_lost epoch=%s", epoch)
                    return
            except DatabaseUnavailable as error:
                log.warning("lease_not_renewed why=%s", error.detail)
        give_up_lease(self._database, epoch)
