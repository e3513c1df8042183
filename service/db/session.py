"""Connections and transactions: one read path, one write path, the same on SQLite and PostgreSQL.

On SQLite one lock in this process stands before every write transaction, which is `BEGIN IMMEDIATE`; only the API
process opens the file. Topics given to `Write.wake` are published after the commit and dropped with a rollback.
"""

from __future__ import annotations

import sqlite3
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from sqlalchemy import Connection, Engine, create_engine, event, text
from sqlalchemy.engine import make_url
from sqlalchemy.exc import DBAPIError
from sqlalchemy.exc import TimeoutError as PoolTimeoutError

from service import clock
from service.errors import DatabaseUnavailable

BUSY_TIMEOUT_MILLISECONDS = 5_000
POOL_SIZE = 24
POOL_TIMEOUT_SECONDS = 5.0


@dataclass
class Write:
    """An open write transaction: its connection, its time, and what to wake after the commit."""

    connection: Connection
    now: float
    """Database clock at the start of the transaction, epoch seconds."""
    is_sqlite: bool
    topics: set[str] = field(default_factory=set)

    def wake(self, *topics: str) -> None:
        """Publish these topics once the transaction is committed."""
        self.topics.update(topics)


_NOTIFY = text("SELECT pg_notify('gangline', :payload)")
MAX_PAYLOAD = 7_900


def wakeup_payload(topics: set[str]) -> str:
    """The topics as one notification to other processes; what does not fit is found by their slow tick."""
    words: list[str] = []
    room = MAX_PAYLOAD
    for topic in sorted(topics, key=lambda topic: (topic not in ("schedule", "outbox"), topic)):
        room -= len(topic) + 1
        if room < 0:
            break
        words.append(topic)
    return " ".join(words)


class Database:
    """An engine and its two kinds of transaction. `publish` receives the topics of each commit."""

    def __init__(self, url: str, *, synchronous: str = "NORMAL", publish: Callable[[set[str]], None] | None = None):
        self.url = normalise_url(url)
        self.is_sqlite = make_url(self.url).get_backend_name() == "sqlite"
        self.engine = _engine(self.url, self.is_sqlite, synchronous)
        self._publish = publish or (lambda topics: None)
        self._write_lock = threading.Lock()
        self._write_engine = self.engine.execution_options(gangline_write=True)

    @contextmanager
    def read(self) -> Iterator[Connection]:
        """A connection for reading. Writing through it is an error on SQLite (`query_only`)."""
        with _database_errors(), self.engine.connect() as connection:
            yield connection

    @contextmanager
    def write(self) -> Iterator[Write]:
        """One write transaction: committed at the end, rolled back by an exception. Topics are published after it."""
        with _database_errors():
            if self.is_sqlite:
                with self._write_lock, self._write_engine.connect() as connection, connection.begin():
                    transaction = Write(connection, clock.epoch(), True)
                    yield transaction
            else:
                with self._write_engine.connect() as connection, connection.begin():
                    transaction = Write(connection, self.now(connection), False)
                    yield transaction
                    if transaction.topics:
                        # Delivered by PostgreSQL when the transaction commits, dropped when it rolls back.
                        connection.execute(_NOTIFY, {"payload": wakeup_payload(transaction.topics)})
        if transaction.topics:
            self._publish(transaction.topics)

    def now(self, connection: Connection) -> float:
        """The database clock, epoch seconds. SQLite's is this process's own clock."""
        if self.is_sqlite:
            return clock.epoch()
        return float(connection.execute(text("SELECT extract(epoch FROM clock_timestamp())")).scalar_one())

    def dispose(self) -> None:
        """Close all connections."""
        self.engine.dispose()


def normalise_url(url: str) -> str:
    """`postgres://` and `postgresql://` mean psycopg 3."""
    for prefix in ("postgres://", "postgresql://"):
        if url.startswith(prefix):
            return "postgresql+psycopg://" + url[len(prefix) :]
    return url


def _engine(url: str, is_sqlite: bool, synchronous: str) -> Engine:
    engine = create_engine(
        url, pool_size=POOL_SIZE, max_overflow=0, pool_timeout=POOL_TIMEOUT_SECONDS, pool_pre_ping=not is_sqlite
    )
    if is_sqlite:

        @event.listens_for(engine, "connect")
        def _configure(dbapi: Any, _record: Any) -> None:
            dbapi.isolation_level = None  # SQLAlchemy's events below open the transactions
            for pragma in (
                "journal_mode=WAL",
                f"synchronous={synchronous}",
                f"busy_timeout={BUSY_TIMEOUT_MILLISECONDS}",
                "foreign_keys=ON",
                "temp_store=MEMORY",
            ):
                dbapi.execute(f"PRAGMA {pragma}")

        @event.listens_for(engine, "begin")
        def _begin(connection: Connection) -> None:
            is_write = connection.get_execution_options().get("gangline_write", False)
            try:
                # Straight to the driver: through SQLAlchemy it would cost as much as the rest of a short transaction.
                cursor = connection.connection.cursor()
                cursor.execute("PRAGMA query_only=OFF" if is_write else "PRAGMA query_only=ON")
                cursor.execute("BEGIN IMMEDIATE" if is_write else "BEGIN")
            except sqlite3.OperationalError as error:
                raise DatabaseUnavailable(str(error)) from error

    return engine


@contextmanager
def _database_errors() -> Iterator[None]:
    """Turn the loss of the database into a 503 that says what to do; let constraint violations through."""
    try:
        yield
    except PoolTimeoutError as error:
        raise DatabaseUnavailable(f"no database connection was free within {POOL_TIMEOUT_SECONDS:g} s") from error
    except DBAPIError as error:
        if error.connection_invalidated or type(error).__name__ in ("OperationalError", "InterfaceError"):
            raise DatabaseUnavailable(str(error.orig)) from error
        raise
