"""Scheduler, sweeper and dispatcher under one lease: threads of the API, or a process of their own."""

from __future__ import annotations

import logging
import os
import socket
import uuid

from service.background import BackgroundThread
from service.db.leadership import give_up_lease, renew_lease, take_lease
from service.db.session import Database
from service.errors import DatabaseUnavailable
from service.events.bus import Bus
from service.events.dispatcher import Dispatcher, HintHealth
from service.operations.sweep import Sweeper
from service.scheduler.cycle import Scheduler
from service.settings import Settings

log = logging.getLogger("gangline.control")


class ControlThreads(BackgroundThread):
    """Waits for the lease, then runs the three threads until it is lost or the process stops; then waits again."""

    def __init__(self, database: Database, settings: Settings, bus: Bus, hints: HintHealth):
        super().__init__("control")
        self._database = database
        self._settings = settings
        self._bus = bus
        self._hints = hints
        self._holder = f"{socket.gethostname()}:{os.getpid()}:{uuid.uuid4().hex[:8]}"

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
        # On SQLite only one process opens the file, so whoever holds the lease there is gone.
        lease_seconds = 0.0 if self._database.is_sqlite else self._settings.leader_lease_seconds
        return take_lease(self._database, self._holder, lease_seconds=lease_seconds)

    def _lead(self, epoch: int) -> None:
        scheduler = Scheduler(self._database, self._settings, self._bus, epoch)
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
