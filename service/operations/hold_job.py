"""Hold a job: it does not start until it is released. A running one goes on, and does not start again once it stops."""

from __future__ import annotations

from sqlalchemy import select, update

from gangline.protocol.outcomes import JobState
from service.db.session import Database
from service.db.tables import jobs
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.domain.hold import Hold
from service.errors import Conflict


def hold_job(database: Database, job_id: int, *, actor: str, is_for_owner: bool, reason: str) -> bool:
    """Hold; True if that changed anything. Raises Conflict for a job that has ended.

    `is_for_owner`: the actor owns the job. An admin's hold on another's job takes the place of the owner's, and is not
    replaced by it. Holding again changes nothing.
    """
    with database.write() as tx:
        job = tx.connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).one()
        if JobState(job.state).is_terminal:
            raise Conflict(f"job {job_id} has ended ({job.state})", fix="Nothing to do: it does not start again.")
        present = Hold.from_json(job.hold_reason)
        since = tx.now if present is None else present.since
        hold = Hold(by=actor, is_by_admin=not is_for_owner, why=reason, since=since)
        if present is not None and (present.is_by_admin or not hold.is_by_admin):
            return False
        tx.connection.execute(
            update(jobs).where(jobs.c.id == job_id).values(hold_reason=hold.to_json(), version=jobs.c.version + 1)
        )
        add_event(
            tx,
            "job_held",
            actor=actor,
            job_id=job_id,
            text=f"Held by {actor}" + (f": {reason}" if reason else "."),
            data={"from": job.hold_reason, "to": hold.to_json()},
        )
        mark_changed(tx, "job", job_id)
        tx.wake(f"job:{job_id}")
        return True
