"""Bring the database to the schema of this code, or refuse one that is newer. Runs at every start, behind a lock."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from importlib.resources import files

from alembic import command
from alembic.config import Config
from alembic.runtime.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, text

from service.db.session import Database
from service.errors import SettingsError

ADVISORY_LOCK = 7_210_041


def alembic_config(connection: Connection | None = None, url: str = "") -> Config:
    """Alembic's configuration without a file; `migrations/env.py` takes the connection from it."""
    config = Config()
    config.set_main_option("script_location", str(files("migrations")))
    config.attributes["connection"] = connection
    config.attributes["url"] = url
    return config


def migrate(database: Database) -> None:
    """Upgrade to head. Raises SettingsError when the schema is newer than this code."""
    config = alembic_config()
    script = ScriptDirectory.from_config(config)
    head = script.get_current_head()
    known = {revision.revision for revision in script.walk_revisions()}
    with database.read() as connection:
        current = MigrationContext.configure(connection).get_current_revision()
    if current == head:
        return
    if current is not None and current not in known:
        raise SettingsError(
            f"the database has schema {current}, which this version of Gangline does not know (newest known: {head}). "
            "Install the newer version that made it, or restore a backup."
        )
    with schema_change(database) as connection:
        command.upgrade(alembic_config(connection), "head")


@contextmanager
def schema_change(database: Database) -> Iterator[Connection]:
    """A connection on which revisions may run, behind a lock; what was done is committed at the end."""
    with database.engine.execution_options(gangline_write=True).connect() as connection:
        if database.is_sqlite:
            # Batch migrations rebuild tables; with foreign keys on, that would delete the rows that refer to them.
            _switch_foreign_keys(connection, "OFF")
        else:
            connection.execute(text("SELECT pg_advisory_lock(:key)"), {"key": ADVISORY_LOCK})
            connection.commit()
        try:
            yield connection
            connection.commit()
        finally:
            connection.rollback()
            if database.is_sqlite:
                _switch_foreign_keys(connection, "ON")
            else:
                connection.execute(text("SELECT pg_advisory_unlock(:key)"), {"key": ADVISORY_LOCK})
                connection.commit()


def _switch_foreign_keys(connection: Connection, word: str) -> None:
    # Straight to the driver: SQLAlchemy would begin a transaction first, and within one SQLite ignores this.
    connection.connection.cursor().execute(f"PRAGMA foreign_keys={word}")
