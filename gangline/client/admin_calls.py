"""Users, teams, what they may hold, and tokens. Part of `Client`.

A user sees and makes their own tokens; everything else needs an admin. Not for: jobs.
"""

from __future__ import annotations

from typing import Any

from gangline.client.base import BaseClient, items_of, segment
from gangline.client.http import Call


class AdminCalls(BaseClient):
    """The admin methods of the client. They answer with the server's JSON objects: few fields, for people's eyes."""

    def users(self) -> list[dict[str, Any]]:
        """All users."""
        return items_of(self.get("/users"))

    def create_user(self, name: str, *, admin: bool = False) -> dict[str, Any]:
        """Create a user. Raises Refused when the name is taken."""
        return _object(self.post("/users", {"name": name, "admin": admin}))

    def disable_user(self, name: str) -> dict[str, Any]:
        """Disable a user: their tokens stop working, their jobs stay."""
        return _object(self.post(f"/users/{segment(name)}/disable", {}))

    def teams(self) -> list[dict[str, Any]]:
        """All teams."""
        return items_of(self.get("/teams"))

    def create_team(self, name: str) -> dict[str, Any]:
        """Create a team. Raises Refused when the name is taken."""
        return _object(self.post("/teams", {"name": name}))

    def add_member(self, team: str, user: str) -> None:
        """Put a user into a team; nothing changes when they are in it."""
        self.put(f"/teams/{segment(team)}/members/{segment(user)}")

    def remove_member(self, team: str, user: str) -> None:
        """Take a user out of a team."""
        self.delete(f"/teams/{segment(team)}/members/{segment(user)}")

    def pool_events(self, *, node: str | None = None, limit: int = 50) -> list[dict[str, Any]]:
        """The newest `limit` entries of who changed what of the pool, newest first; of one node if that is named."""
        return items_of(self.get("/events", node=node, limit=limit))

    def set_quota(self, team: str, **changes: int | None) -> dict[str, Any]:
        """Set `quota_gpus`, `quota_nodes` and `cap_gpus` of a team: None for none, what is not given stays.

        The answer has all three, and `warnings` where the teams' quotas add up to more than the pool has.
        """
        return _object(self.post(f"/teams/{segment(team)}/quota", changes))

    def set_user_cap(self, user: str, cap_gpus: int | None) -> dict[str, Any]:
        """Set the most GPUs that a user's jobs hold at once; None for no cap."""
        return _object(self.post(f"/users/{segment(user)}/cap", {"cap_gpus": cap_gpus}))

    def grant_priority(self, user: str) -> None:
        """Let a user give jobs the priority top."""
        self.put(f"/users/{segment(user)}/top-priority")

    def revoke_priority(self, user: str) -> dict[str, Any]:
        """Take the priority top back from a user; the answer's `jobs_at_top` still have it."""
        call = Call(method="DELETE", path=f"/users/{segment(user)}/top-priority")
        return _object(self.transport.json(call))

    def tokens(self) -> list[dict[str, Any]]:
        """Tokens (never their secret part): one's own, an admin sees all."""
        return items_of(self.get("/tokens"))

    def create_token(
        self, label: str, *, user: str | None = None, kind: str = "user", expires_in_seconds: float | None = None
    ) -> dict[str, Any]:
        """Make a token of `kind` `user` or `enrolment`. The answer's `token` is shown this once."""
        body: dict[str, Any] = {"label": label, "kind": kind}
        if user is not None:
            body["user"] = user
        if expires_in_seconds is not None:
            body["expires_in_seconds"] = expires_in_seconds
        return _object(self.post("/tokens", body))

    def revoke_token(self, token_id: int | str) -> None:
        """Revoke a token; it stops working at once."""
        self.delete(f"/tokens/{segment(token_id)}")


def _object(answer: Any) -> dict[str, Any]:
    return answer if isinstance(answer, dict) else {}
