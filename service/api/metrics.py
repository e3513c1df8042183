"""Route of metrics: the curves of an attempt, reduced to at most 2,000 points each."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from sqlalchemy import Connection, func, select
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import MAX_ID, AttemptNumber, State, allowed_job, caller, json_response
from service.auth.permissions import Action
from service.auth.principals import Principal
from service.db.tables import attempts, metric_buckets
from service.domain.metric_pyramid import MAX_POINTS, level_for, width
from service.errors import NotFound

router = APIRouter(prefix=f"{API_PREFIX}/jobs/{{job_id}}/metrics")


@router.get("")
def get_metrics(
    state: State,
    principal: Annotated[Principal, Depends(caller(Action.JOB_READ))],
    job_id: int,
    keys: str | None = None,
    attempt: AttemptNumber = None,
    first: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    points: Annotated[int, Query(ge=1, le=MAX_POINTS)] = MAX_POINTS,
) -> Response:
    """Columns by key: step, last, minimum, maximum of each bucket. A value that was not finite is a string."""
    with state.database.read() as connection:
        job = allowed_job(connection, principal, job_id, Action.JOB_READ)
        query = select(attempts.c.id, attempts.c.number).where(attempts.c.job_id == job.id)
        if attempt is not None:
            query = query.where(attempts.c.number == attempt)
        row = connection.execute(query.order_by(attempts.c.number.desc()).limit(1)).one_or_none()
        if row is None:
            if attempt is not None:
                raise NotFound(f"job {job_id} has no attempt {attempt}")
            return json_response({"attempt": None, "keys": {}})
        wanted = keys.split(",") if keys else None
        curves = _curves(connection, row.id, wanted, first, points)
    return json_response({"attempt": row.number, "keys": curves})


def _curves(
    connection: Connection, attempt_id: int, wanted: list[str] | None, first: int, points: int
) -> dict[str, dict[str, list[Any]]]:
    table = metric_buckets.c
    ranges = (
        select(table.key, func.min(table.step), func.max(table.step))
        .where(table.attempt_id == attempt_id, table.step >= first)
        .group_by(table.key)
        .order_by(table.key)
    )
    if wanted is not None:
        ranges = ranges.where(table.key.in_(wanted))
    curves = {}
    for key, lowest, highest in connection.execute(ranges).all():
        level = level_for(lowest, highest, points)
        rows = connection.execute(
            select(metric_buckets)
            .where(
                table.attempt_id == attempt_id,
                table.key == key,
                table.level == level,
                table.bucket >= first // width(level),
            )
            .order_by(table.bucket.desc())
            .limit(points)
        ).all()[::-1]
        curves[key] = {
            "step": [row.step for row in rows],
            "last": [row.last if row.last_text is None else row.last_text for row in rows],
            "min": [row.minimum for row in rows],
            "max": [row.maximum for row in rows],
        }
    return curves
