"""Find running attempts none of whose GPUs works, and tell of each once, in its job's history.

Not for: stopping them: whoever holds the GPUs, or an admin, decides that.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, select

from service.db.session import Write
from service.db.tables import allocations, attempt_nodes, attempts, events, gpu_use, jobs, nodes, teams, users
from service.db.transitions import add_event
from service.domain.gpu_use import IDLE_UTILISATION, HeldGPU, IdleHolding, idle_holdings
from service.domain.states import AttemptState

EVENT_KIND = "idle_holder"


@dataclass(frozen=True, kw_only=True)
class IdleHolder:
    """An idle attempt with its job."""

    holding: IdleHolding
    job: Any
    """Id, name, owner, team, is_private, attempt_number of the job."""
    gpus: tuple[tuple[str, tuple[int, ...]], ...]
    """Node name and GPU indexes."""


_HELD = (
    select(
        attempts.c.id.label("attempt_id"),
        attempts.c.running_at,
        allocations.c.gpu_index,
        nodes.c.name.label("node_name"),
        gpu_use.c.at,
        gpu_use.c.idle_since,
    )
    .join(attempt_nodes, attempt_nodes.c.id == allocations.c.attempt_node_id)
    .join(attempts, attempts.c.id == attempt_nodes.c.attempt_id)
    .join(nodes, nodes.c.id == allocations.c.node_id)
    .join(
        gpu_use,
        (gpu_use.c.node_id == allocations.c.node_id) & (gpu_use.c.gpu_index == allocations.c.gpu_index),
        isouter=True,
    )
    .where(allocations.c.released_at.is_(None), attempts.c.state == AttemptState.RUNNING)
    .order_by(attempts.c.id, nodes.c.name, allocations.c.gpu_index)
)
_JOBS = (
    select(
        jobs.c.id,
        jobs.c.name,
        jobs.c.is_private,
        jobs.c.owner_id,
        jobs.c.team_id,
        users.c.name.label("owner"),
        teams.c.name.label("team"),
        attempts.c.id.label("attempt_id"),
        attempts.c.number.label("attempt_number"),
    )
    .join(attempts, attempts.c.job_id == jobs.c.id)
    .join(users, users.c.id == jobs.c.owner_id)
    .join(teams, teams.c.id == jobs.c.team_id)
)


def load_idle_holders(connection: Connection, *, least_seconds: float) -> tuple[IdleHolder, ...]:
    """Running attempts whose GPUs have all been idle for `least_seconds`, those that waste most first."""
    rows = connection.execute(_HELD).all()
    holdings = idle_holdings(
        (
            HeldGPU(attempt_id=row.attempt_id, held_since=row.running_at, sampled_at=row.at, idle_since=row.idle_since)
            for row in rows
        ),
        least_seconds=least_seconds,
    )
    if not holdings:
        return ()
    named = connection.execute(_JOBS.where(attempts.c.id.in_([holding.attempt_id for holding in holdings])))
    by_attempt = {row.attempt_id: row for row in named}
    return tuple(
        IdleHolder(holding=holding, job=by_attempt[holding.attempt_id], gpus=_gpus_of(rows, holding.attempt_id))
        for holding in holdings
    )


def _gpus_of(rows: Sequence[Any], attempt_id: int) -> tuple[tuple[str, tuple[int, ...]], ...]:
    by_node: dict[str, list[int]] = {}
    for row in rows:
        if row.attempt_id == attempt_id:
            by_node.setdefault(row.node_name, []).append(row.gpu_index)
    return tuple((name, tuple(indexes)) for name, indexes in by_node.items())


def tell_idle_holder(tx: Write, holder: IdleHolder) -> bool:
    """Add an event to the job's history, once per attempt; False when it is there already."""
    job, holding = holder.job, holder.holding
    known = tx.connection.execute(
        select(events.c.id)
        .where(events.c.job_id == job.id, events.c.kind == EVENT_KIND, events.c.attempt_number == job.attempt_number)
        .limit(1)
    ).one_or_none()
    if known is not None:
        return False
    where = "; ".join(f"{name} GPU {','.join(map(str, indexes))}" for name, indexes in holder.gpus)
    add_event(
        tx,
        EVENT_KIND,
        actor="service",
        job_id=job.id,
        attempt_number=job.attempt_number,
        text=f"{job.owner} holds {holding.num_gpus} GPU{'' if holding.num_gpus == 1 else 's'} ({where}) that have "
        f"worked less than {IDLE_UTILISATION:.0%} for {holding.idle_seconds / 60:.0f} min: "
        f"{holding.wasted_gpu_seconds / 3600:.1f} GPU-hours held without use.",
        data={"gpus": holding.num_gpus, "since": holding.since},
    )
    return True
