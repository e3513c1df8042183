"""What the trainer tells beside progress: checkpoints become resume points, notices become events of the job.

Applied in the transaction that accepts the bytes which tell of them, so the API's answer is the commit: an attempt that
has been fenced commits nothing. Also here: which checkpoints an attempt resumes from.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Final

from sqlalchemy import bindparam, delete, func, select, update
from sqlalchemy.dialects import postgresql, sqlite

from service.db.session import Write
from service.db.tables import attempt_nodes, attempts, checkpoints, events, jobs, nodes
from service.db.transitions import add_event
from service.domain.checkpoints import (
    MAX_RESUME_POINTS,
    CheckpointHome,
    CheckpointRemoved,
    CheckpointWritten,
    Notice,
    TrainerEvent,
)
from service.domain.spec import JobSpec
from service.domain.training_evidence import TRAINED_KINDS
from trainer.plan.training_plan import ResumePoint

MAX_NOTICES_TOLD: Final = 50
"""Notices that one job may leave among its events."""
MAX_CHECKPOINTS_KNOWN: Final = 1_000
"""Rows of one job, removed ones too: older ones are forgotten, long after anything could resume from them."""


_NOTE_CHECKPOINT = (
    update(attempts)
    .where(attempts.c.id == bindparam("attempt_id"), attempts.c.forgotten_at.is_(None))
    .values(checkpointed_at=bindparam("now"))
)


def apply_trainer_events(tx: Write, attempt_id: int, reported: Sequence[TrainerEvent]) -> dict[str, int]:
    """Store what rank 0 told, in its order. Returns why some of it is refused, with how many.

    The job's row is locked by the caller.
    """
    attempt = tx.connection.execute(select(attempts).where(attempts.c.id == attempt_id)).one()
    spec = tx.connection.execute(select(jobs.c.spec).where(jobs.c.id == attempt.job_id)).scalar_one()
    if JobSpec.from_json(spec).run.kind not in TRAINED_KINDS:
        return {"checkpoints and notices are told by Gangline's own loop (recipe, entry) only": len(reported)}
    refused: dict[str, int] = {}
    for event in reported:
        if isinstance(event, CheckpointWritten) and not event.path.startswith(f"{subfolder_of(attempt_id)}/"):
            why = f"a checkpoint outside of {subfolder_of(attempt_id)}, the folder of this attempt"
            refused[why] = refused.get(why, 0) + 1
        elif isinstance(event, CheckpointWritten):
            _accept(tx, attempt, event)
        elif isinstance(event, CheckpointRemoved):
            _forget_path(tx, attempt.job_id, event.path)
        else:
            _tell(tx, attempt, event)
    if any(isinstance(event, CheckpointWritten) for event in reported):
        _forget_oldest(tx, attempt.job_id)
    if any(not isinstance(event, Notice) for event in reported):
        tx.connection.execute(update(jobs).where(jobs.c.id == attempt.job_id).values(version=jobs.c.version + 1))
        tx.wake(f"job:{attempt.job_id}")
    return refused


def subfolder_of(attempt_id: int) -> str:
    """Folder of an attempt's checkpoints below that of its job: two attempts never write the same files."""
    return f"attempt-{attempt_id}"


def _accept(tx: Write, attempt: Any, event: CheckpointWritten) -> None:
    names = tx.connection.execute(
        select(nodes.c.name)
        .join(attempt_nodes, attempt_nodes.c.node_id == nodes.c.id)
        .where(attempt_nodes.c.attempt_id == attempt.id)
    ).scalars()
    dialect = sqlite if tx.is_sqlite else postgresql
    values = {
        "attempt_id": attempt.id,
        "step": event.step,
        "samples_seen": event.samples_seen,
        "num_bytes": event.num_bytes,
        "shared_folder_id": attempt.shared_folder_id,
        "node_names": json.dumps(sorted(names), ensure_ascii=False),
        "accepted_at": tx.now,
        # Written by an attempt whose progress its owner has given up: it is there, and nobody resumes from it.
        "removed_at": attempt.forgotten_at,
    }
    statement = dialect.insert(checkpoints).values(job_id=attempt.job_id, path=event.path, **values)
    # The same path told again is the same checkpoint, written anew.
    tx.connection.execute(statement.on_conflict_do_update(index_elements=["job_id", "path"], set_=values))
    note_checkpoint(tx, attempt.id)


def note_checkpoint(tx: Write, attempt_id: int) -> None:
    """The attempt's progress up to now is durable: what it would lose by a stop counts from here."""
    tx.connection.execute(_NOTE_CHECKPOINT, {"attempt_id": attempt_id, "now": tx.now})


def _forget_oldest(tx: Write, job_id: int) -> None:
    """A job that tells of one at every step must not fill the table, nor slow down whoever looks for the newest."""
    of_job = select(checkpoints.c.id).where(checkpoints.c.job_id == job_id)
    newest_to_go = of_job.order_by(checkpoints.c.id.desc()).offset(MAX_CHECKPOINTS_KNOWN).limit(1).scalar_subquery()
    tx.connection.execute(delete(checkpoints).where(checkpoints.c.job_id == job_id, checkpoints.c.id <= newest_to_go))


def _forget_path(tx: Write, job_id: int, path: str) -> None:
    tx.connection.execute(
        update(checkpoints)
        .where(checkpoints.c.job_id == job_id, checkpoints.c.path == path, checkpoints.c.removed_at.is_(None))
        .values(removed_at=tx.now)
    )


def _tell(tx: Write, attempt: Any, notice: Notice) -> None:
    num_told = tx.connection.execute(
        select(func.count())
        .select_from(events)
        .where(
            events.c.job_id == attempt.job_id,
            events.c.attempt_number == attempt.number,
            events.c.kind == "notice",
        )
    ).scalar_one()
    if num_told < MAX_NOTICES_TOLD:
        add_event(tx, "notice", actor="trainer", job_id=attempt.job_id, attempt_number=attempt.number, text=notice.text)


def forget_checkpoints(tx: Write, job_id: int) -> int:
    """The job starts from the beginning: none of its checkpoints counts, nor one that its open attempt still writes.

    Returns how many were given up. The files stay where they are.
    """
    tx.connection.execute(
        update(attempts)
        .where(attempts.c.job_id == job_id, attempts.c.forgotten_at.is_(None))
        .values(forgotten_at=tx.now)
    )
    return tx.connection.execute(
        update(checkpoints)
        .where(checkpoints.c.job_id == job_id, checkpoints.c.removed_at.is_(None))
        .values(removed_at=tx.now)
    ).rowcount


def choose_start(tx: Write, attempt_id: int, job_id: int) -> None:
    """Decide, once for all nodes of an attempt, what it resumes from and where its own checkpoints will lie.

    A job with checkpoints stays where the newest of them lies, whatever its nodes tell by now: a folder that has come
    or gone since would be looked into in vain.
    """
    rows = tx.connection.execute(
        select(checkpoints.c.path, checkpoints.c.step, checkpoints.c.shared_folder_id)
        .where(checkpoints.c.job_id == job_id, checkpoints.c.removed_at.is_(None))
        .order_by(checkpoints.c.step.desc(), checkpoints.c.id.desc())
        .limit(MAX_RESUME_POINTS)
    ).all()
    shared_folder_id = rows[0].shared_folder_id if rows else _folder_of_nodes(tx, attempt_id)
    points = [{"path": row.path, "step": row.step} for row in rows if row.shared_folder_id == shared_folder_id]
    tx.connection.execute(
        update(attempts)
        .where(attempts.c.id == attempt_id)
        .values(resume_from=json.dumps(points, ensure_ascii=False), shared_folder_id=shared_folder_id)
    )


def _folder_of_nodes(tx: Write, attempt_id: int) -> str | None:
    """The shared folder that all nodes of an attempt tell of; None when there is none."""
    folders = tx.connection.execute(
        select(nodes.c.name, nodes.c.shared_folder_id)
        .join(attempt_nodes, attempt_nodes.c.node_id == nodes.c.id)
        .where(attempt_nodes.c.attempt_id == attempt_id)
    )
    return CheckpointHome.of_nodes({row.name: row.shared_folder_id for row in folders}).shared_folder_id


def resume_points(stored: str | None) -> tuple[ResumePoint, ...]:
    """What `choose_start` stored with an attempt."""
    return tuple(ResumePoint(**point) for point in json.loads(stored or "[]"))
