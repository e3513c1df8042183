"""Which jobs resume when they are stopped, as SQL: one rule for the scheduler, drains and whoever else stops jobs.

A job that says that it resumes is believed at once if Gangline's own loop runs it; a script, once it has told of a
checkpoint. Not for: where it can resume (`service.scheduler.load_world`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import JSON, ColumnElement, Connection, and_, cast, exists, func, or_, select

from service.db.tables import attempts, jobs
from service.domain.training_evidence import TRAINED_KINDS

_HAS_TOLD = exists(select(attempts.c.id).where(attempts.c.job_id == jobs.c.id, attempts.c.checkpointed_at.is_not(None)))


def kind_of(connection: Connection) -> ColumnElement[Any]:
    """What a job runs (`script`, `entry`, …), out of its spec and in the database: specs are long, and jobs many."""
    if connection.dialect.name == "sqlite":
        return func.json_extract(jobs.c.spec, "$.run.kind")
    return cast(jobs.c.spec, JSON)["run"]["kind"].as_string()


def does_resume(connection: Connection) -> ColumnElement[bool]:
    """Whether a job goes on, when it starts again, from what it has saved. For queries that select from `jobs`."""
    return and_(jobs.c.is_preemptible, or_(kind_of(connection).in_(TRAINED_KINDS), _HAS_TOLD.correlate(jobs)))
