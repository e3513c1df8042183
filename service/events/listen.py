"""Wake-ups between processes on PostgreSQL: LISTEN on one connection; `service.db.session` notifies with each commit.

Only "look again", never data; a lost notification costs a slow tick.
"""

from __future__ import annotations

import logging
import threading

import psycopg
from sqlalchemy.engine import make_url

from service.events.bus import Bus

log = logging.getLogger("gangline.listen")
CHANNEL = "gangline"
RETRY_SECONDS = 1.0


class PostgresWakeups:
    """A thread that republishes what other processes notify."""

    def __init__(self, url: str, bus: Bus):
        self._conninfo = make_url(url).set(drivername="postgresql").render_as_string(hide_password=False)
        self._bus = bus
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="listen", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop within a second."""
        self._stopping.set()
        self._thread.join()

    def _run(self) -> None:
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
