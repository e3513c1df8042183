"""The one order of row locks, so that no two transactions wait for each other on PostgreSQL.

nodes → jobs → attempts → attempt-nodes → allocations → GPUs. A transaction about an attempt locks the attempt's job
first. On SQLite the single writer makes this free.
"""

from sqlalchemy import Select, bindparam, select

from service.db.session import Write
from service.db.tables import attempts, jobs

_JOB_OF_ATTEMPT = select(jobs.c.id).where(
    jobs.c.id == select(attempts.c.job_id).where(attempts.c.id == bindparam("attempt_id")).scalar_subquery()
)
_ALONE = _JOB_OF_ATTEMPT.with_for_update()
_TO_CHANGE = _JOB_OF_ATTEMPT.with_for_update(key_share=True)
_TO_READ = _JOB_OF_ATTEMPT.with_for_update(read=True, key_share=True)


def lock_job_of(tx: Write, attempt_id: int) -> None:
    """Lock the job that this attempt belongs to until the end of the transaction; nothing when there is none."""
    _lock(tx, _ALONE, attempt_id)


def keep_from_ending(tx: Write, attempt_id: int, *, changes_job: bool) -> None:
    """Hold off whoever would end a part of this attempt (they take `lock_job_of`) until this transaction is over.

    Lighter than that lock: those who only hold off do not wait for each other, save two that also change the job.
    """
    _lock(tx, _TO_CHANGE if changes_job else _TO_READ, attempt_id)


def _lock(tx: Write, statement: Select[tuple[int]], attempt_id: int) -> None:
    if not tx.is_sqlite:
        tx.connection.execute(statement, {"attempt_id": attempt_id})
