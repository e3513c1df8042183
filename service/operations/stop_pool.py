"""Stop all jobs because the pool is being shut down: nodes take no new work, the jobs wait again."""

from __future__ import annotations

from sqlalchemy import select, update

from gangline.protocol.outcomes import StopIntent
from service.db.session import Database
from service.db.tables import attempts, jobs, nodes
from service.db.world_changes import mark_all_changed
from service.domain.states import AttemptState
from service.operations.stop_attempt import stop_attempt

SHUTDOWN_REASON = "the pool is shutting down"


def stop_pool(database: Database, *, longest_grace_seconds: float, settle_seconds: float) -> int:
    """Cordon every node and ask every open attempt to stop; returns how many were asked."""
    with database.write() as tx:
        cordoned = tx.connection.execute(
            update(nodes)
            .where(nodes.c.cordon_reason.is_(None))
            .values(cordon_reason=SHUTDOWN_REASON)
            .returning(nodes.c.id)
        )
        mark_all_changed(tx, "node", [row.id for row in cordoned])
        rows = tx.connection.execute(
            select(attempts.c.id)
            .join(jobs, jobs.c.id == attempts.c.job_id)
            .where(attempts.c.state != AttemptState.ENDED)
            .order_by(jobs.c.id)
            .with_for_update(of=jobs)
        ).all()
        for row in rows:
            stop_attempt(
                tx,
                row.id,
                StopIntent.DRAIN,
                detail=SHUTDOWN_REASON,
                settle_seconds=settle_seconds,
                longest_grace_seconds=longest_grace_seconds,
            )
        return len(rows)


def lift_shutdown_cordon(database: Database) -> None:
    """At the next start: nodes that were cordoned only by the shutdown take work again."""
    with database.write() as tx:
        lifted = tx.connection.execute(
            update(nodes)
            .where(nodes.c.cordon_reason == SHUTDOWN_REASON)
            .values(cordon_reason=None)
            .returning(nodes.c.id)
        )
        mark_all_changed(tx, "node", [row.id for row in lifted])
