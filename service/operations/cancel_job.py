"""Cancel a job: idempotent, in any state. Once acknowledged, nothing that is reported later wins over it."""

from __future__ import annotations

import json
from typing import Final

from sqlalchemy import select, update

from gangline.protocol.outcomes import JobState, Outcome, StopIntent
from service.db.session import Database
from service.db.tables import attempts, jobs
from service.db.transitions import move_job
from service.domain.decide_outcome import Cause
from service.domain.states import AttemptState
from service.operations.settle_attempt import describe_cause
from service.operations.stop_attempt import stop_attempt

_ROLES: Final = {StopIntent.CANCEL: "", StopIntent.ADMIN_STOP: "the admin "}


def cancel_job(
    database: Database,
    job_id: int,
    *,
    actor: str,
    reason: str,
    settle_seconds: float,
    intent: StopIntent = StopIntent.CANCEL,
) -> bool:
    """Cancel; True unless the job had ended already. A waiting job is cancelled at once, without an attempt.

    `intent`: CANCEL, or ADMIN_STOP when an admin stops somebody else's job; the ranks can read which.
    """
    detail = f" by {_ROLES[intent]}{actor}" + (f": {reason}" if reason else "")
    with database.write() as tx:
        job = tx.connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).one()
        state = JobState(job.state)
        if state.is_terminal:
            return False
        if state is JobState.WAITING:
            cause = describe_cause(Cause(outcome=Outcome.CANCELLED, detail=detail), job_id, ())
            cause["stop_reason"] = str(intent)
            move_job(
                tx,
                job_id,
                JobState.CANCELLED,
                actor=actor,
                text=cause["sentence"],
                columns={
                    "is_cancel_wished": True,
                    "cancel_detail": detail,
                    "outcome": str(Outcome.CANCELLED),
                    "cause": json.dumps(cause, ensure_ascii=False),
                    "reason": None,
                    "ended_at": tx.now,
                },
            )
            return True
        if not job.is_cancel_wished:
            tx.connection.execute(
                update(jobs)
                .where(jobs.c.id == job_id)
                .values(is_cancel_wished=True, cancel_detail=detail, version=jobs.c.version + 1)
            )
            tx.wake(f"job:{job_id}")
        attempt_id = tx.connection.execute(
            select(attempts.c.id).where(attempts.c.job_id == job_id, attempts.c.state != AttemptState.ENDED)
        ).scalar_one()
        stop_attempt(
            tx,
            attempt_id,
            intent,
            detail=detail,
            settle_seconds=settle_seconds,
            actor=actor,
        )
        return True
