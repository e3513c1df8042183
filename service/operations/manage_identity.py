"""Users, teams, memberships and tokens: create, list, disable, revoke. Every change is an event with its actor."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from service.auth.tokens import hash_token, make_token
from service.db.session import Database, Write
from service.db.tables import memberships, teams, tokens, users
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.errors import Conflict, InvalidRequest, NotFound

LONGEST_LIFE_SECONDS = 100 * 365 * 86_400
NAME_RULE = "1 to 64 letters, digits, '.', '_' or '-', starting with a letter or digit"


def check_name(name: str, what: str) -> str:
    """A user or team name as it may appear in URLs. Raises InvalidRequest."""
    is_valid = 1 <= len(name) <= 64 and name[0].isalnum() and all(c.isalnum() or c in "._-" for c in name)
    if not is_valid or not name.isascii():
        raise InvalidRequest(f"{what} {name!r} is not valid", fix=f"Use {NAME_RULE}.")
    return name


def create_user(database: Database, *, name: str, is_admin: bool, actor: str) -> int:
    """A new user, who gets a team of the same name unless one exists. Raises Conflict."""
    check_name(name, "user name")
    with database.write() as tx:
        try:
            user_id = tx.connection.execute(
                insert(users).values(name=name, is_admin=is_admin, created_at=tx.now).returning(users.c.id)
            ).scalar_one()
        except IntegrityError as error:
            raise Conflict(f"there is a user {name} already", fix="Choose another name.") from error
        add_event(tx, "user_created", actor=actor, text=f"User {name} was created{' as admin' if is_admin else ''}.")
        return int(user_id)


def disable_user(database: Database, *, name: str, actor: str) -> None:
    """Refuse all tokens of a user from now on. Jobs go on."""
    with database.write() as tx:
        user = _user(tx, name)
        tx.connection.execute(
            update(users).where(users.c.id == user.id, users.c.disabled_at.is_(None)).values(disabled_at=tx.now)
        )
        add_event(tx, "user_disabled", actor=actor, text=f"User {name} was disabled.")


def create_team(database: Database, *, name: str, actor: str) -> int:
    """A new team. Raises Conflict."""
    check_name(name, "team name")
    with database.write() as tx:
        try:
            team_id = tx.connection.execute(
                insert(teams).values(name=name, created_at=tx.now).returning(teams.c.id)
            ).scalar_one()
        except IntegrityError as error:
            raise Conflict(f"there is a team {name} already", fix="Choose another name.") from error
        add_event(tx, "team_created", actor=actor, text=f"Team {name} was created.")
        mark_changed(tx, "team", team_id)
        return int(team_id)


def add_member(database: Database, *, team: str, user: str, actor: str) -> None:
    """Add a user to a team; again changes nothing."""
    with database.write() as tx:
        team_id, user_id = _team(tx, team).id, _user(tx, user).id
        known = tx.connection.execute(
            select(memberships).where(memberships.c.team_id == team_id, memberships.c.user_id == user_id)
        ).one_or_none()
        if known is None:
            tx.connection.execute(insert(memberships).values(team_id=team_id, user_id=user_id, created_at=tx.now))
            add_event(tx, "member_added", actor=actor, text=f"{user} joined team {team}.")


def remove_member(database: Database, *, team: str, user: str, actor: str) -> None:
    """Remove a user from a team; again changes nothing."""
    with database.write() as tx:
        team_id, user_id = _team(tx, team).id, _user(tx, user).id
        tx.connection.execute(
            delete(memberships).where(memberships.c.team_id == team_id, memberships.c.user_id == user_id)
        )
        add_event(tx, "member_removed", actor=actor, text=f"{user} left team {team}.")


def create_token(
    database: Database, *, user: str, label: str, kind: str, expires_in_seconds: float | None, actor: str
) -> tuple[str, Row[Any]]:
    """A new token, shown this once, and its row."""
    if kind not in ("user", "enrolment"):
        raise InvalidRequest(
            f"there is no token kind {kind!r}", fix="Use user, or enrolment for a token that enrols nodes."
        )
    if expires_in_seconds is not None and not 0 < expires_in_seconds <= LONGEST_LIFE_SECONDS:
        raise InvalidRequest(
            f"expires_in_seconds is {expires_in_seconds}, but must be over 0 and at most {LONGEST_LIFE_SECONDS}",
            fix="Leave it out for a token that does not expire.",
        )
    secret = make_token(kind)
    with database.write() as tx:
        row = tx.connection.execute(
            insert(tokens)
            .values(
                kind=kind,
                hash=hash_token(secret),
                user_id=_user(tx, user).id,
                label=label[:200],
                created_at=tx.now,
                expires_at=None if expires_in_seconds is None else tx.now + expires_in_seconds,
            )
            .returning(*tokens.c)
        ).one()
        add_event(tx, "token_created", actor=actor, text=f"Token {row.id} ({kind}) was made for {user}.")
        return secret, row


def revoke_token(database: Database, *, token_id: int, only_user_id: int | None, actor: str) -> None:
    """Refuse a token from now on. `only_user_id` limits it to that user's own. Raises NotFound."""
    with database.write() as tx:
        row = tx.connection.execute(select(tokens).where(tokens.c.id == token_id)).one_or_none()
        if row is None or (only_user_id is not None and row.user_id != only_user_id):
            raise NotFound(f"there is no token {token_id}", fix="Look it up: gang admin token list.")
        tx.connection.execute(
            update(tokens).where(tokens.c.id == token_id, tokens.c.revoked_at.is_(None)).values(revoked_at=tx.now)
        )
        add_event(tx, "token_revoked", actor=actor, text=f"Token {token_id} was revoked.")


def _user(tx: Write, name: str) -> Row[Any]:
    row = tx.connection.execute(select(users).where(users.c.name == name)).one_or_none()
    if row is None:
        raise NotFound(f"there is no user {name}", fix="Look it up: gang admin user list.")
    return row


def _team(tx: Write, name: str) -> Row[Any]:
    row = tx.connection.execute(select(teams).where(teams.c.name == name)).one_or_none()
    if row is None:
        raise NotFound(f"there is no team {name}", fix="Look it up: gang admin team list.")
    return row
