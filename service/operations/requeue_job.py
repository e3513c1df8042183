"""Requeue a job: its ranks write a checkpoint and leave, and it starts again from there when its turn comes.

Nothing is charged for it. With `from_start` its checkpoints are given up first: it begins anew, on whatever nodes.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, select, update

from gangline.protocol.outcomes import JobState, StopIntent
from service.db.session import Database, Write
from service.db.tables import attempts, jobs
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.domain.states import AttemptState
from service.errors import Conflict
from service.operations.accept_checkpoints import forget_checkpoints
from service.operations.stop_attempt import stop_attempt


def requeue_job(
    database: Database, job_id: int, *, actor: str, reason: str, from_start: bool, settle_seconds: float
) -> None:
    """Stop the job's attempt to have it start again. Raises Conflict when there is nothing to stop.

    A starting job is stopped like a running one. Asking again while it stops for this changes nothing.
    """
    with database.write() as tx:
        job = tx.connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).one()
        attempt = tx.connection.execute(
            select(attempts).where(attempts.c.job_id == job_id, attempts.c.state != AttemptState.ENDED)
        ).one_or_none()
        _check(job, attempt, from_start=from_start)
        detail = f"requeued by {actor}" + (f": {reason}" if reason else "")
        if from_start:
            _give_up_progress(tx, job, actor, detail)
        if attempt is not None:
            stop_attempt(tx, attempt.id, StopIntent.PREEMPT, detail=detail, settle_seconds=settle_seconds, actor=actor)


def _check(job: Row[Any], attempt: Row[Any] | None, *, from_start: bool) -> None:
    state = JobState(job.state)
    if state.is_terminal:
        raise Conflict(f"job {job.id} has ended ({state})", fix="Submit it again: gang submit FILE.")
    if state is JobState.WAITING and not from_start:
        raise Conflict(
            f"job {job.id} waits already",
            fix="Nothing to do: it starts when its turn comes (gang why). To give up its progress, requeue it from the "
            "start: gang requeue JOB --from-start.",
        )
    if job.is_cancel_wished:
        raise Conflict(f"job {job.id} is being cancelled", fix="Submit it again: gang submit FILE.")
    if state is JobState.STOPPING and (attempt is None or attempt.stop_intent != StopIntent.PREEMPT):
        why = None if attempt is None else attempt.stop_intent
        raise Conflict(
            f"job {job.id} is stopping already ({why})",
            fix="Wait until it has stopped: gang show tells what became of it.",
        )


def _give_up_progress(tx: Write, job: Row[Any], actor: str, detail: str) -> None:
    num_forgotten = forget_checkpoints(tx, job.id)
    text = f"It starts from the beginning, {detail}: {num_forgotten} checkpoints no longer count."
    add_event(tx, "checkpoints_forgotten", actor=actor, job_id=job.id, text=text)
    anew: dict[str, Any] = {}
    if job.state == JobState.WAITING:  # of one that still holds GPUs, the end of its attempt settles this
        anew = {"served_seconds": 0.0, "measured_left_seconds": None, "wait_began_at": tx.now}
    tx.connection.execute(update(jobs).where(jobs.c.id == job.id).values(version=jobs.c.version + 1, **anew))
    mark_changed(tx, "job", job.id)
    tx.wake(f"job:{job.id}")
