"""Wake-ups between processes on PostgreSQL: LISTEN on one connection; `service.db.session` notifies with each commit.

Only "look again", never data; a lost notification costs a slow tick.
"""

from __future__ import annotations

import logging

import psycopg
from sqlalchemy.engine import make_url

from service.background import BackgroundThread
from service.events.bus import Bus

log = logging.getLogger("gangline.listen")
CHANNEL = "gangline"
RETRY_SECONDS = 1.0


class PostgresWakeups(BackgroundThread):
    """A thread that republishes what other processes notify."""

    def __init__(self, url: str, bus: Bus):
        super().__init__("listen")
        self._conninfo = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self._bus = bus

    def run(self) -> None:
        """See `BackgroundThread`."""
        while not self._stopping.is_set():
            try:
                with psycopg.connect(self._conninfo, autocommit=True) as connection:
                    connection.execute(f"LISTEN {CHANNEL}")
                    self._bus.publish({"schedule", "outbox"})  # what was notified while nobody listened
                    while not self._stopping.is_set():
                        for notification in connection.notifies(timeout=0.5):
                            self._bus.publish(notification.payload.split(" "))
            except psycopg.Error as error:
                log.warning("listen_lost why=%s", str(error).strip())
                self._stopping.wait(RETRY_SECONDS)
