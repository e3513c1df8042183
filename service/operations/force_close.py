"""Close an attempt whose rows cannot be reconciled any more (damaged by hand, say), so that nothing waits for it."""

from __future__ import annotations

import json
from typing import Any

from sqlalchemy import Row, select, update

from gangline.protocol.outcomes import JobState, Outcome
from service.db.session import Write
from service.db.tables import allocations, attempt_nodes, jobs
from service.db.transitions import move_attempt, move_attempt_node, move_job
from service.domain.states import AttemptNodeState, AttemptState
from service.operations.job_lock import lock_job_of


def force_close(tx: Write, attempt: Row[Any], why: str) -> None:
    """End the attempt, free its GPUs, and fail (or cancel, where that was wished) its job with the reason."""
    lock_job_of(tx, attempt.id)
    rows = tx.connection.execute(
        select(attempt_nodes.c.id).where(
            attempt_nodes.c.attempt_id == attempt.id, attempt_nodes.c.state != AttemptNodeState.ENDED
        )
    ).all()
    for row in rows:
        move_attempt_node(tx, row.id, AttemptNodeState.ENDED, columns={"ended_at": tx.now, "is_lost": True})
        tx.connection.execute(
            update(allocations).where(allocations.c.attempt_node_id == row.id).values(released_at=tx.now)
        )
    is_cancelled = tx.connection.execute(
        select(jobs.c.is_cancel_wished).where(jobs.c.id == attempt.job_id)
    ).scalar_one()
    outcome = Outcome.CANCELLED if is_cancelled else Outcome.SUPERVISOR_LOST
    cause: dict[str, Any] = {
        "outcome": outcome,
        "sentence": f"Reconcile failed: {why[:300]}",
        "fix": "An admin should look at the server's log; the job can be submitted again.",
        "fault": "pool",
        "rank": None,
        "node": None,
        "exit_code": None,
        "signal": None,
        "error": None,
        "note": "closed by force",
        "ranks": [],
    }
    text = json.dumps(cause, ensure_ascii=False)
    move_attempt(
        tx,
        attempt.id,
        AttemptState.ENDED,
        columns={"ended_at": tx.now, "outcome": outcome, "cause": text},
        new_directive=True,
    )
    move_job(
        tx,
        attempt.job_id,
        JobState.CANCELLED if is_cancelled else JobState.FAILED,
        actor="service",
        text=str(cause["sentence"]),
        columns={"ended_at": tx.now, "outcome": outcome, "cause": text, "reason": None},
    )
