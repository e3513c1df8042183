"""Cordon a node: it gets no new work, and what runs there runs on. Resume it: it takes work again.

A cordon has a reason and may have an end, at which the sweeper resumes the node. Not for: moving away what runs there
(`service.operations.drain_node`).
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, select, update

from service.clock import rfc3339
from service.db.session import Database, Write
from service.db.tables import nodes
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.operations.named_node import lock_node


def cordon_node(database: Database, *, name: str, reason: str, until: float | None, actor: str) -> None:
    """Give a node no new work, until `until` (epoch seconds; None: until it is resumed). A drain under way goes no
    further; an earlier reason and end are replaced. Raises NotFound."""
    with database.write() as tx:
        set_cordon(tx, lock_node(tx, name), reason=reason, until=until, actor=actor, is_draining=False)


def set_cordon(tx: Write, node: Row[Any], *, reason: str, until: float | None, actor: str, is_draining: bool) -> None:
    """Cordon or drain a locked node, and tell who did it, why and until when."""
    tx.connection.execute(
        update(nodes)
        .where(nodes.c.id == node.id)
        .values(cordon_reason=reason, cordon_until=until, is_draining=is_draining)
    )
    verb = "drains" if is_draining else "cordons"
    end = "" if until is None else f" until {rfc3339(until)}"
    add_event(
        tx,
        "node_draining" if is_draining else "node_cordoned",
        actor=actor,
        node_name=node.name,
        text=f"{actor} {verb} {node.name}{end}: {reason}.",
        data={"reason": reason, "until": rfc3339(until), "before": node.cordon_reason},
    )
    mark_changed(tx, "node", node.id)


def resume_node(database: Database, *, name: str, actor: str) -> bool:
    """Let a node take work again; False when it did already. Raises NotFound."""
    with database.write() as tx:
        node = lock_node(tx, name)
        if node.cordon_reason is None:
            return False
        lift_cordon(tx, node, actor=actor, why=f"{actor} resumes {name}")
        return True


def end_overdue_cordon(tx: Write, node: Row[Any]) -> None:
    """Resume a node whose cordon has come to its end; one whose end was put off meanwhile stays as it is."""
    present = tx.connection.execute(select(nodes).where(nodes.c.id == node.id).with_for_update()).one()
    if present.cordon_until is not None and present.cordon_until <= tx.now:
        lift_cordon(tx, present, actor="service", why=f"{present.name} takes work again: the end given has come")


def lift_cordon(tx: Write, node: Row[Any], *, actor: str, why: str) -> None:
    """Clear cordon and drain of a locked node, and tell why."""
    tx.connection.execute(
        update(nodes).where(nodes.c.id == node.id).values(cordon_reason=None, cordon_until=None, is_draining=False)
    )
    text = f"{why} (it was {'draining' if node.is_draining else 'cordoned'}: {node.cordon_reason})."
    add_event(tx, "node_resumed", actor=actor, node_name=node.name, text=text, data={"reason": node.cordon_reason})
    mark_changed(tx, "node", node.id)
