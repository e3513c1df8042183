"""Who is calling: a user, or a node. Attempts prove themselves by their claim token inside each operation."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, bindparam, select

from gangline.protocol.names import TOKEN_PREFIXES
from service import clock
from service.auth.tokens import hash_token
from service.db.session import Database
from service.db.tables import memberships, nodes, teams, tokens, users


@dataclass(frozen=True, kw_only=True)
class Principal:
    """A logged-in user, by a token of kind `user` or `enrolment`."""

    user_id: int
    name: str
    is_admin: bool
    teams: tuple[tuple[int, str], ...]
    """Id and name of each team, oldest membership first."""
    token_id: int
    token_kind: str

    def is_member(self, team_id: int) -> bool:
        """Whether the user belongs to the team."""
        return any(known == team_id for known, _ in self.teams)


_USER = (
    select(users.c.id, users.c.name, users.c.is_admin, tokens.c.id.label("token_id"), tokens.c.kind)
    .join(users, users.c.id == tokens.c.user_id)
    .where(
        tokens.c.hash == bindparam("hash"),
        tokens.c.revoked_at.is_(None),
        tokens.c.expires_at.is_(None) | (tokens.c.expires_at > bindparam("now")),
        users.c.disabled_at.is_(None),
    )
)
_TEAMS = (
    select(teams.c.id, teams.c.name)
    .join(memberships, memberships.c.team_id == teams.c.id)
    .where(memberships.c.user_id == bindparam("user_id"))
    .order_by(memberships.c.created_at, teams.c.id)
)
_NODE = select(nodes).where(nodes.c.credential_hash == bindparam("hash"))


def load_principal(connection: Connection, token_hash: str, now: float) -> Principal | None:
    """The user of a valid token, or None (unknown, revoked, expired, user disabled)."""
    row = connection.execute(_USER, {"hash": token_hash, "now": now}).one_or_none()
    if row is None:
        return None
    found = connection.execute(_TEAMS, {"user_id": row.id})
    return Principal(
        user_id=row.id,
        name=row.name,
        is_admin=row.is_admin,
        teams=tuple((team.id, team.name) for team in found),
        token_id=row.token_id,
        token_kind=row.kind,
    )


class PrincipalCache:
    """Valid tokens for a moment, so that a burst of requests reads SQL once. Emptied when identities change here."""

    KEEP_SECONDS = 1.0
    """How long another API process may go on accepting a token that was revoked elsewhere."""

    def __init__(self, database: Database):
        self._database = database
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[float, Principal]] = {}
        self._num_changes = 0

    def known(self, token: str) -> Principal | None:
        """The principal if it is cached; does no I/O."""
        kept = self._kept.get(hash_token(token))
        return kept[1] if kept and clock.monotonic() < kept[0] else None

    def load(self, token: str) -> Principal | None:
        """The principal from SQL; None for anything that is not a valid token of a user."""
        if not token.startswith((TOKEN_PREFIXES["user"], TOKEN_PREFIXES["enrolment"])):
            return None
        token_hash = hash_token(token)
        num_changes = self._num_changes
        with self._database.read() as connection:
            principal = load_principal(connection, token_hash, self._database.now(connection))
        if principal is not None:
            with self._lock:
                if len(self._kept) > 1_000:
                    self._kept.clear()
                # Read before a change that was made meanwhile, it must not outlive that change.
                if num_changes == self._num_changes:
                    self._kept[token_hash] = (clock.monotonic() + self.KEEP_SECONDS, principal)
        return principal

    def current(self, token: str) -> Principal | None:
        """The principal as of now, at most `KEEP_SECONDS` old; None once the token is not valid any more."""
        return self.known(token) or self.load(token)

    def forget(self) -> None:
        """A token, user or membership changed."""
        with self._lock:
            self._kept.clear()
            self._num_changes += 1


def load_node(connection: Connection, token: str) -> Row[Any] | None:
    """The node that this credential belongs to, or None."""
    return connection.execute(_NODE, {"hash": hash_token(token)}).one_or_none()
