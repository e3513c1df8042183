"""One pool per database for the tests that only use it; tests that break parts start a pool of their own."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.stack import Stack


@pytest.fixture(scope="package", params=["sqlite", "postgresql"])
def pool(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """A running pool of two nodes with two CPU slots each, on SQLite and on PostgreSQL."""
    database_url = ""
    if request.param == "postgresql":
        database_url = request.getfixturevalue("postgres_server").fresh_database()
    with Stack(database_url=database_url) as stack:
        yield stack
