"""Every revision goes up and down on tables with rows, on both databases; a schema of the future is refused."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from alembic import command
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import Connection, MetaData, Table, insert, inspect, select, text
from sqlalchemy.types import Boolean, Float, Integer

from service.db.migrate import alembic_config, migrate, schema_change
from service.db.session import Database
from service.db.tables import METADATA
from service.errors import DatabaseUnavailable, SettingsError

SCRIPT = ScriptDirectory.from_config(alembic_config())
REVISIONS = [revision.revision for revision in reversed(list(SCRIPT.walk_revisions()))]
STATES = {"jobs": "waiting", "attempts": "allocated", "attempt_nodes": "allocated", "nodes": "ready"}
CHECKED_TEXTS = {("job_dependencies", "condition"): "ok", ("world_changes", "kind"): "job"}


def move(database: Database, revision: str, *, is_up: bool) -> None:
    """Up or down to a revision, as `migrate` does it."""
    with schema_change(database) as connection:
        (command.upgrade if is_up else command.downgrade)(alembic_config(connection), revision)


def reflected(connection: Connection) -> MetaData:
    """The tables as they are."""
    metadata = MetaData()
    metadata.reflect(connection)
    return metadata


def value_of(table: Table, column: Any) -> Any:
    if column.name == "state":
        return STATES[table.name]
    if (table.name, column.name) in CHECKED_TEXTS:
        return CHECKED_TEXTS[table.name, column.name]
    if isinstance(column.type, Boolean):
        return False
    return 1 if isinstance(column.type, Integer | Float) else "1"


def fill_with_rows(connection: Connection) -> None:
    """A row in every table that is there, all referring to each other."""
    for table in reflected(connection).sorted_tables:
        if table.name != "alembic_version":
            connection.execute(insert(table).values({column.name: value_of(table, column) for column in table.columns}))


def num_rows(database: Database) -> dict[str, int]:
    """Rows of each table."""
    with database.engine.connect() as connection:
        tables = [table for table in reflected(connection).sorted_tables if table.name != "alembic_version"]
        return {table.name: len(connection.execute(select(table)).all()) for table in tables}


def test_the_revisions_are_one_line(database_url: str) -> None:
    assert len(SCRIPT.get_heads()) == 1
    assert [SCRIPT.get_revision(revision).down_revision for revision in REVISIONS] == [None, *REVISIONS[:-1]]


def test_every_revision_goes_up_and_down_on_tables_with_rows(database_url: str) -> None:
    database = Database(database_url)
    move(database, REVISIONS[0], is_up=True)
    with schema_change(database) as connection:
        fill_with_rows(connection)
    for below, revision in pairwise(REVISIONS):
        counts = num_rows(database)
        for is_up, target in ((True, revision), (False, below), (True, revision)):
            move(database, target, is_up=is_up)
            after = num_rows(database)
            assert {name: after[name] for name in counts if name in after} == {
                n: counts[n] for n in counts if n in after
            }
    move(database, "base", is_up=False)
    assert num_rows(database) == {}, "the first revision leaves nothing behind"
    database.dispose()


def test_the_whole_way_down_and_up_again(database_url: str) -> None:
    database = Database(database_url)
    migrate(database)
    with schema_change(database) as connection:
        fill_with_rows(connection)
    for revision in [*REVISIONS[:-1][::-1], "base"]:
        move(database, revision, is_up=False)
    migrate(database)
    migrate(database)  # again changes nothing
    with database.engine.connect() as connection:
        assert set(METADATA.tables) <= set(inspect(connection).get_table_names())
    database.dispose()


def index_conditions(database: Database) -> set[str]:
    """Every index with its condition, as the database tells it."""
    query = "SELECT sql FROM sqlite_master WHERE type = 'index'" if database.is_sqlite else (
        "SELECT indexdef FROM pg_indexes WHERE schemaname = current_schema()"
    )  # fmt: skip
    with database.engine.connect() as connection:
        return {" ".join(sql.split()) for sql in connection.execute(text(query)).scalars() if sql}


def test_a_step_down_and_up_again_keeps_the_conditions_of_every_index(database_url: str) -> None:
    """Two open attempts of a job are kept out by such a condition: a table that is rebuilt must not lose it."""
    database = Database(database_url)
    migrate(database)
    before = index_conditions(database)
    assert any("ux_attempts_open_job" in sql and "WHERE" in sql for sql in before)

    move(database, REVISIONS[1], is_up=False)
    migrate(database)

    assert index_conditions(database) == before
    database.dispose()


def test_what_a_checkpoint_said_is_gone_after_the_way_down_and_the_rest_of_the_job_is_not(database_url: str) -> None:
    database = Database(database_url)
    migrate(database)
    with schema_change(database) as connection:
        fill_with_rows(connection)
        tables = reflected(connection).tables
        connection.execute(tables["attempts"].update().values(resume_from="[]", shared_folder_id="s", outcome="hang"))
    move(database, "0002", is_up=False)
    with database.engine.connect() as connection:
        row = connection.execute(text("SELECT * FROM attempts")).one()._mapping
        assert row["outcome"] == "hang"
        assert not {"resume_from", "shared_folder_id", "forgotten_at"} & set(row)
    migrate(database)
    with database.engine.connect() as connection:
        again = connection.execute(text("SELECT outcome, resume_from FROM attempts")).one()._mapping
        assert dict(again) == {"outcome": "hang", "resume_from": None}
        assert connection.execute(text("SELECT count(*) FROM checkpoints")).scalar_one() == 0
    database.dispose()


def test_an_attempt_of_before_has_the_size_of_its_job(database_url: str) -> None:
    database = Database(database_url)
    move(database, "0003", is_up=True)
    with schema_change(database) as connection:
        fill_with_rows(connection)
        jobs = reflected(connection).tables["jobs"]
        connection.execute(jobs.update().values(num_nodes=3, gpus_per_node=8, processes_per_node=2))
    migrate(database)
    with database.engine.connect() as connection:
        tables = reflected(connection).tables
        row = connection.execute(select(tables["attempts"])).one()
        assert (row.num_nodes, row.gpus_per_node, row.processes_per_node) == (3, 8, 2)
        assert connection.execute(select(tables["jobs"].c.layouts)).scalar_one() is None
    database.dispose()


SPEC_OF_BEFORE = '{"preemptible":true,"resources":{"time_limit_seconds":5400.5}}'


def test_a_job_of_before_has_the_limit_and_the_turn_that_its_spec_says(database_url: str) -> None:
    database = Database(database_url)
    move(database, "0004", is_up=True)
    with schema_change(database) as connection:
        fill_with_rows(connection)
        jobs = reflected(connection).tables["jobs"]
        connection.execute(jobs.update().values(spec=SPEC_OF_BEFORE, submitted_at=77.25))
        silent = dict(connection.execute(select(jobs)).one()._mapping) | {"id": 2, "spec": "{}"}
        connection.execute(insert(jobs).values(silent))
    migrate(database)
    with database.engine.connect() as connection:
        tables = reflected(connection).tables
        said, silent_row = connection.execute(select(tables["jobs"]).order_by(tables["jobs"].c.id)).all()
        node = connection.execute(select(tables["nodes"])).one()
        user = connection.execute(select(tables["users"])).one()
        team = connection.execute(select(tables["teams"])).one()
    assert (said.limit_seconds, bool(said.is_preemptible), said.wait_began_at) == (5400.5, True, 77.25)
    assert (silent_row.limit_seconds, bool(silent_row.is_preemptible)) == (None, False)
    assert (said.on_time_limit, said.num_stops, said.served_seconds, bool(said.is_exclusive)) == ("fail", 0, 0.0, False)
    assert (said.hold_reason, said.start_after, said.gpu_memory_bytes, said.node_labels) == (None, None, None, None)
    assert (node.labels, bool(node.is_draining), bool(user.may_use_top_priority)) == ("{}", False, False)
    assert (team.quota_gpus, team.quota_nodes, team.cap_gpus, user.cap_gpus) == (None, None, None, None)
    database.dispose()


ENDED_BEFORE: dict[str, tuple[str, tuple[tuple[float | None, float | None], ...], float]] = {
    "one run": ("succeeded", ((100.0, 160.5),), 60.5),
    "its last run": ("failed", ((100.0, 160.0), (200.0, 230.0)), 30.0),
    "cancelled while starting": ("cancelled", ((None, 160.0),), 0.0),
    "never tried": ("cancelled", (), 0.0),
    "the clock was set back": ("succeeded", ((100.0, 90.0),), 0.0),
    "still running": ("running", ((100.0, None),), 0.0),
    "waiting again": ("waiting", ((100.0, 160.0),), 0.0),
}
"""State, when each attempt ran and ended, and for how long the job was served."""


def test_an_ended_job_of_before_was_served_for_as_long_as_its_last_attempt_ran(database_url: str) -> None:
    database = Database(database_url)
    move(database, "0004", is_up=True)
    with schema_change(database) as connection:
        fill_with_rows(connection)
        tables = reflected(connection).tables
        job, attempt = (dict(connection.execute(select(tables[name])).one()._mapping) for name in ("jobs", "attempts"))
        number_of_attempts = 1
        for job_id, (state, runs, _) in enumerate(ENDED_BEFORE.values(), start=10):
            connection.execute(insert(tables["jobs"]).values(job | {"id": job_id, "state": state, "spec": "{}"}))
            for number, (running_at, ended_at) in enumerate(runs, start=1):
                number_of_attempts += 1
                values = {"id": number_of_attempts, "job_id": job_id, "number": number, "state": "ended"}
                connection.execute(
                    insert(tables["attempts"]).values(
                        attempt | values | {"running_at": running_at, "ended_at": ended_at}
                    )
                )
        connection.execute(tables["jobs"].update().values(spec="{}"))
    migrate(database)
    with database.engine.connect() as connection:
        query = "SELECT served_seconds FROM jobs WHERE id >= 10 ORDER BY id"
        found = connection.execute(text(query)).scalars().all()
    assert dict(zip(ENDED_BEFORE, found, strict=True)) == {name: served for name, (*_, served) in ENDED_BEFORE.items()}
    database.dispose()


def test_what_a_job_waits_for_is_gone_after_the_way_down_and_the_job_is_not(database_url: str) -> None:
    database = Database(database_url)
    migrate(database)
    with schema_change(database) as connection:
        fill_with_rows(connection)
    move(database, "0004", is_up=False)
    with database.engine.connect() as connection:
        tables = reflected(connection).tables
        assert not {"job_dependencies", "nominations", "world_changes", "gpu_use"} & set(tables)
        assert len(connection.execute(select(tables["jobs"])).all()) == 1
        assert "hold_reason" not in tables["jobs"].c and "quota_gpus" not in tables["teams"].c
    migrate(database)
    with database.engine.connect() as connection:
        assert connection.execute(select(reflected(connection).tables["job_dependencies"])).all() == []
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
    with database.write() as tx:
        tx.connection.execute(text("UPDATE alembic_version SET version_num = '9999'"))

    with pytest.raises(SettingsError, match=r"schema 9999.*Install the newer version"):
        migrate(database)

    with database.engine.connect() as connection:
        assert connection.execute(text("SELECT version_num FROM alembic_version")).scalar_one() == "9999"
    database.dispose()


def test_foreign_keys_are_off_while_tables_are_rebuilt_and_on_again_afterwards(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    asked = "PRAGMA foreign_keys"
    with schema_change(database) as connection:
        assert connection.exec_driver_sql(asked).scalar_one() == 0
    with database.read() as connection:
        assert connection.exec_driver_sql(asked).scalar_one() == 1
    with database.write() as tx:
        assert tx.connection.exec_driver_sql(asked).scalar_one() == 1
    database.dispose()


def test_a_reading_connection_cannot_write_on_sqlite(sqlite_url: str) -> None:
    database = Database(sqlite_url)
    migrate(database)
    with pytest.raises(DatabaseUnavailable, match="readonly"), database.read() as connection:
        connection.execute(text("UPDATE pool SET pool_id = 'x'"))
    database.dispose()
