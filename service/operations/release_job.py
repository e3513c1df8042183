"""Release a held job: from now on it takes its turn. The time in which it was held does not count as waiting, what it
had waited before does.
"""

from __future__ import annotations

from sqlalchemy import select, update

from gangline.protocol.outcomes import JobState
from service.db.session import Database
from service.db.tables import jobs
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.domain.hold import Hold, wait_after
from service.errors import Forbidden


def release_job(database: Database, job_id: int, *, actor: str, is_admin: bool) -> bool:
    """Release; True if it was held. Raises Forbidden when an admin holds it and the actor is none."""
    with database.write() as tx:
        job = tx.connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).one()
        hold = Hold.from_json(job.hold_reason)
        if hold is None:
            return False
        if hold.is_by_admin and not is_admin:
            why = f": {hold.why}" if hold.why else ""
            raise Forbidden(f"job {job_id} is held by admin {hold.by}{why}", fix=f"Ask {hold.by} or another admin.")
        began = {}
        if job.state == JobState.WAITING:
            began["wait_began_at"] = wait_after(
                hold, wait_began_at=job.wait_began_at, start_after=job.start_after, now=tx.now
            )
        tx.connection.execute(
            update(jobs).where(jobs.c.id == job_id).values(hold_reason=None, version=jobs.c.version + 1, **began)
        )
        add_event(
            tx,
            "job_released",
            actor=actor,
            job_id=job_id,
            text=f"Released by {actor}.",
            data={"from": job.hold_reason, "to": None},
        )
        mark_changed(tx, "job", job_id)
        tx.wake(f"job:{job_id}")
        return True
