"""Change the priority of a job. Its spec keeps the one that it was submitted with: every attempt runs the same spec."""

from __future__ import annotations

from sqlalchemy import select, update

from gangline.protocol.outcomes import JobState
from service.auth.principals import Principal
from service.db.session import Database
from service.db.tables import jobs
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.domain.priority import is_top, priority_text
from service.errors import Conflict, Forbidden
from service.operations.check_turn import may_use_top


def set_priority(database: Database, job_id: int, *, principal: Principal, priority: int) -> bool:
    """Set it; True if it was another. Raises Forbidden for `top` without the grant, Conflict for an ended job."""
    if is_top(priority) and not may_use_top(database, principal):
        raise Forbidden(
            f"{principal.name} may not use the priority top: no admin has granted it",
            fix=f"Use high, or ask an admin: gang admin grant-priority {principal.name}.",
        )
    with database.write() as tx:
        job = tx.connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).one()
        if JobState(job.state).is_terminal:
            raise Conflict(f"job {job_id} has ended ({job.state})", fix="Nothing to do: it takes no further turn.")
        if job.priority == priority:
            return False
        tx.connection.execute(
            update(jobs).where(jobs.c.id == job_id).values(priority=priority, version=jobs.c.version + 1)
        )
        add_event(
            tx,
            "job_priority",
            actor=principal.name,
            job_id=job_id,
            text=f"{principal.name} changed the priority from {priority_text(job.priority)} to "
            f"{priority_text(priority)}.",
            data={"from": job.priority, "to": priority},
        )
        mark_changed(tx, "job", job_id)
        tx.wake(f"job:{job_id}")
        return True
