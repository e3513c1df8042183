"""Grant a user the top priority, or take it back. Jobs that have it already keep it: `gang priority` changes them."""

from __future__ import annotations

from sqlalchemy import func, select, update

from gangline.protocol.outcomes import JobState
from service.db.session import Database
from service.db.tables import jobs, users
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.domain.priority import MOST_PRIORITY
from service.errors import NotFound

_GOING = [state for state in JobState if not state.is_terminal]


def grant_priority(database: Database, *, user: str, is_granted: bool, actor: str) -> int:
    """Grant or revoke; again changes nothing. Returns how many jobs of the user have it and have not ended.

    Raises NotFound.
    """
    with database.write() as tx:
        row = tx.connection.execute(select(users).where(users.c.name == user).with_for_update()).one_or_none()
        if row is None:
            raise NotFound(f"there is no user {user}", fix="Look it up: gang admin user ls.")
        if row.may_use_top_priority != is_granted:
            tx.connection.execute(update(users).where(users.c.id == row.id).values(may_use_top_priority=is_granted))
            add_event(
                tx,
                "user_priority",
                actor=actor,
                text=f"{actor} {'granted' if is_granted else 'revoked'} the priority top for user {user}.",
                data={"user": user, "from": not is_granted, "to": is_granted},
            )
            mark_changed(tx, "user", row.id)
        query = select(func.count()).select_from(jobs).where(
            jobs.c.owner_id == row.id, jobs.c.priority > MOST_PRIORITY, jobs.c.state.in_(_GOING)
        )  # fmt: skip
        return int(tx.connection.execute(query).scalar_one())
