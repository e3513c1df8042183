"""Set the most GPUs that a user's jobs may hold at once. Nothing running is touched by it."""

from __future__ import annotations

from sqlalchemy import select, update

from service.db.session import Database
from service.db.tables import users
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.errors import NotFound


def set_user_cap(database: Database, *, user: str, cap_gpus: int | None, actor: str) -> bool:
    """Set it (None: no cap); True if it was another. Raises NotFound."""
    with database.write() as tx:
        row = tx.connection.execute(select(users).where(users.c.name == user).with_for_update()).one_or_none()
        if row is None:
            raise NotFound(f"there is no user {user}", fix="Look it up: gang admin user ls.")
        if row.cap_gpus == cap_gpus:
            return False
        tx.connection.execute(update(users).where(users.c.id == row.id).values(cap_gpus=cap_gpus))
        before, after = ("none" if one is None else str(one) for one in (row.cap_gpus, cap_gpus))
        add_event(
            tx,
            "user_cap",
            actor=actor,
            text=f"{actor} changed user {user}: most GPUs at once {before} → {after}.",
            data={"user": user, "from": row.cap_gpus, "to": cap_gpus},
        )
        mark_changed(tx, "user", row.id)
        return True
