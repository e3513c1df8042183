"""The database of a pool that a chaos test starts for itself."""

from __future__ import annotations

import pytest


@pytest.fixture(params=["sqlite", "postgresql"])
def stack_database(request: pytest.FixtureRequest) -> str:
    """`database_url` of a `Stack`: empty for SQLite, else a fresh PostgreSQL database."""
    if request.param == "sqlite":
        return ""
    url: str = request.getfixturevalue("postgres_server").fresh_database()
    return url
