"""The PostgreSQL of the tests: real, unprivileged, one database per test, alive again after a crash."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import sqlalchemy
from sqlalchemy.exc import OperationalError

from tests.support import postgres
from tests.support.postgres import PostgresServer
from tests.support.processes import is_alive, listeners


def run(url: str, *statements: str) -> list[object]:
    """Execute in one transaction; the rows of the last statement."""
    engine = sqlalchemy.create_engine(url, poolclass=sqlalchemy.NullPool)
    with engine.begin() as connection:
        results = [connection.execute(sqlalchemy.text(statement)) for statement in statements]
        return [row[0] for row in results[-1]] if results[-1].returns_rows else []


def test_two_databases_do_not_see_each_other(postgres_server: PostgresServer) -> None:
    first, second = postgres_server.fresh_database(), postgres_server.fresh_database()

    run(first, "create table job (id int)", "insert into job values (7)")

    assert run(first, "select id from job") == [7]
    assert run(second, "select count(*) from pg_tables where tablename = 'job'") == [0]


def test_a_template_is_filled_once_and_copied(postgres_server: PostgresServer) -> None:
    fillings: list[str] = []

    def fill(url: str) -> None:
        fillings.append(url)
        run(url, "create table job (id int)", "insert into job values (7)")

    copies = [postgres_server.fresh_database(postgres_server.template("with_job", fill)) for _ in range(2)]

    assert [run(url, "select id from job") for url in copies] == [[7], [7]]
    assert len(fillings) == 1


def test_a_dropped_database_is_gone_though_somebody_was_connected(postgres_server: PostgresServer) -> None:
    url = postgres_server.fresh_database()
    engine = sqlalchemy.create_engine(url)
    with engine.connect() as connection:
        connection.execute(sqlalchemy.text("select 1"))

        postgres_server.drop_database(url)

        connection.invalidate()
        with pytest.raises(OperationalError, match="does not exist"):
            run(url, "select 1")


def test_it_opens_no_port_unless_asked_and_then_on_loopback_only() -> None:
    for tcp in (False, True):
        server = PostgresServer(tcp=tcp)
        try:
            server.start()
            addresses = {item.address for item in listeners([server.pid])}
            expected = {str(server.folder / f".s.PGSQL.{server.port}")} | (
                {f"127.0.0.1:{server.port}"} if tcp else set()
            )
            assert addresses == expected
            assert run(server.fresh_database(), "select 1") == [1]
        finally:
            server.stop()


def test_committed_rows_survive_a_kill_and_stop_leaves_nothing() -> None:
    server = PostgresServer()
    try:
        server.start()
        url = server.fresh_database()
        run(url, "create table job (id int)", "insert into job values (7)")

        server.kill9()
        server.start()

        assert run(url, "select id from job") == [7]
        pid = server.pid
    finally:
        server.stop()
    assert not is_alive(pid)
    assert not server.folder.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root hands the binaries to another account")
def test_binaries_below_a_private_folder_are_copied_to_where_the_account_can_read_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(postgres, "others_may_enter", lambda path: False)  # as below a home of mode 0700

    server = PostgresServer()
    try:
        server.start()
        assert Path(f"/proc/{server.pid}/exe").readlink().is_relative_to(server.folder)
        assert run(server.fresh_database(), "select 1") == [1]
    finally:
        server.stop()


def test_a_folder_is_private_when_any_folder_above_it_is(tmp_path: Path) -> None:
    inner = tmp_path / "private" / "bin"
    inner.mkdir(parents=True)
    inner.chmod(0o755)
    inner.parent.chmod(0o700)

    assert not postgres.others_may_enter(inner)
    assert postgres.others_may_enter(Path("/usr/bin"))


def test_every_test_runs_on_both_databases(database_url: str) -> None:
    assert run(database_url, "create table job (id int)", "select 1") == [1]
