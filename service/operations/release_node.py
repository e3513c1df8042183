"""An admin declares that nothing runs on a node that does not answer: what waits for its word ends, its GPUs are clean.

For a machine that is known to be off. A node that answers says so itself, with its heartbeats.
"""

from __future__ import annotations

from sqlalchemy import update

from service.db.session import Database
from service.db.tables import gpus
from service.db.transitions import add_event, move_node
from service.db.world_changes import mark_changed
from service.domain.states import NodeState
from service.errors import Conflict
from service.operations.lose_node import end_parts_of_node
from service.operations.named_node import lock_node


def release_node(database: Database, *, name: str, actor: str) -> int:
    """End the open parts of attempts on a silent node; returns how many. Raises NotFound, Conflict (it answers)."""
    with database.write() as tx:
        node = lock_node(tx, name)
        if node.state == NodeState.READY:
            raise Conflict(
                f"{name} answers, so it knows itself what runs on it",
                fix="Cancel its jobs, or stop its agent and wait until it is unreachable.",
            )
        if node.state == NodeState.UNREACHABLE:
            text = f"{actor} declares {name} to be off."
            move_node(tx, node.id, NodeState.LOST, name=name, text=text, columns={"lost_at": tx.now})
        num_ended = end_parts_of_node(tx, node, spare_cancelled=False, is_quarantined=False)
        tx.connection.execute(update(gpus).where(gpus.c.node_id == node.id).values(quarantine_reason=None))
        text = f"{actor} declares that nothing runs on {name}; {num_ended} attempts ended there."
        add_event(tx, "node_released", actor=actor, node_name=name, text=text)
        mark_changed(tx, "node", node.id)
        return num_ended
