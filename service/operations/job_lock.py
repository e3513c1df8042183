"""The one order of row locks, so that no two transactions wait for each other on PostgreSQL.

nodes → jobs → attempts → attempt-nodes → allocations → GPUs. A transaction about an attempt locks the attempt's job
first. On SQLite the single writer makes this free.
"""

from sqlalchemy import bindparam, select

from service.db.session import Write
from service.db.tables import attempts, jobs

_JOB_OF_ATTEMPT = (
    select(jobs.c.id)
    .where(jobs.c.id == select(attempts.c.job_id).where(attempts.c.id == bindparam("attempt_id")).scalar_subquery())
    .with_for_update()
)


def lock_job_of(tx: Write, attempt_id: int) -> None:
    """Lock the job that this attempt belongs to until the end of the transaction; nothing when there is none."""
    if not tx.is_sqlite:
        tx.connection.execute(_JOB_OF_ATTEMPT, {"attempt_id": attempt_id})
