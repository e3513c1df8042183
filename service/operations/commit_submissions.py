"""Store submissions. Those that arrive while a transaction is open share the next one: a burst pays for few commits.

Nobody waits for company: who finds the turn free commits at once, for all who have come by then. Each is told only
after the commit that holds its job. Not for: what may be refused before anything is stored (`submit_job`).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import insert
from sqlalchemy.exc import StatementError

from service.db.dependencies import store_needs
from service.db.session import Database, Write
from service.db.tables import events, idempotency_keys, jobs
from service.db.transitions import cancel_hopeless
from service.db.world_changes import mark_all_changed


@dataclass(frozen=True, kw_only=True)
class NewJob:
    """A checked submission as it will be stored."""

    owner_id: int
    owner: str
    columns: Mapping[str, Any]
    """Of its row, but for the id and the time."""
    key: str | None
    """Its Idempotency-Key."""
    request_hash: str
    needs: tuple[tuple[int, str], ...] = ()
    """Jobs that must have ended before it starts, each with its condition."""
    describe: Callable[[int, Mapping[str, Any]], str]
    """From the id and all columns to the answer, which is stored with the key in the same transaction."""


@dataclass
class _Entry:
    new_job: NewJob
    answer: str | None = None
    error: Exception | None = None

    @property
    def is_done(self) -> bool:
        return self.answer is not None or self.error is not None


class SubmissionCommitter:
    """Commits submissions of any thread, in the thread that has the turn."""

    def __init__(self, database: Database):
        self._database = database
        self._arrival = threading.Lock()
        self._arrived: list[_Entry] = []
        self._turn = threading.Lock()

    def commit(self, new_job: NewJob) -> str:
        """Store the job, its first event and its key; returns the answer once they are committed.

        Raises IntegrityError when the key is taken, DatabaseUnavailable; then nothing of it is stored.
        """
        entry = _Entry(new_job)
        with self._arrival:
            self._arrived.append(entry)
        with self._turn:
            if not entry.is_done:
                with self._arrival:
                    batch, self._arrived = self._arrived, []
                self._commit_batch(batch)
        if entry.error is not None:
            raise entry.error
        assert entry.answer is not None, "a batch ends with an answer or an error for each"
        return entry.answer

    def _commit_batch(self, batch: Sequence[_Entry]) -> None:
        try:
            with self._database.write() as tx:
                answers = _insert(tx, [entry.new_job for entry in batch])
        except StatementError as error:
            if len(batch) == 1:
                batch[0].error = error
                return
            # One of them has a key that is taken, or what the database cannot hold. Alone, it alone fails.
            for entry in batch:
                self._commit_batch([entry])
        except Exception as error:  # noqa: BLE001  # raised again by `commit`, in the thread of each of them
            for entry in batch:
                entry.error = error
        else:
            for entry, answer in zip(batch, answers, strict=True):
                entry.answer = answer


_INSERT_JOBS = insert(jobs).returning(jobs.c.id, sort_by_parameter_order=True)
_INSERT_EVENTS = insert(events)
_INSERT_KEYS = insert(idempotency_keys)


def _insert(tx: Write, new_jobs: Sequence[NewJob]) -> list[str]:
    """The answers, in the order of `new_jobs`."""
    rows = [{**new.columns, "submitted_at": tx.now, "wait_began_at": tx.now} for new in new_jobs]
    ids = tx.connection.execute(_INSERT_JOBS, rows).scalars().all()
    tx.connection.execute(
        _INSERT_EVENTS,
        [
            {
                "at": tx.now,
                "kind": "job_waiting",
                "actor": new.owner,
                "job_id": job_id,
                "text": f"Submitted by {new.owner}.",
                "data": "{}",
            }
            for new, job_id in zip(new_jobs, ids, strict=True)
        ],
    )
    answers = [new.describe(job_id, row) for new, job_id, row in zip(new_jobs, ids, rows, strict=True)]
    keys = [
        {
            "user_id": new.owner_id,
            "key": new.key,
            "request_hash": new.request_hash,
            "status": 201,
            "response": answer,
            "created_at": tx.now,
        }
        for new, answer in zip(new_jobs, answers, strict=True)
        if new.key is not None
    ]
    if keys:
        # In one order: two API processes that store some of the same keys wait for each other, never in a circle.
        tx.connection.execute(_INSERT_KEYS, sorted(keys, key=lambda row: (row["user_id"], row["key"])))
    mark_all_changed(tx, "job", ids)
    _wait_for_others(tx, {job_id: new.needs for new, job_id in zip(new_jobs, ids, strict=True) if new.needs})
    return answers


def _wait_for_others(tx: Write, needs: Mapping[int, Sequence[tuple[int, str]]]) -> None:
    """Store what the jobs need. What was needed may have ended since the submission was checked: then they end too."""
    if needs:
        store_needs(tx, needs)
        cancel_hopeless(tx, list(needs))
