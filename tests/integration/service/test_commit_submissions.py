"""Submissions that share a transaction: each stored once, each told the truth, one that fails failing alone."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Table, func, select, text

from service.api.deps import AppState
from service.app import create_state
from service.auth.principals import Principal, load_principal
from service.auth.tokens import hash_token
from service.db.tables import events, idempotency_keys, jobs
from service.errors import DatabaseUnavailable, IdempotencyConflict
from service.first_start import make_first_admin
from service.operations.submit_job import check_submission, submit_job
from service.schemas.parse_spec import parse_spec
from service.settings import Settings
from tests.support.wait import wait_until

Answer = tuple[str, bool]
"""The answer's text, and whether it replays an earlier one."""


class Pool:
    """A database with an admin, who submits the same job again and again."""

    def __init__(self, folder: Path, database_url: str) -> None:
        self.state: AppState = create_state(Settings(data_folder=folder, database_url=database_url))
        database = self.state.database
        make_first_admin(database, folder)
        token_hash = hash_token((folder / "admin.token").read_text().strip())
        with database.read() as connection:
            principal = load_principal(connection, token_hash, database.now(connection))
        assert principal is not None
        self.admin: Principal = principal

    def submit(self, key: str | None, hashed: str = "the request") -> Answer:
        spec = parse_spec(b'{"name": "n", "run": {"command": ["true"]}}', "application/json", [])
        state = self.state
        checked = check_submission(state.database, state.settings, state.shapes, self.admin, spec, is_dry_run=False)
        return submit_job(
            state.database, state.committer, self.admin, checked, key=key, hashed=hashed, describe=describe
        )

    def submit_together(self, keys: Sequence[str | None]) -> list[Future[Answer]]:
        """One thread for each key, all of which find the turn taken; so that they are stored together."""
        committer = self.state.committer
        with ThreadPoolExecutor(len(keys)) as threads:
            with committer._turn:
                futures = [threads.submit(self.submit, key) for key in keys]
                wait_until(lambda: len(committer._arrived) == len(keys), 60, "not all submissions arrived")
        return futures

    def count(self, table: Table) -> int:
        with self.state.database.read() as connection:
            return int(connection.execute(select(func.count()).select_from(table)).scalar_one())

    def job_times(self) -> set[float]:
        with self.state.database.read() as connection:
            return set(connection.execute(select(jobs.c.submitted_at)).scalars())


@pytest.fixture
def pool(tmp_path: Path, database_url: str) -> Iterator[Pool]:
    pool = Pool(tmp_path / "data", database_url)
    yield pool
    pool.state.database.dispose()


def describe(job_id: int, columns: Mapping[str, Any]) -> str:
    return f"job {job_id} is {columns['state']}"


def test_submissions_that_come_together_share_a_transaction(pool: Pool) -> None:
    futures = pool.submit_together([f"key {number}" for number in range(8)] + [None, None])

    answers = [future.result() for future in futures]

    assert len({answer for answer, _ in answers}) == 10
    assert not any(is_replay for _, is_replay in answers)
    assert (pool.count(jobs), pool.count(idempotency_keys)) == (10, 8)
    assert len(pool.job_times()) == 1, "they have the time of one transaction"


def test_each_is_told_of_its_own_job(pool: Pool) -> None:
    keys = [f"key {number}" for number in range(8)]

    told = dict(zip(keys, (future.result()[0] for future in pool.submit_together(keys)), strict=True))

    assert {key: pool.submit(key) for key in keys} == {key: (answer, True) for key, answer in told.items()}


def test_a_key_that_comes_twice_at_once_makes_one_job_and_disturbs_no_other(pool: Pool) -> None:
    futures = pool.submit_together(["twice", "once", "twice", None])

    first, once, second, bare = (future.result() for future in futures)

    assert first[0] == second[0]
    assert sorted((first[1], second[1])) == [False, True], "one of the two replays the other"
    assert not once[1] and not bare[1]
    assert pool.count(jobs) == 3


def test_a_key_of_another_request_is_a_conflict_for_that_one_alone(pool: Pool) -> None:
    pool.submit("taken", hashed="another request")

    with pytest.raises(IdempotencyConflict):
        pool.submit("taken")

    assert pool.count(jobs) == 1


def test_nothing_is_stored_when_an_answer_cannot_be_made(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(job_id: int, columns: Mapping[str, Any]) -> str:
        raise ValueError(f"job {job_id} cannot be described")

    monkeypatch.setitem(globals(), "describe", fail)
    num_events = pool.count(events)

    futures = pool.submit_together(["one", "two"])

    assert all(isinstance(future.exception(), ValueError) for future in futures), "each of them hears of it"
    assert (pool.count(jobs), pool.count(idempotency_keys)) == (0, 0)
    assert pool.count(events) == num_events


def test_a_locked_sqlite_file_is_an_unavailable_database(
    tmp_path: Path, sqlite_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("service.db.session.BUSY_TIMEOUT_MILLISECONDS", 50)
    pool, other = Pool(tmp_path / "data", sqlite_url), Pool(tmp_path / "data", sqlite_url)
    try:
        with other.state.database.write() as held:
            held.connection.execute(text("SELECT 1"))
            with pytest.raises(DatabaseUnavailable, match="locked"):
                pool.submit("late")
        assert not pool.submit("late")[1], "and once it is free, the same key is a new submission"
    finally:
        pool.state.database.dispose()
        other.state.database.dispose()
