"""Routes that act on a job, cancel and requeue, and the checkpoints that it may resume from."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Query
from sqlalchemy import select
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from gangline.protocol.outcomes import StopIntent
from service.api.deps import JsonBody, State, allowed_job, caller, json_response
from service.api.job_json import checkpoint_json
from service.api.jobs import show_job
from service.api.members import flag, only, reason_given
from service.auth.permissions import Action
from service.auth.principals import Principal
from service.db.tables import attempts, checkpoints
from service.domain.text import shown
from service.errors import InvalidRequest
from service.operations.cancel_job import cancel_job
from service.operations.extend_limit import extend_limit
from service.operations.requeue_job import requeue_job
from service.schemas.units import MAX_SECONDS

router = APIRouter(prefix=f"{API_PREFIX}/jobs")


@router.get("/{job_id}/checkpoints")
def get_checkpoints(
    state: State,
    principal: Annotated[Principal, Depends(caller(Action.JOB_READ))],
    job_id: int,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The checkpoints that a job may resume from, the one it resumes from first."""
    with state.database.read() as connection:
        allowed_job(connection, principal, job_id, Action.JOB_READ)
        found = connection.execute(
            select(checkpoints, attempts.c.number.label("attempt"))
            .join(attempts, attempts.c.id == checkpoints.c.attempt_id)
            .where(checkpoints.c.job_id == job_id, checkpoints.c.removed_at.is_(None))
            .order_by(checkpoints.c.step.desc(), checkpoints.c.id.desc())
            .limit(limit)
        ).all()
    return json_response({"items": [checkpoint_json(row) for row in found], "next": None})


@router.post("/{job_id}/requeue", status_code=202)
def post_requeue(
    state: State, principal: Annotated[Principal, Depends(caller(Action.JOB_REQUEUE))], job_id: int, body: JsonBody
) -> Response:
    """Stop a running job at a checkpoint and start it again from there when its turn comes, or from the start."""
    only(body, "from_start", "reason")
    from_start = flag(body, "from_start")
    reason = reason_given(body)
    with state.database.read() as connection:
        allowed_job(connection, principal, job_id, Action.JOB_REQUEUE)
    requeue_job(
        state.database,
        job_id,
        actor=principal.name,
        reason=reason,
        from_start=from_start,
        settle_seconds=state.settings.settle_seconds,
    )
    return json_response(show_job(state, principal, job_id), 202)


@router.post("/{job_id}/limit")
def post_limit(
    state: State, principal: Annotated[Principal, Depends(caller(Action.JOB_EXTEND))], job_id: int, body: JsonBody
) -> Response:
    """Change the time limit of a job: `seconds` is the total from then on. Refused where it breaks a promise."""
    only(body, "seconds")
    seconds = body.get("seconds")
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds <= MAX_SECONDS:
        raise InvalidRequest(
            f"seconds is {shown(seconds)}, not a number above 0 and at most {MAX_SECONDS:g}",
            fix="Give all the seconds that the job may run from then on, such as 28800 for 8 hours.",
        )
    with state.database.read() as connection:
        allowed_job(connection, principal, job_id, Action.JOB_EXTEND)
    extend_limit(state.database, state.settings, job_id, seconds=float(seconds), actor=principal.name)
    return json_response(show_job(state, principal, job_id))


@router.post("/{job_id}/cancel", status_code=202)
def post_cancel(
    state: State, principal: Annotated[Principal, Depends(caller(Action.JOB_CANCEL))], job_id: int, body: JsonBody
) -> Response:
    """Cancel a job. Again, or after its end, changes nothing."""
    only(body, "reason")
    reason = reason_given(body)
    with state.database.read() as connection:
        job = allowed_job(connection, principal, job_id, Action.JOB_CANCEL)
    is_accepted = cancel_job(
        state.database,
        job_id,
        actor=principal.name,
        reason=reason,
        settle_seconds=state.settings.settle_seconds,
        intent=StopIntent.CANCEL if principal.user_id == job.owner_id else StopIntent.ADMIN_STOP,
    )
    return json_response(show_job(state, principal, job_id), 202 if is_accepted else 200)
