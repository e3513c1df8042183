"""The only writer of a state: one compare-and-set, its event row, and what to wake, in the caller's transaction.

A move that the tables of `service.domain.states` do not list, or whose row is in another state by now, raises
`StaleTransition`: the caller's answer for "someone else won".
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from sqlalchemy import Insert, Table, Update, bindparam, insert, literal, select, update

from gangline.protocol.outcomes import Outcome
from service.db.dependencies import begin_wait_of_free, load_needs, lock_dependents, waiting_dependents
from service.db.session import Write
from service.db.tables import attempt_nodes, attempts, events, jobs, nodes, outbox, world_changes
from service.db.world_changes import mark_all_changed, mark_changed
from service.domain.dependencies import hopeless_cause
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
    """Move a job, raise its version, and tell why. When it ends, those that need it follow."""
    _move_one_job(tx, job_id, to, actor=actor, text=text, data=data, attempt_number=attempt_number, columns=columns)
    if to.is_terminal:
        _follow_ends(tx, [job_id])


def cancel_hopeless(tx: Write, job_ids: Sequence[int]) -> None:
    """End those of these waiting jobs that need a job which has ended otherwise than needed, and all that need them."""
    ended = [job_id for job_id in sorted(job_ids) if _cancel_if_hopeless(tx, job_id)]
    _follow_ends(tx, ended)


def _follow_ends(tx: Write, ended: list[int]) -> None:
    """Mark the waiting jobs that need these, and end those whose condition can never hold any more; and so on.

    All of them are locked first, in one order, so that no two transactions wait for each other.
    """
    if not ended or not lock_dependents(tx, ended):
        return
    while ended:
        going: list[int] = []
        for job_id in waiting_dependents(tx, ended.pop()):
            (ended if _cancel_if_hopeless(tx, job_id) else going).append(job_id)
        begin_wait_of_free(tx, going)
        mark_all_changed(tx, "job", going)


def _cancel_if_hopeless(tx: Write, job_id: int) -> bool:
    needs = load_needs(tx.connection, [job_id]).get(job_id, ())
    need = next((need for need in needs if need.is_hopeless), None)
    if need is None:
        return False
    cause = hopeless_cause(need)
    _move_one_job(
        tx,
        job_id,
        JobState.CANCELLED,
        actor="service",
        text=cause["sentence"],
        data={"outcome": cause["outcome"], "fix": cause["fix"], "needs": need.job_id},
        columns={
            "outcome": str(Outcome.CANCELLED),
            "cause": json.dumps(cause, ensure_ascii=False),
            "reason": None,
            "ended_at": tx.now,
        },
    )
    return True


def _move_one_job(
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
    _move(tx, jobs, job_id, to, sources_of(JOB_TRANSITIONS, to), columns or {}, counter="version")
    add_event(tx, f"job_{to}", actor=actor, job_id=job_id, attempt_number=attempt_number, text=text, data=data)
    mark_changed(tx, "job", job_id)
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
    _mark(tx, _MARK_JOB_OF_ATTEMPT, attempt_id)
    tx.wake(f"attempt:{attempt_id}")


def move_attempt_node(
    tx: Write, attempt_node_id: int, to: AttemptNodeState, *, columns: Mapping[str, Any] | None = None
) -> None:
    """Move an attempt on one node."""
    _move(tx, attempt_nodes, attempt_node_id, to, sources_of(ATTEMPT_NODE_TRANSITIONS, to), columns or {})
    _mark(tx, _MARK_JOB_OF_ATTEMPT_NODE, attempt_node_id)
    _mark(tx, _MARK_NODE_OF_ATTEMPT_NODE, attempt_node_id)


def move_node(
    tx: Write, node_id: int, to: NodeState, *, name: str, text: str, columns: Mapping[str, Any] | None = None
) -> None:
    """Move a node, and tell why."""
    _move(tx, nodes, node_id, to, sources_of(NODE_TRANSITIONS, to), columns or {})
    add_event(tx, f"node_{to}", actor="service", node_name=name, text=text)
    mark_changed(tx, "node", node_id)


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


def _mark(tx: Write, statement: Insert, row_id: int) -> None:
    """`mark_changed` of the job or node that a row belongs to, without reading the row first."""
    tx.connection.execute(statement, {"row_id": row_id})
    tx.wake("schedule")


_KIND_AND_KEY = [world_changes.c.kind, world_changes.c.key]
_MARK_JOB_OF_ATTEMPT = insert(world_changes).from_select(
    _KIND_AND_KEY, select(literal("job"), attempts.c.job_id).where(attempts.c.id == bindparam("row_id"))
)
_MARK_JOB_OF_ATTEMPT_NODE = insert(world_changes).from_select(
    _KIND_AND_KEY,
    select(literal("job"), attempts.c.job_id)
    .join(attempt_nodes, attempts.c.id == attempt_nodes.c.attempt_id)
    .where(attempt_nodes.c.id == bindparam("row_id")),
)
_MARK_NODE_OF_ATTEMPT_NODE = insert(world_changes).from_select(
    _KIND_AND_KEY,
    select(literal("node"), attempt_nodes.c.node_id).where(attempt_nodes.c.id == bindparam("row_id")),
)


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
