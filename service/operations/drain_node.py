"""Drain a node: it gets no new work, and the jobs that resume are stopped after a checkpoint and placed elsewhere.

The others run on to their end, unless the admin wants them stopped as well. A job stopped by a drain starts again, at
no charge. The sweeper repeats `stop_for_drain`, for a server that ends in between and for what was just being placed.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import ColumnElement, Connection, select

from gangline.protocol.outcomes import StopIntent
from service.db.resuming import does_resume
from service.db.session import Database, Write
from service.db.tables import attempt_nodes, attempts, jobs, nodes
from service.domain.states import AttemptNodeState, AttemptState
from service.operations.cordon_node import set_cordon
from service.operations.job_lock import lock_job_of
from service.operations.named_node import lock_node
from service.operations.stop_attempt import stop_attempt


@dataclass(frozen=True, kw_only=True)
class Drained:
    """What a drain means for the jobs on the node."""

    stopped: tuple[int, ...]
    """Ids of jobs that stop for it, or did already."""
    going_on: tuple[int, ...]
    """Ids of jobs that run on to their end."""


_HELD_BY = (
    select(
        attempts.c.id,
        attempts.c.job_id,
        attempts.c.state,
        nodes.c.name.label("node_name"),
        nodes.c.cordon_reason,
    )
    .join(attempt_nodes, attempt_nodes.c.attempt_id == attempts.c.id)
    .join(nodes, nodes.c.id == attempt_nodes.c.node_id)
    .join(jobs, jobs.c.id == attempts.c.job_id)
    .where(attempt_nodes.c.state != AttemptNodeState.ENDED, attempts.c.state != AttemptState.ENDED)
    .order_by(attempts.c.job_id)
)


def drain_node(
    database: Database,
    *,
    name: str,
    reason: str,
    until: float | None,
    is_now: bool,
    actor: str,
    settle_seconds: float,
) -> Drained:
    """Drain a node until `until` (epoch seconds; None: until it is resumed). `is_now`: stop the jobs that do not
    resume too. Raises NotFound."""
    with database.write() as tx:
        node = lock_node(tx, name)
        set_cordon(tx, node, reason=reason, until=until, actor=actor, is_draining=True)
    with database.read() as connection:
        held = _load_held(connection, nodes.c.id == node.id)
    stopped, going_on = [], []
    for attempt in held:
        if not (is_now or gives_way(attempt)):
            going_on.append(attempt.job_id)
            continue
        with database.write() as tx:
            stop_for_drain(tx, attempt, actor=actor, settle_seconds=settle_seconds)
        stopped.append(attempt.job_id)
    return Drained(stopped=tuple(stopped), going_on=tuple(going_on))


def load_in_the_way(connection: Connection, now: float) -> list[Any]:
    """Attempts on draining nodes that give way and were not told yet."""
    is_over = nodes.c.cordon_until.is_not(None) & (nodes.c.cordon_until <= now)
    held = _load_held(connection, nodes.c.is_draining & ~is_over)
    return [attempt for attempt in held if gives_way(attempt) and attempt.state != AttemptState.STOPPING]


def _load_held(connection: Connection, where: ColumnElement[bool]) -> list[Any]:
    return list(connection.execute(_HELD_BY.add_columns(does_resume(connection).label("resumes")).where(where)))


def gives_way(attempt: Any) -> bool:
    """Whether a drain alone stops the attempt: its job resumes, or nothing of it has begun."""
    return bool(attempt.resumes) or attempt.state == AttemptState.ALLOCATED


def stop_for_drain(tx: Write, attempt: Any, *, actor: str, settle_seconds: float) -> None:
    """Ask one attempt to leave a draining node; nothing when it has ended, or stops already."""
    lock_job_of(tx, attempt.id)
    stop_attempt(
        tx,
        attempt.id,
        StopIntent.DRAIN,
        detail=f"{attempt.node_name} is drained: {attempt.cordon_reason}",
        settle_seconds=settle_seconds,
        actor=actor,
    )
