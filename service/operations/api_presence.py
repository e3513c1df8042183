"""The API's sign of life in the database, for a scheduling process that runs apart from it.

While no API answers, no heartbeat can arrive: that silence is the service's own and must not be held against a node. On
SQLite the API and the sweeper are one process, and this is not needed.
"""

from __future__ import annotations

import logging

from sqlalchemy import Connection, select, update

from service.background import BackgroundThread
from service.db.session import Database
from service.db.tables import pool
from service.errors import DatabaseUnavailable

log = logging.getLogger("gangline.presence")


class ApiPresence(BackgroundThread):
    """A thread of each API process that says again and again: an API is here."""

    def __init__(self, database: Database, interval_seconds: float):
        super().__init__("presence")
        self._database = database
        self._interval_seconds = interval_seconds

    def run(self) -> None:
        """See `BackgroundThread`."""
        while True:
            try:
                note_presence(self._database)
            except DatabaseUnavailable as error:
                log.warning("presence_not_noted why=%s", error.detail)
            if self._stopping.wait(self._interval_seconds):
                return


def note_presence(database: Database) -> None:
    """An API is here now, by the database clock. Raises DatabaseUnavailable."""
    with database.write() as tx:
        tx.connection.execute(update(pool).values(api_seen_at=tx.now))


def is_api_present(connection: Connection, now: float, within_seconds: float) -> bool:
    """Whether any API has said so within the last `within_seconds`."""
    seen_at = connection.execute(select(pool.c.api_seen_at)).scalar_one_or_none()
    return seen_at is not None and now - seen_at <= within_seconds
