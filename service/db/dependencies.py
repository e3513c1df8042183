"""Jobs that wait for others: storing what they need, reading how that stands, and what follows when a needed job ends.

The rows that are needed are locked before their states are read, so that on PostgreSQL a job which ends at the same
moment is either seen here or sees the new dependency. Locks are taken in the order of ids; a job only ever needs
older ones.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from typing import Any

from sqlalchemy import Connection, bindparam, exists, insert, select, update

from gangline.protocol.outcomes import JobState
from service.db.session import Write
from service.db.tables import job_dependencies, jobs
from service.domain.dependencies import Need
from service.domain.spec import Condition

_ENDED = [state for state in JobState if state.is_terminal]
_INSERT = insert(job_dependencies)
_NEEDS = select(
    job_dependencies.c.job_id, job_dependencies.c.needs_job_id, job_dependencies.c.condition, jobs.c.state,
    jobs.c.is_private,
).join(jobs, jobs.c.id == job_dependencies.c.needs_job_id).order_by(
    job_dependencies.c.job_id, job_dependencies.c.needs_job_id
)  # fmt: skip
_NEEDS_OF = _NEEDS.where(job_dependencies.c.job_id.in_(bindparam("job_ids", expanding=True)))
_waiting = jobs.alias("waiting")
_NEEDS_OF_WAITING = _NEEDS.join(_waiting, _waiting.c.id == job_dependencies.c.job_id).where(
    _waiting.c.state == JobState.WAITING
)
_LOCK_NEEDED = (
    select(jobs.c.id)
    .where(jobs.c.id.in_(bindparam("job_ids", expanding=True)))
    .order_by(jobs.c.id)
    .with_for_update(read=True)
)
_below = (
    select(job_dependencies.c.job_id.label("id"))
    .where(job_dependencies.c.needs_job_id.in_(bindparam("job_ids", expanding=True)))
    .cte("below", recursive=True)
)
_below = _below.union(select(job_dependencies.c.job_id).join(_below, job_dependencies.c.needs_job_id == _below.c.id))
_LOCK_BELOW = (
    select(jobs.c.id)
    .where(jobs.c.id.in_(select(_below.c.id)), jobs.c.state == JobState.WAITING)
    .order_by(jobs.c.id)
    .with_for_update(of=jobs)
)
_WAITING_DEPENDENTS = (
    select(jobs.c.id)
    .join(job_dependencies, job_dependencies.c.job_id == jobs.c.id)
    .where(job_dependencies.c.needs_job_id == bindparam("needs_job_id"), jobs.c.state == JobState.WAITING)
    .order_by(jobs.c.id)
)
_needed = jobs.alias("needed")
_NOW_FREE = (
    update(jobs)
    .where(
        jobs.c.id.in_(bindparam("job_ids", expanding=True)),
        jobs.c.state == JobState.WAITING,
        ~exists(
            select(_needed.c.id)
            .join(job_dependencies, job_dependencies.c.needs_job_id == _needed.c.id)
            .where(job_dependencies.c.job_id == jobs.c.id, _needed.c.state.not_in(_ENDED))
        ),
    )
    .values(wait_began_at=bindparam("now"))
)


def load_needs(connection: Connection, job_ids: Sequence[int] | None = None) -> dict[int, tuple[Need, ...]]:
    """What these jobs need (None: all waiting jobs), the oldest needed first; jobs that need none are not in it."""
    if job_ids is None:
        rows = connection.execute(_NEEDS_OF_WAITING)
    else:
        rows = connection.execute(_NEEDS_OF, {"job_ids": list(job_ids)})
    found: defaultdict[int, list[Need]] = defaultdict(list)
    for row in rows:
        need = Need(
            job_id=row.needs_job_id,
            condition=Condition(row.condition),
            state=JobState(row.state),
            is_private=row.is_private,
        )
        found[row.job_id].append(need)
    return {job_id: tuple(needs) for job_id, needs in found.items()}


def store_needs(tx: Write, needs: Mapping[int, Sequence[tuple[int, str]]]) -> None:
    """Store what new jobs need, as (job id, condition), once the needed ones are locked."""
    rows: list[dict[str, Any]] = [
        {"job_id": job_id, "needs_job_id": needed, "condition": condition}
        for job_id, pairs in needs.items()
        for needed, condition in pairs
    ]
    if rows:
        tx.connection.execute(_LOCK_NEEDED, {"job_ids": sorted({row["needs_job_id"] for row in rows})})
        tx.connection.execute(_INSERT, rows)


def lock_dependents(tx: Write, job_ids: Sequence[int]) -> bool:
    """Lock the waiting jobs that need these, directly or through others, in the order of ids; whether there are any."""
    return bool(tx.connection.execute(_LOCK_BELOW, {"job_ids": list(job_ids)}).all())


def waiting_dependents(tx: Write, job_id: int) -> list[int]:
    """The waiting jobs that need this one, the oldest first; `lock_dependents` has locked them."""
    return list(tx.connection.execute(_WAITING_DEPENDENTS, {"needs_job_id": job_id}).scalars())


def begin_wait_of_free(tx: Write, job_ids: Sequence[int]) -> None:
    """The present wait of those that need no running or waiting job any more begins now: what came before was not
    waiting for room."""
    if job_ids:
        tx.connection.execute(_NOW_FREE, {"job_ids": list(job_ids), "now": tx.now})
