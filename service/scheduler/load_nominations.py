"""Load the nominations that still hold, and find those that do not any more. Part of the scheduler's shell."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from gangline.protocol.outcomes import JobState
from service.db.tables import attempts, gpus, jobs, nodes, nominations
from service.domain.gang_layout import layouts_from_json
from service.domain.states import AttemptState, NodeState
from service.scheduler.facts import NodeShare, Nomination, PlacedGang

_NOMINATIONS = (
    select(
        nominations,
        jobs.c.state,
        jobs.c.is_cancel_wished,
        jobs.c.hold_reason,
        jobs.c.not_before,
    )
    .join(jobs, jobs.c.id == nominations.c.job_id)
    .order_by(nominations.c.job_id)
)
_BAD_GPUS = select(gpus.c.node_id, gpus.c.gpu_index).where(
    gpus.c.quarantine_reason.is_not(None) | gpus.c.removed_at.is_not(None)
)
_USABLE_NODES = select(nodes.c.id).where(nodes.c.state == NodeState.READY, nodes.c.cordon_reason.is_(None))


@dataclass(frozen=True, kw_only=True)
class LoadedNominations:
    """What was found."""

    alive: tuple[Nomination, ...] = ()
    dead: tuple[int, ...] = ()
    """Jobs whose nomination holds no more: ended, held or cancelled, a node blocked, a GPU set aside, or too old."""


def load_nominations(connection: Connection, now: float) -> LoadedNominations:
    """All nominations. Those that a job waits for are its victims' attempts that have not ended."""
    rows = connection.execute(_NOMINATIONS).all()
    if not rows:
        return LoadedNominations()
    usable = set(connection.execute(_USABLE_NODES).scalars())
    bad = {(row.node_id, row.gpu_index) for row in connection.execute(_BAD_GPUS)}
    victims = {attempt_id for row in rows for attempt_id in json.loads(row.victims)}
    leaving = {
        attempt.id: attempt.job_id
        for attempt in connection.execute(
            select(attempts.c.id, attempts.c.job_id).where(
                attempts.c.id.in_(victims), attempts.c.state != AttemptState.ENDED
            )
        )
    }
    alive, dead = [], []
    for row in rows:
        after = frozenset(leaving[attempt_id] for attempt_id in json.loads(row.victims) if attempt_id in leaving)
        if _is_dead(row, usable, bad, after, now):
            dead.append(row.job_id)
        else:
            alive.append(Nomination(job_id=row.job_id, gang=_gang_of(row), after=after))
    return LoadedNominations(alive=tuple(alive), dead=tuple(dead))


def _is_dead(row: Row[Any], usable: set[int], bad: set[tuple[int, int]], after: frozenset[int], now: float) -> bool:
    if row.is_cancel_wished or row.hold_reason is not None or now > row.expires_at:
        return True
    shares = json.loads(row.shares)
    if any(node_id not in usable or any((node_id, index) in bad for index in held) for node_id, held in shares):
        return True
    if row.state == JobState.WAITING:
        return row.not_before is not None and row.not_before > now
    # A job that is moved to other GPUs: it is one of those that have to leave first.
    return row.job_id not in after


def _gang_of(row: Row[Any]) -> PlacedGang:
    shares = tuple(
        NodeShare(node_id=node_id, gpu_indices=tuple(indices)) for node_id, indices in json.loads(row.shares)
    )
    return PlacedGang(layout=layouts_from_json(row.layout)[0], shares=shares)
