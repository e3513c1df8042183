"""Routes that change a job's turn: hold, release, priority."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import AppState, JsonBody, State, allowed_job, caller, json_response
from service.api.jobs import show_job
from service.api.members import only, reason_given
from service.auth.permissions import Action
from service.auth.principals import Principal
from service.domain.priority import LEAST_PRIORITY, MOST_PRIORITY, read_priority
from service.domain.text import shown
from service.errors import InvalidRequest
from service.operations.hold_job import hold_job
from service.operations.release_job import release_job
from service.operations.set_priority import set_priority

router = APIRouter(prefix=f"{API_PREFIX}/jobs")
Turner = Annotated[Principal, Depends(caller(Action.JOB_TURN))]


@router.post("/{job_id}/hold")
def post_hold(state: State, principal: Turner, job_id: int, body: JsonBody) -> Response:
    """Hold a job: it does not start until it is released. Again changes nothing."""
    only(body, "reason")
    owner_id = _owner_id(state, principal, job_id)
    reason = reason_given(body)
    hold_job(
        state.database,
        job_id,
        actor=principal.name,
        is_for_owner=principal.user_id == owner_id,
        reason=reason,
    )
    return json_response(show_job(state, principal, job_id))


@router.post("/{job_id}/release")
def post_release(state: State, principal: Turner, job_id: int) -> Response:
    """Release a held job. One that is not held stays as it is."""
    _owner_id(state, principal, job_id)
    release_job(state.database, job_id, actor=principal.name, is_admin=principal.is_admin)
    return json_response(show_job(state, principal, job_id))


@router.post("/{job_id}/priority")
def post_priority(state: State, principal: Turner, job_id: int, body: JsonBody) -> Response:
    """Change a job's priority: low, normal, high, a number from -100 to 100, or top."""
    only(body, "priority")
    _owner_id(state, principal, job_id)
    value = body.get("priority")
    try:
        priority = read_priority(value)
    except ValueError as error:
        raise InvalidRequest(
            f"priority {shown(value)}: it {error}",
            fix=f"Use low, normal, high, or a whole number from {LEAST_PRIORITY} to {MOST_PRIORITY}.",
        ) from error
    set_priority(state.database, job_id, principal=principal, priority=priority)
    return json_response(show_job(state, principal, job_id))


def _owner_id(state: AppState, principal: Principal, job_id: int) -> Any:
    """The owner of the job, if `principal` may change its turn. Raises NotFound, Forbidden."""
    with state.database.read() as connection:
        return allowed_job(connection, principal, job_id, Action.JOB_TURN).owner_id
