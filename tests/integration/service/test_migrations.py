"""Every revision goes up and down on tables with rows, on both databases; a schema of the future is refused."""

from __future__ import annotations

from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, Engine, MetaData, Table, insert, inspect, select, text
from sqlalchemy.types import Boolean, Float, Integer

from service.db.migrate import alembic_config, migrate
from service.db.session import Database
from service.db.tables import METADATA
from service.errors import SettingsError

SCRIPT = ScriptDirectory.from_config(alembic_config())
REVISIONS = [revision.revision for revision in reversed(list(SCRIPT.walk_revisions()))]
STATES = {"jobs": "waiting", "attempts": "allocated", "attempt_nodes": "allocated", "nodes": "ready"}


def move(engine: Engine, revision: str, *, is_up: bool) -> None:
    """One step of Alembic, as `migrate` does it."""
    with engine.connect() as connection:
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA foreign_keys=OFF")
            connection.rollback()
        (command.upgrade if is_up else command.downgrade)(alembic_config(connection), revision)
        connection.commit()
        if engine.dialect.name == "sqlite":
            connection.exec_driver_sql("PRAGMA foreign_keys=ON")
            connection.rollback()


def reflected(connection: Connection) -> MetaData:
    """The tables as they are."""
    metadata = MetaData()
    metadata.reflect(connection)
    return metadata


def value_of(table: Table, column: Any) -> Any:
    if column.name == "state":
        return STATES[table.name]
    if isinstance(column.type, Boolean):
        return False
    return 1 if isinstance(column.type, Integer | Float) else "1"


def fill_with_rows(connection: Connection) -> None:
    """A row in every table that is there, all referring to each other."""
    for table in reflected(connection).sorted_tables:
        if table.name != "alembic_version":
            connection.execute(insert(table).values({column.name: value_of(table, column) for column in table.columns}))
    connection.commit()


def rows_of(connection: Connection) -> dict[str, list[dict[str, Any]]]:
    """All rows by table and column."""
    return {
        table.name: [dict(row._mapping) for row in connection.execute(select(table))]
        for table in reflected(connection).sorted_tables
        if table.name != "alembic_version"
    }


def test_the_revisions_are_one_line(database_url: str) -> None:
    assert len(SCRIPT.get_heads()) == 1
    assert [SCRIPT.get_revision(revision).down_revision for revision in REVISIONS] == [None, *REVISIONS[:-1]]


def test_every_revision_goes_up_and_down_on_tables_with_rows(database_url: str) -> None:
    engine = Database(database_url).engine
    for number, revision in enumerate(REVISIONS):
        move(engine, revision, is_up=True)
        with engine.connect() as connection:
            if number == 0:
                fill_with_rows(connection)
            before = rows_of(connection)
        below = REVISIONS[number - 1] if number else "base"
        move(engine, below, is_up=False)
        with engine.connect() as connection:
            if number == 0:
                left = set(inspect(connection).get_table_names()) - {"alembic_version"}
                assert left == set(), "the first revision leaves nothing behind"
        move(engine, revision, is_up=True)
        with engine.connect() as connection:
            if number == 0:
                fill_with_rows(connection)
            after = rows_of(connection)
            common = {name: rows for name, rows in before.items() if name in after}
            assert {name: len(after[name]) for name in common} == {name: len(rows) for name, rows in common.items()}
    engine.dispose()


def test_the_whole_way_down_and_up_again(database_url: str) -> None:
    database = Database(database_url)
    migrate(database)
    with database.engine.connect() as connection:
        fill_with_rows(connection)
    for revision in [*REVISIONS[:-1][::-1], "base"]:
        move(database.engine, revision, is_up=False)
    migrate(database)
    migrate(database)  # again changes nothing
    with database.engine.connect() as connection:
        assert set(METADATA.tables) <= set(inspect(connection).get_table_names())
    database.dispose()


def test_the_revisions_make_the_tables_that_the_code_expects(database_url: str) -> None:
    database = Database(database_url)
    migrate(database)
    with database.engine.connect() as connection:
        differences = compare_metadata(MigrationContext.configure(connection), METADATA)
    database.dispose()
    assert differences == []


def test_a_schema_newer_than_the_code_is_refused_with_the_fix(database_url: str) -> None:
    database = Database(database_url)
    migrate(database)
    with database.engine.begin() as connection:
        connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))

    with pytest.raises(SettingsError, match=r"schema 9999.*Install the newer version"):
        migrate(database)

    with database.engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "9999"
    database.dispose()


def test_foreign_keys_are_on_again_after_a_migration(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    migrate(database)
    with database.read() as connection:
        assert connection.exec_driver_sql("PRAGMA foreign_keys").scalar_one() == 1
    database.dispose()
