"""The route behind `gang top`: the pool at a glance, in one answer.

Nodes with the use of their GPUs, the running jobs, the jobs that have waited longest with their reason, and what each
team holds of its quota. Not for: all jobs (`service.api.jobs`) or the order of the queue (the scheduler).
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from sqlalchemy import Connection, Row, func, select
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import JOB_ROW, State, caller, job_facts, json_response
from service.api.job_json import Latest, least_gpus, load_attempts, progress_json
from service.api.nodes import nodes_json
from service.api.start_json import reason_json
from service.auth.permissions import Action, may_read
from service.auth.principals import Principal
from service.clock import rfc3339
from service.db.tables import allocations, attempt_nodes, attempts, jobs, teams
from service.domain.states import JobState

router = APIRouter(prefix=API_PREFIX)
GOING = (JobState.STARTING, JobState.RUNNING, JobState.STOPPING)
_HELD_BY_TEAM = (
    select(jobs.c.team_id, func.count().label("num_gpus"))
    .join(attempts, attempts.c.job_id == jobs.c.id)
    .join(attempt_nodes, attempt_nodes.c.attempt_id == attempts.c.id)
    .join(allocations, allocations.c.attempt_node_id == attempt_nodes.c.id)
    .where(allocations.c.released_at.is_(None))
    .group_by(jobs.c.team_id)
)
_COUNTS = (
    select(
        jobs.c.state, func.count().label("num_jobs"), func.sum(jobs.c.num_nodes * jobs.c.gpus_per_node).label("gpus")
    )
    .where(jobs.c.state.in_([*GOING, JobState.WAITING]))
    .group_by(jobs.c.state)
)


@router.get("/overview")
def get_overview(
    state: State,
    principal: Annotated[Principal, Depends(caller(Action.POOL_SEE))],
    limit: Annotated[int, Query(ge=1, le=200)] = 20,
) -> Response:
    """The pool at a glance: nodes and the use of their GPUs, running and waiting jobs, what each team holds."""
    with state.database.read() as connection:
        now = state.database.now(connection)
        counts = {row.state: row for row in connection.execute(_COUNTS)}
        waiting = counts.get(JobState.WAITING)
        return json_response(
            {
                "at": rfc3339(now),
                "nodes": nodes_json(connection, principal),
                "running": _running(connection, principal, limit, now),
                "num_running": sum(counts[name].num_jobs for name in GOING if name in counts),
                "waiting": _waiting(connection, principal, limit),
                "num_waiting": waiting.num_jobs if waiting else 0,
                "num_gpus_waited_for": int(waiting.gpus) if waiting else 0,
                "teams": _teams(connection),
            }
        )


def _running(connection: Connection, principal: Principal, limit: int, now: float) -> list[dict[str, Any]]:
    query = JOB_ROW.where(jobs.c.state.in_(GOING)).order_by(jobs.c.started_at, jobs.c.id).limit(limit)
    rows = connection.execute(query).all()
    latest = load_attempts(connection, [row.id for row in rows], now)
    return [_running_json(row, latest.get(row.id, Latest()), principal, now) for row in rows]


def _running_json(row: Row[Any], latest: Latest, principal: Principal, now: float) -> dict[str, Any]:
    is_insider = may_read(principal, job_facts(row))
    progress = progress_json(latest.progress, now) if latest.progress and is_insider else None
    gpus = latest.size["gpus"] if latest.size else row.num_nodes * row.gpus_per_node
    return {**_face(row, principal), "gpus": gpus, "started_at": rfc3339(row.started_at), "progress": progress}


def _waiting(connection: Connection, principal: Principal, limit: int) -> list[dict[str, Any]]:
    query = JOB_ROW.where(jobs.c.state == JobState.WAITING).order_by(jobs.c.wait_began_at, jobs.c.id).limit(limit)
    return [
        {
            **_face(row, principal),
            "gpus": row.num_nodes * row.gpus_per_node,
            "min_gpus": least_gpus(row.layouts),
            "waiting_since": rfc3339(row.wait_began_at),
            "reason": reason_json(principal, row, json.loads(row.reason) if row.reason else None),
        }
        for row in connection.execute(query)
    ]


def _face(row: Row[Any], principal: Principal) -> dict[str, Any]:
    """A job as anybody may see it: a private one only as such."""
    facts = {"team": row.team, "state": row.state}
    if row.is_private and not may_read(principal, job_facts(row)):
        return {"id": None, "name": f"a private job of team {row.team}", "owner": None, **facts}
    return {"id": row.id, "name": row.name, "owner": row.owner, **facts}


def _teams(connection: Connection) -> list[dict[str, Any]]:
    """Teams that hold GPUs or are promised some."""
    held = {row.team_id: row.num_gpus for row in connection.execute(_HELD_BY_TEAM)}
    return [
        {
            "name": row.name,
            "held_gpus": held.get(row.id, 0),
            "quota_gpus": row.quota_gpus,
            "quota_nodes": row.quota_nodes,
            "cap_gpus": row.cap_gpus,
        }
        for row in connection.execute(select(teams).order_by(teams.c.name))
        if row.id in held or row.quota_gpus is not None or row.quota_nodes is not None or row.cap_gpus is not None
    ]
