"""Routes of what teams and users may hold: quotas, caps, the top priority. For admins."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import JsonBody, State, caller, json_response
from service.api.members import only
from service.auth.permissions import Action
from service.auth.principals import Principal
from service.domain.text import shown
from service.errors import InvalidRequest
from service.operations.grant_priority import grant_priority
from service.operations.set_quota import MEANINGS, set_quota
from service.operations.set_user_cap import set_user_cap

router = APIRouter(prefix=API_PREFIX)
Admin = Annotated[Principal, Depends(caller(Action.ADMINISTER))]
MAX_NUMBER = 2**31 - 1


@router.post("/teams/{team}/quota")
def post_quota(state: State, principal: Admin, team: str, body: JsonBody) -> Response:
    """Set a team's quota and cap: quota_gpus, quota_nodes, cap_gpus; null takes one away, what is left out stays."""
    only(body, *MEANINGS)
    if not body:
        raise InvalidRequest("the body is empty", fix=f"Give one or more of {', '.join(MEANINGS)}.")
    changes = {name: _number(body, name) for name in body}
    after, warnings = set_quota(state.database, team=team, changes=changes, actor=principal.name)
    return json_response({"name": team, **after, "warnings": warnings})


@router.post("/users/{name}/cap")
def post_cap(state: State, principal: Admin, name: str, body: JsonBody) -> Response:
    """Set the most GPUs that a user's jobs hold at once: cap_gpus; null for no cap."""
    only(body, "cap_gpus")
    if not body:
        raise InvalidRequest("cap_gpus is missing", fix="Give cap_gpus a whole number from 0, or null for no cap.")
    cap = _number(body, "cap_gpus")
    set_user_cap(state.database, user=name, cap_gpus=cap, actor=principal.name)
    return json_response({"name": name, "cap_gpus": cap})


@router.put("/users/{name}/top-priority")
def put_top_priority(state: State, principal: Admin, name: str) -> Response:
    """Grant a user the top priority."""
    return _granted(state, principal, name, is_granted=True)


@router.delete("/users/{name}/top-priority")
def delete_top_priority(state: State, principal: Admin, name: str) -> Response:
    """Take the top priority back; jobs that have it keep it."""
    return _granted(state, principal, name, is_granted=False)


def _granted(state: State, principal: Principal, name: str, *, is_granted: bool) -> Response:
    num_jobs = grant_priority(state.database, user=name, is_granted=is_granted, actor=principal.name)
    return json_response({"name": name, "top_priority": is_granted, "jobs_at_top": num_jobs})


def _number(body: dict[str, Any], name: str) -> int | None:
    value = body[name]
    is_number = isinstance(value, int) and not isinstance(value, bool) and 0 <= value <= MAX_NUMBER
    if value is not None and not is_number:
        raise InvalidRequest(
            f"{name} is {shown(value)}, not a whole number from 0 to {MAX_NUMBER}",
            fix=f"Give {name} a whole number from 0, or null for none.",
        )
    return value
