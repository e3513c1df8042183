"""Label a node: set or take away labels. Jobs may ask for nodes with labels; `switch` names the network switch."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from sqlalchemy import update

from service.db.session import Database
from service.db.tables import nodes
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.domain.node_labels import RULE, changed_labels, problems_of
from service.errors import FieldProblem, InvalidRequest
from service.operations.named_node import lock_node


def label_node(database: Database, *, name: str, changes: Mapping[str, Any], reason: str, actor: str) -> dict[str, str]:
    """Apply {label: value, or None to take it away}; returns all labels of the node. Raises NotFound, InvalidRequest
    with every problem."""
    if problems := problems_of(changes):
        errors = [FieldProblem(pointer="labels", message=f"{text}.", suggestion=f"Use {RULE}.") for text in problems]
        raise InvalidRequest("; ".join(problems), fix=f"Use {RULE}.", errors=errors)
    with database.write() as tx:
        node = lock_node(tx, name)
        before: dict[str, str] = json.loads(node.labels)
        try:
            after = changed_labels(before, changes)
        except ValueError as error:
            raise InvalidRequest(str(error), fix="Take labels away: gang node label NODE NAME-.") from error
        if after == before:
            return after
        tx.connection.execute(update(nodes).where(nodes.c.id == node.id).values(labels=json.dumps(after)))
        told = ", ".join(f"{label}={value}" for label, value in after.items()) or "none"
        add_event(
            tx,
            "node_labelled",
            actor=actor,
            node_name=name,
            text=f"{actor} labels {name}: {told}{f' ({reason})' if reason else ''}.",
            data={"from": before, "to": after, "reason": reason},
        )
        mark_changed(tx, "node", node.id)
        return after
