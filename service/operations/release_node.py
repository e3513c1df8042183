"""An admin declares that nothing runs on a node that does not answer: what waits for its word ends, its GPUs are clean.

For a machine that is known to be off. A node that answers says so itself, with its heartbeats.
"""

from __future__ import annotations

from sqlalchemy import select, update

from service.db.session import Database
from service.db.tables import gpus, nodes
from service.db.transitions import add_event, move_node
from service.domain.states import NodeState
from service.errors import Conflict, NotFound
from service.operations.lose_node import end_parts_of_node


def release_node(database: Database, *, name: str, actor: str) -> int:
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
        num_ended = end_parts_of_node(tx, node, spare_cancelled=False, is_quarantined=False)
        tx.connection.execute(update(gpus).where(gpus.c.node_id == node.id).values(quarantine_reason=None))
        text = f"{actor} declares that nothing runs on {name}; {num_ended} attempts ended there."
        add_event(tx, "node_released", actor=actor, node_name=name, text=text)
        tx.wake("schedule")
        return num_ended
