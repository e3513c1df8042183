"""Routes about how the pool is used: GPU-hours by user, team and week, and jobs that hold GPUs without using them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import State, caller, job_facts, json_response
from service.api.times import moment
from service.auth.permissions import Action, may_read
from service.auth.principals import Principal
from service.clock import rfc3339
from service.domain.gpu_use import IDLE_UTILISATION
from service.domain.usage import UsageRow, check_axes, sum_usage
from service.errors import InvalidRequest
from service.operations.find_idle_holders import IdleHolder, load_idle_holders
from service.operations.load_usage import Window, load_usage

router = APIRouter(prefix=API_PREFIX)
Anybody = Annotated[Principal, Depends(caller(Action.POOL_SEE))]
DEFAULT_WINDOW_SECONDS = 28 * 86_400.0
MAX_WINDOW_DAYS = 366
"""Every attempt in the window is read into memory."""
NUMBERS = ("held_gpu_hours", "busy_gpu_hours", "lost_gpu_hours", "jobs")


@router.get("/usage")
def get_usage(
    state: State,
    principal: Anybody,
    by: Annotated[str, Query(max_length=100)] = "team",
    since: str | None = None,
    until: str | None = None,
    format: Annotated[str, Query(pattern="^(json|csv)$")] = "json",
) -> Response:
    """GPU-hours held, busy and lost to preemption by user, team and ISO week: of one's teams, for an admin of all."""
    axes = tuple(by.split(","))
    with state.database.read() as connection:
        now = state.database.now(connection)
        window = _window(axes, since, until, now)
        used = load_usage(connection, principal, window, now=now)
    rows, total = sum_usage(used, axes, since=window.since, until=min(window.until, now))
    if format == "csv":
        return Response(_csv(axes, rows), media_type="text/csv; charset=utf-8")
    return json_response(
        {
            "by": axes,
            "since": rfc3339(window.since),
            "until": rfc3339(window.until),
            "items": [_row_json(axes, row) for row in rows],
            "total": _row_json((), total),
            "next": None,
        }
    )


def _window(axes: Sequence[str], since: str | None, until: str | None, now: float) -> Window:
    try:
        check_axes(axes)
    except ValueError as error:
        raise InvalidRequest(str(error), fix="For example: by=team,week.") from error
    end = now if until is None else moment(until, "until")
    begin = end - DEFAULT_WINDOW_SECONDS if since is None else moment(since, "since")
    if begin >= end:
        raise InvalidRequest(
            f"since ({rfc3339(begin)}) must lie before until ({rfc3339(end)})", fix="Exchange or correct them."
        )
    days = (end - begin) / 86_400.0
    if days > MAX_WINDOW_DAYS:
        raise InvalidRequest(
            f"from since ({rfc3339(begin)}) to until ({rfc3339(end)}) are {math.ceil(days)} days, but at most "
            f"{MAX_WINDOW_DAYS} can be asked for at once",
            fix="Ask for each year by itself, with since and until.",
        )
    return Window(since=begin, until=end)


def _row_json(axes: Sequence[str], row: UsageRow) -> dict[str, Any]:
    return {
        **dict(zip(axes, row.key, strict=True)),
        "held_gpu_hours": round(row.held_gpu_seconds / 3600, 3),
        "busy_gpu_hours": round(row.busy_gpu_seconds / 3600, 3),
        "lost_gpu_hours": round(row.lost_gpu_seconds / 3600, 3),
        "jobs": row.num_jobs,
    }


def _csv(axes: Sequence[str], rows: Sequence[UsageRow]) -> str:
    output = io.StringIO()
    writer = csv.DictWriter(output, (*axes, *NUMBERS), lineterminator="\n")
    writer.writeheader()
    writer.writerows(_row_json(axes, row) for row in rows)
    return output.getvalue()


@router.get("/idle")
def get_idle(state: State, principal: Anybody) -> Response:
    """Jobs none of whose GPUs has worked for a while: whose, which GPUs, since when, GPU-hours held without use."""
    least_seconds = state.settings.idle_holder_seconds
    with state.database.read() as connection:
        found = load_idle_holders(connection, least_seconds=least_seconds)
    return json_response(
        {
            "items": [_idle_json(principal, holder) for holder in found],
            "idle_after_seconds": least_seconds,
            "idle_below": IDLE_UTILISATION,
            "next": None,
        }
    )


def _idle_json(principal: Principal, holder: IdleHolder) -> dict[str, Any]:
    job, holding = holder.job, holder.holding
    facts = {
        "team": job.team,
        "gpus": holding.num_gpus,
        "nodes": [{"name": name, "gpus": indexes} for name, indexes in holder.gpus],
        "since": rfc3339(holding.since),
        "idle_seconds": round(holding.idle_seconds, 1),
        "wasted_gpu_hours": round(holding.wasted_gpu_seconds / 3600, 3),
    }
    if job.is_private and not may_read(principal, job_facts(job)):
        return {"job_id": None, "name": f"a private job of team {job.team}", "owner": None, **facts}
    return {"job_id": job.id, "name": job.name, "owner": job.owner, **facts}
