"""The only writer of a state: one compare-and-set, its event row, and what to wake, in the caller's transaction.

A move that the tables of `service.domain.states` do not list, or whose row is in another state by now, raises
`StaleTransition`: the caller's answer for "someone else won".
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from enum import StrEnum
from typing import Any

from sqlalchemy import Table, Update, bindparam, insert, update

from service.db.session import Write
from service.db.tables import attempt_nodes, attempts, events, jobs, nodes, outbox
from service.domain.states import (
    ATTEMPT_NODE_TRANSITIONS,
    ATTEMPT_TRANSITIONS,
    JOB_TRANSITIONS,
    NODE_TRANSITIONS,
    AttemptNodeState,
    AttemptState,
    JobState,
    NodeState,
    sources_of,
)


class StaleTransition(Exception):
    """The row is not in a state from which this move starts; nothing was changed."""


def move_job(
    tx: Write,
    job_id: int,
    to: JobState,
    *,
    actor: str,
    text: str,
    data: Mapping[str, Any] | None = None,
    attempt_number: int | None = None,
    columns: Mapping[str, Any] | None = None,
) -> None:
    """Move a job, raise its version, and tell why."""
    _move(tx, jobs, job_id, to, sources_of(JOB_TRANSITIONS, to), columns or {}, counter="version")
    add_event(tx, f"job_{to}", actor=actor, job_id=job_id, attempt_number=attempt_number, text=text, data=data)
    tx.wake(f"job:{job_id}")


def move_attempt(
    tx: Write,
    attempt_id: int,
    to: AttemptState,
    *,
    columns: Mapping[str, Any] | None = None,
    new_directive: bool = False,
) -> None:
    """Move an attempt. `new_directive` raises the directive version, which wakes its supervisors."""
    counter = None
    if new_directive:
        counter = "directive_version"
        tx.wake(f"directive:{attempt_id}")
    _move(tx, attempts, attempt_id, to, sources_of(ATTEMPT_TRANSITIONS, to), columns or {}, counter=counter)
    tx.wake(f"attempt:{attempt_id}")


def move_attempt_node(
    tx: Write, attempt_node_id: int, to: AttemptNodeState, *, columns: Mapping[str, Any] | None = None
) -> None:
    """Move an attempt on one node."""
    _move(tx, attempt_nodes, attempt_node_id, to, sources_of(ATTEMPT_NODE_TRANSITIONS, to), columns or {})


def move_node(
    tx: Write, node_id: int, to: NodeState, *, name: str, text: str, columns: Mapping[str, Any] | None = None
) -> None:
    """Move a node, and tell why."""
    _move(tx, nodes, node_id, to, sources_of(NODE_TRANSITIONS, to), columns or {})
    add_event(tx, f"node_{to}", actor="service", node_name=name, text=text)
    tx.wake("schedule")


def add_event(
    tx: Write,
    kind: str,
    *,
    actor: str,
    text: str,
    job_id: int | None = None,
    attempt_number: int | None = None,
    node_name: str | None = None,
    data: Mapping[str, Any] | None = None,
) -> None:
    """Append a line of history in the same transaction as what it tells."""
    tx.connection.execute(
        _INSERT_EVENT,
        {
            "at": tx.now,
            "kind": kind,
            "actor": actor,
            "job_id": job_id,
            "attempt_number": attempt_number,
            "node_name": node_name,
            "text": text,
            "data": json.dumps(data or {}, ensure_ascii=False),
        },
    )
    if job_id is not None:
        tx.wake(f"events:{job_id}")


def add_hint(tx: Write, queue: str, attempt_id: int) -> None:
    """Leave a hint for the dispatcher; it is published after the commit."""
    tx.connection.execute(_INSERT_HINT, {"queue": queue, "attempt_id": attempt_id, "created_at": tx.now})
    tx.wake("outbox")


_INSERT_EVENT = insert(events)
_INSERT_HINT = insert(outbox)


def _move(
    tx: Write,
    table: Table,
    row_id: int,
    to: StrEnum,
    sources: frozenset[Any],
    columns: Mapping[str, Any],
    *,
    counter: str | None = None,
) -> None:
    """Move a row and set `columns`, plain values; `counter` names a column that goes up by one."""
    statement = _move_statement(table, str(to), sources, frozenset(columns), counter)
    parameters = {"row_id": row_id, **{f"new_{name}": value for name, value in columns.items()}}
    if tx.connection.execute(statement, parameters).rowcount != 1:
        raise StaleTransition(f"{table.name} {row_id} cannot become {to}: it is in none of {sorted(sources)}")


@functools.cache  # as many as there are kinds of moves: building one costs more than running it
def _move_statement(
    table: Table, to: str, sources: frozenset[Any], names: frozenset[str], counter: str | None
) -> Update:
    values: dict[str, Any] = {name: bindparam(f"new_{name}") for name in sorted(names)}
    if counter is not None:
        values[counter] = table.c[counter] + 1
    return (
        update(table)
        .where(table.c.id == bindparam("row_id"), table.c.state.in_(sorted(sources)))
        .values(state=to, **values)
    )
