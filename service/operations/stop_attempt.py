"""Ask an attempt to stop: the intent is recorded, its supervisors are told, unclaimed parts end at once."""

from __future__ import annotations

import math
from typing import Final

from sqlalchemy import select, update

from gangline.protocol.outcomes import JobState, StopIntent
from service.db.session import Write
from service.db.tables import attempt_nodes, attempts, jobs
from service.db.transitions import add_event, move_attempt, move_job
from service.domain.spec import JobSpec
from service.domain.states import AttemptNodeState, AttemptState
from service.operations.settle_attempt import end_attempt_node, settle_attempt

INTENT_RANK: Final = {
    StopIntent.PEER_FAILURE: 0,
    StopIntent.START_DEADLINE: 0,
    StopIntent.DRAIN: 1,
    StopIntent.PREEMPT: 1,
    StopIntent.TIME_LIMIT: 1,
    StopIntent.CANCEL: 2,
    StopIntent.ADMIN_STOP: 2,
}
"""A later intent replaces an earlier one only when it ranks higher: a cancel is never overwritten."""


def stop_attempt(
    tx: Write,
    attempt_id: int,
    intent: StopIntent,
    *,
    detail: str,
    settle_seconds: float,
    actor: str = "service",
    longest_grace_seconds: float = math.inf,
    nominated_for: int | None = None,
) -> bool:
    """Ask an open attempt to stop, with the grace that its job asked for (but at most `longest_grace_seconds`).

    `nominated_for`: the job that gets its GPUs, of one that is preempted.
    False when it has ended or is stopping already for at least as good a reason.
    """
    attempt = tx.connection.execute(select(attempts).where(attempts.c.id == attempt_id).with_for_update()).one()
    job = tx.connection.execute(select(jobs.c.state, jobs.c.spec).where(jobs.c.id == attempt.job_id)).one()
    grace_seconds = min(JobSpec.from_json(job.spec).stop_grace_seconds, longest_grace_seconds)
    columns = {
        "stop_intent": str(intent),
        "stop_detail": detail,
        "stop_grace_seconds": grace_seconds,
        "settle_at": tx.now + grace_seconds + settle_seconds,
        "nominated_for": nominated_for,
    }
    if attempt.state == AttemptState.ENDED:
        return False
    if attempt.state == AttemptState.STOPPING:
        if attempt.stop_intent and INTENT_RANK[StopIntent(attempt.stop_intent)] >= INTENT_RANK[intent]:
            return False
        tx.connection.execute(
            update(attempts)
            .where(attempts.c.id == attempt_id, attempts.c.state == AttemptState.STOPPING)
            .values(directive_version=attempts.c.directive_version + 1, **columns)
        )
        tx.wake(f"directive:{attempt_id}")
        return True
    move_attempt(
        tx, attempt_id, AttemptState.STOPPING, columns={**columns, "stop_requested_at": tx.now}, new_directive=True
    )
    if job.state != JobState.STOPPING:
        move_job(
            tx,
            attempt.job_id,
            JobState.STOPPING,
            actor=actor,
            text=f"Attempt {attempt.number} is asked to stop ({intent}{': ' + detail if detail else ''}).",
            attempt_number=attempt.number,
        )
    else:
        add_event(tx, "attempt_stopping", actor=actor, text=detail, job_id=attempt.job_id)
    unclaimed = tx.connection.execute(
        select(attempt_nodes).where(
            attempt_nodes.c.attempt_id == attempt_id, attempt_nodes.c.state == AttemptNodeState.ALLOCATED
        )
    ).all()
    for attempt_node in unclaimed:
        end_attempt_node(tx, attempt_node, report=None)
    settle_attempt(tx, attempt_id)
    return True
