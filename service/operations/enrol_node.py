"""A node joins the pool: an enrolment token buys a credential of its own, which replaces any earlier one."""

from __future__ import annotations

from sqlalchemy import insert, select, update

from service.auth.tokens import hash_token, make_token
from service.db.session import Database
from service.db.tables import nodes
from service.db.transitions import add_event
from service.domain.states import NodeState


def enrol_node(database: Database, *, name: str, address: str, actor: str) -> str:
    """Enrol `name` (or enrol it again) at `address`; returns the credential, which is stored only as a hash."""
    credential = make_token("node")
    with database.write() as tx:
        known = tx.connection.execute(select(nodes.c.id).where(nodes.c.name == name)).one_or_none()
        values = {"credential_hash": hash_token(credential), "address": address, "enrolled_at": tx.now}
        if known is None:
            tx.connection.execute(
                insert(nodes).values(name=name, state=NodeState.UNREACHABLE, cpus=0.0, memory_bytes=0, **values)
            )
        else:
            tx.connection.execute(update(nodes).where(nodes.c.id == known.id).values(**values))
        add_event(tx, "node_enrolled", actor=actor, node_name=name, text=f"{name} enrolled at {address}.")
    return credential
