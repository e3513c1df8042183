"""What a submission says of its turn: what only the service can refuse of it, and the columns that hold it.

Not for: what the job file alone shows to be wrong (`service.schemas.turn_rules`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from sqlalchemy import bindparam, select

from gangline.protocol.outcomes import JobState
from service.auth.permissions import Action, JobFacts, authorise
from service.auth.principals import Principal
from service.db.session import Database
from service.db.tables import jobs, users
from service.domain.dependencies import Need
from service.domain.hold import Hold
from service.domain.priority import MOST_PRIORITY, is_top
from service.domain.spec import JobSpec
from service.errors import FieldProblem, Forbidden, NotFound

HELD_SINCE_SUBMISSION = "since its submission"

_NEEDED = select(jobs.c.id, jobs.c.state, jobs.c.owner_id, jobs.c.team_id, jobs.c.is_private).where(
    jobs.c.id.in_(bindparam("job_ids", expanding=True))
)
_MAY_USE_TOP = select(users.c.may_use_top_priority).where(users.c.id == bindparam("user_id"))


def turn_columns(spec: JobSpec, owner: str) -> dict[str, Any]:
    """The columns of a new job that tell its turn and what it asks of its nodes."""
    asked = spec.resources
    hold = Hold(by=owner, why=HELD_SINCE_SUBMISSION) if spec.hold else None
    return {
        "gpu_memory_bytes": asked.gpu_memory_bytes,
        "node_labels": json.dumps(asked.labels, ensure_ascii=False) if asked.labels else None,
        "is_exclusive": asked.exclusive,
        "is_preemptible": spec.preemptible,
        "limit_seconds": asked.time_limit_seconds,
        "on_time_limit": spec.on_time_limit,
        "hold_reason": None if hold is None else hold.to_json(),
        "start_after": spec.starts_after,
        "start_zone": spec.zone,
    }


def turn_problems(database: Database, principal: Principal, spec: JobSpec) -> list[FieldProblem]:
    """What is wrong with the priority and with the jobs that it needs; reads only if the spec has any of it."""
    problems = []
    if is_top(spec.priority) and not may_use_top(database, principal):
        problems.append(
            FieldProblem(
                pointer="priority",
                message=f"{principal.name} may not use the priority top: no admin has granted it",
                suggestion=f"use high or a number up to {MOST_PRIORITY}, or ask an admin: "
                f"gang admin grant-priority {principal.name}",
            )
        )
    return [*problems, *_need_problems(database, principal, spec)] if spec.after else problems


def may_use_top(database: Database, principal: Principal) -> bool:
    """Whether the user may give jobs the top priority: admins, and whom they have granted it."""
    if principal.is_admin:
        return True
    with database.read() as connection:
        return bool(connection.execute(_MAY_USE_TOP, {"user_id": principal.user_id}).scalar_one())


def _need_problems(database: Database, principal: Principal, spec: JobSpec) -> Iterator[FieldProblem]:
    with database.read() as connection:
        rows = connection.execute(_NEEDED, {"job_ids": [one.job for one in spec.after]}).all()
    seen = {row.id: row for row in rows if _may_see(principal, row)}
    for index, one in enumerate(spec.after):
        pointer = f"after[{index}]"
        if one.job not in seen:
            yield FieldProblem(
                pointer=pointer,
                message=f"there is no job {one.job}",
                suggestion="look up the ids: gang ls",
            )
            continue
        need = Need(job_id=one.job, condition=one.condition, state=JobState(seen[one.job].state))
        if need.is_hopeless:
            yield FieldProblem(
                pointer=pointer,
                message=f"{need.hopeless_text}: this can never be",
                suggestion="remove it, name another job, or use the condition any",
            )


def _may_see(principal: Principal, row: Any) -> bool:
    facts = JobFacts(job_id=row.id, owner_id=row.owner_id, team_id=row.team_id, is_private=row.is_private)
    try:
        authorise(principal, Action.JOB_SEE, facts)
    except (NotFound, Forbidden):
        return False
    return True
