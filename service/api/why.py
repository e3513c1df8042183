"""The route behind `gang why`: why a job waits, what is ahead of it, who holds GPUs, when it starts, what would help.

Not for: the whole queue (`service.api.queue`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Annotated, Any, Final

from fastapi import APIRouter, Depends
from sqlalchemy import Connection, Row, select
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from gangline.protocol.outcomes import JobState
from service.api.deps import AppState, State, allowed_job, caller, job_facts, json_response
from service.api.start_json import advice_json, faces, start_json, variants_json
from service.auth.permissions import Action, may_read
from service.auth.principals import Principal
from service.db.tables import jobs
from service.domain.limit_advice import advise_limit
from service.domain.reasons import NOT_FOR_GPUS, ReasonCode
from service.operations.explain_job import AHEAD_SHOWN, Explanation, explain, look
from service.operations.load_limit_history import load_limit_history
from service.operations.submit_job import SUBMITTED
from service.scheduler.forecast import Forecast

router = APIRouter(prefix=f"{API_PREFIX}/jobs")
GOING = (JobState.STARTING, JobState.RUNNING, JobState.STOPPING)
_UNKNOWN = Forecast(why_unknown="It was just submitted; the scheduler has not looked at it yet.")
_HOLDERS = select(jobs.c.id).where(jobs.c.state.in_(GOING)).order_by(jobs.c.started_at, jobs.c.id).limit(AHEAD_SHOWN)


@router.get("/{job_id}/why")
def get_why(
    state: State,
    principal: Annotated[Principal, Depends(caller(Action.JOB_SEE))],
    job_id: int,
    variants: bool = False,
) -> Response:
    """Why the job waits: reason, who is ahead or holds GPUs, when it starts, its quota; `variants`: what would help."""
    with state.database.read() as connection:
        row = allowed_job(connection, principal, job_id, Action.JOB_SEE)
    reason = json.loads(row.reason) if row.reason else None
    if row.state != JobState.WAITING:
        return json_response(_answer(row, reason, _NOBODY, None, None))
    reason = reason or SUBMITTED.to_json()
    told = explain(state.held, job_id)
    with state.database.read() as connection:
        others = _others(connection, principal, reason, told)
    helping = (
        _helping(state, row, told) if variants and told is not None and may_read(principal, job_facts(row)) else {}
    )
    return json_response(_answer(row, reason, others, told, helping))


_NOBODY: Final[dict[str, Any]] = {"ahead": {"count": 0, "jobs": []}, "holders": []}


def _others(
    connection: Connection, principal: Principal, reason: dict[str, Any], told: Explanation | None
) -> dict[str, Any]:
    """The jobs ahead in the queue, and some that hold GPUs where the job waits for GPUs."""
    ahead = {"count": 0, "jobs": []}
    holders: Iterable[int] = ()
    if told is not None:
        ahead = {"count": told.num_ahead, "jobs": faces(connection, principal, told.ahead)}
    if reason["code"] not in NOT_FOR_GPUS:
        holders = told.holders if told is not None else connection.execute(_HOLDERS).scalars().all()
    return {"ahead": ahead, "holders": faces(connection, principal, holders)}


def _answer(
    row: Row[Any],
    reason: dict[str, Any] | None,
    others: dict[str, Any],
    told: Explanation | None,
    helping: dict[str, Any] | None,
) -> dict[str, Any]:
    waits = row.state == JobState.WAITING
    forecast = _UNKNOWN if told is None or told.forecast is None else told.forecast
    start = start_json(forecast, 0.0 if told is None else told.at) if waits else None
    return {
        "id": row.id,
        "state": row.state,
        "reason": reason,
        **others,
        # Of a job that does not wait there is nothing to say.
        "can_ever_start": (reason or {}).get("code") != ReasonCode.NEVER_FITS if waits else None,
        "estimated_start": None if start is None else start["p50"],
        "start": start,
        "position": None if told is None else told.position,
        "left_seconds": None if told is None else told.left_seconds,
        "quota": None if told is None else _quota_json(row, told),
        "variants": (helping or {}).get("variants", []),
        "advice": (helping or {}).get("advice"),
    }


def _quota_json(row: Row[Any], told: Explanation) -> dict[str, Any]:
    standing = told.standing
    return {
        "team": row.team,
        "held_gpus": standing.held_gpus,
        "quota_gpus": standing.quota_gpus,
        "held_nodes": standing.held_nodes,
        "quota_nodes": standing.quota_nodes,
        "cap_gpus": standing.cap_gpus,
        "user_held_gpus": standing.user_held_gpus,
        "user_cap_gpus": standing.user_cap_gpus,
    }


def _helping(state: AppState, row: Row[Any], told: Explanation) -> dict[str, Any]:
    """What its owner could ask for instead, and what the owner's history says of the limit."""
    with state.database.read() as connection:
        history = load_limit_history(connection, row.owner_id, row.num_nodes * row.gpus_per_node)
    advice = advise_limit(history, row.limit_seconds)
    outlook, found = look(state.held, told.job, None if advice is None else advice.limit_seconds)
    return {"variants": variants_json(found, outlook, told.at), "advice": advice_json(advice, outlook, found)}
