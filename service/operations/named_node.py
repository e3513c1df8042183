"""The node that an admin names, locked until the end of the transaction."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, select

from service.db.session import Write
from service.db.tables import nodes
from service.errors import NotFound


def lock_node(tx: Write, name: str) -> Row[Any]:
    """The node's row, locked. Raises NotFound."""
    node = tx.connection.execute(select(nodes).where(nodes.c.name == name).with_for_update()).one_or_none()
    if node is None:
        raise NotFound(f"there is no node {name}", fix="Look it up: gang node ls.")
    return node
