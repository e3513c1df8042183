"""An admin declares that nothing runs on a node that does not answer: what waits for its word ends, its GPUs are clean.

For a machine that is known to be off. A node that answers says so itself, with its heartbeats.
"""

from __future__ import annotations

from sqlalchemy import select, update

from gangline.protocol.outcomes import StopIntent
from service.db.session import Database
from service.db.tables import attempt_nodes, attempts, gpus, jobs, nodes
from service.db.transitions import add_event, move_node
from service.domain.spec import JobSpec
from service.domain.states import AttemptNodeState, NodeState
from service.errors import Conflict, NotFound
from service.operations.settle_attempt import end_attempt_node, settle_attempt
from service.operations.stop_attempt import stop_attempt


def release_node(database: Database, *, name: str, actor: str, settle_seconds: float) -> int:
    """End the open parts of attempts on a silent node; returns how many. Raises NotFound, Conflict (it answers)."""
    with database.write() as tx:
        node = tx.connection.execute(select(nodes).where(nodes.c.name == name).with_for_update()).one_or_none()
        if node is None:
            raise NotFound(f"there is no node {name}", fix="Look it up: gang node ls.")
        if node.state == NodeState.READY:
            raise Conflict(
                f"{name} answers, so it knows itself what runs on it",
                fix="Cancel its jobs, or stop its agent and wait until it is unreachable.",
            )
        if node.state == NodeState.UNREACHABLE:
            text = f"{actor} declares {name} to be off."
            move_node(tx, node.id, NodeState.LOST, name=name, text=text, columns={"lost_at": tx.now})
        parts = tx.connection.execute(
            select(attempt_nodes, jobs.c.spec)
            .join(attempts, attempts.c.id == attempt_nodes.c.attempt_id)
            .join(jobs, jobs.c.id == attempts.c.job_id)
            .where(attempt_nodes.c.node_id == node.id, attempt_nodes.c.state != AttemptNodeState.ENDED)
            .order_by(jobs.c.id)
            .with_for_update(of=jobs)
        ).all()
        for part in parts:
            end_attempt_node(tx, part, report=None, is_lost=True)
            stop_attempt(
                tx,
                part.attempt_id,
                StopIntent.PEER_FAILURE,
                detail=f"{name} was lost",
                grace_seconds=JobSpec.from_json(part.spec).stop_grace_seconds,
                settle_seconds=settle_seconds,
                actor=actor,
            )
            settle_attempt(tx, part.attempt_id)
        tx.connection.execute(update(gpus).where(gpus.c.node_id == node.id).values(quarantine_reason=None))
        text = f"{actor} declares that nothing runs on {name}; {len(parts)} attempts ended there."
        add_event(tx, "node_released", actor=actor, node_name=name, text=text)
        tx.wake("schedule")
        return len(parts)
