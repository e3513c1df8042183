"""A node is lost: its attempts end there, its GPUs are set aside until it proves them clean."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, select

from gangline.protocol.outcomes import StopIntent
from service.db.session import Write
from service.db.tables import attempt_nodes, attempts, jobs
from service.db.transitions import move_node
from service.domain.states import AttemptNodeState, NodeState
from service.operations.settle_attempt import end_attempt_node, settle_attempt
from service.operations.stop_attempt import stop_attempt

LOST_SETTLE_SECONDS = 60.0


def lose_node(tx: Write, node: Row[Any], *, why: str) -> None:
    """Mark an unreachable node lost, end its open attempts there, and tell their peers to stop.

    An attempt whose job the user has cancelled stays open: it is cancelled only when the node says that nothing of it
    runs any more, or an admin does.
    """
    move_node(
        tx, node.id, NodeState.LOST, name=node.name, text=f"{node.name} is lost: {why}.", columns={"lost_at": tx.now}
    )
    end_parts_of_node(tx, node, spare_cancelled=True, is_quarantined=True)


def end_parts_of_node(tx: Write, node: Row[Any], *, spare_cancelled: bool, is_quarantined: bool) -> int:
    """End the open parts of attempts on a lost node and stop their peers; returns how many.

    `spare_cancelled` leaves those of cancelled jobs open; `is_quarantined` sets the GPUs of claimed parts aside.
    """
    query = (
        select(attempt_nodes)
        .join(attempts, attempts.c.id == attempt_nodes.c.attempt_id)
        .join(jobs, jobs.c.id == attempts.c.job_id)
        .where(attempt_nodes.c.node_id == node.id, attempt_nodes.c.state != AttemptNodeState.ENDED)
        .order_by(jobs.c.id)
        .with_for_update(of=jobs)
    )
    parts = tx.connection.execute(query.where(~jobs.c.is_cancel_wished) if spare_cancelled else query).all()
    for part in parts:
        was_claimed = part.state != AttemptNodeState.ALLOCATED
        reason = f"{node.name} was lost while attempt {part.attempt_id} ran on it"
        end_attempt_node(
            tx, part, report=None, is_lost=True, quarantine=reason if is_quarantined and was_claimed else None
        )
        stop_attempt(
            tx,
            part.attempt_id,
            StopIntent.PEER_FAILURE,
            detail=f"{node.name} was lost",
            settle_seconds=LOST_SETTLE_SECONDS,
        )
        settle_attempt(tx, part.attempt_id)
    return len(parts)
