"""Routes of identity: who am I; users, teams and tokens for admins; own tokens for everybody."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from sqlalchemy import Row, select
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import JsonBody, RowId, State, caller, json_response
from service.api.members import flag, only, text
from service.auth.permissions import Action, authorise
from service.auth.principals import Principal
from service.clock import rfc3339
from service.db.tables import memberships, teams, tokens, users
from service.domain.text import shown
from service.errors import InvalidRequest
from service.operations import manage_identity

router = APIRouter(prefix=API_PREFIX)
Admin = Annotated[Principal, Depends(caller(Action.ADMINISTER))]
Anybody = Annotated[Principal, Depends(caller(Action.OWN_TOKENS))]


@router.get("/me")
def get_me(state: State, principal: Anybody) -> Response:
    """Who the token belongs to."""
    return json_response(
        {
            "name": principal.name,
            "admin": principal.is_admin,
            "teams": [name for _, name in principal.teams],
            "server_version": state.version,
        }
    )


@router.get("/users")
def list_users(state: State, principal: Admin) -> Response:
    """All users."""
    with state.database.read() as connection:
        in_teams: defaultdict[int, list[str]] = defaultdict(list)
        for user_id, name in connection.execute(
            select(memberships.c.user_id, teams.c.name)
            .join(teams, teams.c.id == memberships.c.team_id)
            .order_by(teams.c.name)
        ):
            in_teams[user_id].append(name)
        rows = connection.execute(select(users).order_by(users.c.name)).all()
    items = [
        {
            "name": row.name,
            "admin": row.is_admin,
            "teams": in_teams[row.id],
            "cap_gpus": row.cap_gpus,
            "top_priority": row.may_use_top_priority,
            "created_at": rfc3339(row.created_at),
            "disabled_at": rfc3339(row.disabled_at),
        }
        for row in rows
    ]
    return json_response({"items": items})


@router.post("/users", status_code=201)
def post_user(state: State, principal: Admin, body: JsonBody) -> Response:
    """Create a user."""
    only(body, "name", "admin")
    name, is_admin = text(body, "name"), flag(body, "admin")
    manage_identity.create_user(state.database, name=name, is_admin=is_admin, actor=principal.name)
    return json_response({"name": name, "admin": is_admin, "teams": []}, 201)


@router.post("/users/{name}/disable")
def post_disable(state: State, principal: Admin, name: str) -> Response:
    """Refuse all tokens of a user from now on."""
    manage_identity.disable_user(state.database, name=name, actor=principal.name)
    state.principals.forget()
    return json_response({"name": name, "disabled": True})


@router.get("/teams")
def list_teams(state: State, principal: Anybody) -> Response:
    """All teams with their members."""
    with state.database.read() as connection:
        members: defaultdict[int, list[str]] = defaultdict(list)
        for team_id, name in connection.execute(
            select(memberships.c.team_id, users.c.name)
            .join(users, users.c.id == memberships.c.user_id)
            .order_by(users.c.name)
        ):
            members[team_id].append(name)
        rows = connection.execute(select(teams).order_by(teams.c.name)).all()
    return json_response({"items": [_team_json(row, members[row.id]) for row in rows]})


@router.post("/teams", status_code=201)
def post_team(state: State, principal: Admin, body: JsonBody) -> Response:
    """Create a team."""
    only(body, "name")
    name = text(body, "name")
    manage_identity.create_team(state.database, name=name, actor=principal.name)
    return json_response({"name": name, "members": []}, 201)


@router.put("/teams/{team}/members/{user}")
def put_member(state: State, principal: Admin, team: str, user: str) -> Response:
    """Add a user to a team."""
    manage_identity.add_member(state.database, team=team, user=user, actor=principal.name)
    state.principals.forget()
    return json_response({"team": team, "user": user})


@router.delete("/teams/{team}/members/{user}")
def delete_member(state: State, principal: Admin, team: str, user: str) -> Response:
    """Remove a user from a team."""
    manage_identity.remove_member(state.database, team=team, user=user, actor=principal.name)
    state.principals.forget()
    return json_response({"team": team, "user": user})


@router.get("/tokens")
def list_tokens(state: State, principal: Anybody) -> Response:
    """One's own tokens; an admin sees everybody's. Never the token itself."""
    query = select(tokens, users.c.name.label("user")).join(users, users.c.id == tokens.c.user_id).order_by(tokens.c.id)
    if not principal.is_admin:
        query = query.where(tokens.c.user_id == principal.user_id)
    with state.database.read() as connection:
        rows = connection.execute(query).all()
    return json_response({"items": [_token_json(row, row.user) for row in rows]})


@router.post("/tokens", status_code=201)
def post_token(state: State, principal: Anybody, body: JsonBody) -> Response:
    """Make a token; it is shown this once. For others, and for enrolling nodes: admins only."""
    only(body, "user", "label", "kind", "expires_in_seconds")
    user, kind = body.get("user") or principal.name, body.get("kind", "user")
    if user != principal.name or kind != "user":
        authorise(principal, Action.ADMINISTER)
    expires = body.get("expires_in_seconds")
    if expires is not None and (isinstance(expires, bool) or not isinstance(expires, int | float)):
        raise InvalidRequest(
            f"expires_in_seconds is {shown(expires)}, not a number",
            fix="Give the seconds until it expires, or leave it out for a token that does not.",
        )
    secret, row = manage_identity.create_token(
        state.database,
        user=str(user),
        label=str(body.get("label", "")),
        kind=str(kind),
        expires_in_seconds=expires,
        actor=principal.name,
    )
    return json_response({**_token_json(row, str(user)), "token": secret}, 201)


@router.delete("/tokens/{token_id}")
def delete_token(state: State, principal: Anybody, token_id: RowId) -> Response:
    """Revoke a token at once."""
    only = None if principal.is_admin else principal.user_id
    manage_identity.revoke_token(state.database, token_id=token_id, only_user_id=only, actor=principal.name)
    state.principals.forget()
    return json_response({"id": token_id, "revoked": True})


def _team_json(row: Row[Any], members: list[str]) -> dict[str, Any]:
    limits = {name: getattr(row, name) for name in ("quota_gpus", "quota_nodes", "cap_gpus")}
    return {"name": row.name, "members": members, **limits}


def _token_json(row: Row[Any], user: str) -> dict[str, Any]:
    return {
        "id": row.id,
        "user": user,
        "label": row.label,
        "kind": row.kind,
        "created_at": rfc3339(row.created_at),
        "expires_at": rfc3339(row.expires_at),
        "revoked_at": rfc3339(row.revoked_at),
    }
