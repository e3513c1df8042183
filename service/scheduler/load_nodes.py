"""Load what the scheduler knows of nodes from SQL. Part of the shell: `world` itself is pure.

A node that is late with its heartbeat gets no new work, though it is not yet unreachable.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection
from typing import Any, Final, NamedTuple

from sqlalchemy import Connection, Select, func, select

from service import clock
from service.db.tables import allocations, attempt_nodes, attempts, gpus, nodes
from service.domain.states import AttemptNodeState, AttemptState, NodeState
from service.scheduler.facts import GPUView, NodeView
from service.settings import Settings, silent_seconds

RECENT_ALLOCATIONS: Final = 20_000
"""How far back is looked for when something last started or ended on a node: it only breaks ties."""

_NODES = select(nodes).order_by(nodes.c.name)
_SIGNS = select(
    nodes.c.id, nodes.c.state, nodes.c.last_heartbeat_at, nodes.c.cordon_reason, nodes.c.cordon_until,
    nodes.c.is_draining,
)  # fmt: skip
_GPUS = select(gpus).where(gpus.c.removed_at.is_(None)).order_by(gpus.c.node_id, gpus.c.gpu_index)
_RUNS_ON = (attempt_nodes.c.state != AttemptNodeState.ENDED) & (attempts.c.state != AttemptState.ENDED)
_STRAY_ALLOCATIONS = (
    select(allocations.c.node_id, allocations.c.gpu_index)
    .join(attempt_nodes, attempt_nodes.c.id == allocations.c.attempt_node_id)
    .join(attempts, attempts.c.id == attempt_nodes.c.attempt_id)
    .where(allocations.c.released_at.is_(None), ~_RUNS_ON)
)
_STRAY_SHARES = (
    select(attempt_nodes.c.node_id, func.sum(attempt_nodes.c.cpus), func.sum(attempt_nodes.c.memory_bytes))
    .join(attempts, attempts.c.id == attempt_nodes.c.attempt_id)
    .where(attempt_nodes.c.state != AttemptNodeState.ENDED, attempts.c.state == AttemptState.ENDED)
    .group_by(attempt_nodes.c.node_id)
)
"""What attempts hold that have ended, so that no running job of the world holds it."""
_NEWEST_ALLOCATION = select(func.max(allocations.c.id)).scalar_subquery()
_CHANGED_AT = (
    select(
        allocations.c.node_id,
        func.max(func.coalesce(allocations.c.released_at, allocations.c.allocated_at)),
    )
    .where(allocations.c.id > _NEWEST_ALLOCATION - RECENT_ALLOCATIONS)
    .group_by(allocations.c.node_id)
)


def load_nodes(
    connection: Connection,
    now: float,
    settings: Settings,
    ids: Collection[int] | None = None,
    *,
    with_changed_at: bool = True,
) -> tuple[NodeView, ...]:
    """All nodes, or those of `ids`, with what is free of them beside what running jobs hold."""

    def some(query: Select[Any], column: Any) -> Select[Any]:
        return query if ids is None else query.where(column.in_(ids))

    taken: defaultdict[int, set[int]] = defaultdict(set)
    for node_id, index in connection.execute(some(_STRAY_ALLOCATIONS, allocations.c.node_id)):
        taken[node_id].add(index)
    held = {
        node_id: (cpus, memory)
        for node_id, cpus, memory in connection.execute(some(_STRAY_SHARES, attempt_nodes.c.node_id))
    }
    changed: dict[int, float] = {}
    if with_changed_at:
        changed = {row[0]: row[1] for row in connection.execute(_CHANGED_AT)}
    views: defaultdict[int, list[GPUView]] = defaultdict(list)
    for gpu in connection.execute(some(_GPUS, gpus.c.node_id)):
        views[gpu.node_id].append(
            GPUView(
                index=gpu.gpu_index,
                model=gpu.model,
                memory_bytes=gpu.memory_bytes,
                link_group=gpu.link_group,
                numa_node=gpu.numa_node,
                is_free=gpu.gpu_index not in taken[gpu.node_id] and gpu.quarantine_reason is None,
            )
        )
    late_seconds = silent_seconds(settings, _num_nodes(connection))
    result = []
    for node in connection.execute(some(_NODES, nodes.c.id)):
        cpus, memory = held.get(node.id, (0.0, 0))
        block = _block_of(node, now, late_seconds)
        result.append(
            NodeView(
                id=node.id,
                name=node.name,
                blocked_by=block.why,
                blocked_until=block.until,
                gpus=tuple(views[node.id]),
                cpus=node.cpus,
                memory_bytes=node.memory_bytes,
                free_cpus=node.cpus - cpus,
                free_memory_bytes=node.memory_bytes - int(memory),
                shared_folder_id=node.shared_folder_id,
                labels=json.loads(node.labels),
                changed_at=changed.get(node.id, 0.0),
            )
        )
    return tuple(result)


class Block(NamedTuple):
    """Why a node gets no new work, and until when if that is known (epoch seconds); both None: it does."""

    why: str | None = None
    until: float | None = None


def load_blocks(connection: Connection, now: float, settings: Settings) -> dict[int, Block]:
    """Why each node gets no new work now, by id: its state, its flags and how late its heartbeat is."""
    rows = connection.execute(_SIGNS).all()
    late_seconds = silent_seconds(settings, len(rows))
    return {row.id: _block_of(row, now, late_seconds) for row in rows}


def _num_nodes(connection: Connection) -> int:
    return int(connection.execute(select(func.count()).select_from(nodes)).scalar_one())


def _block_of(node: Any, now: float, late_seconds: float) -> Block:
    if node.state != NodeState.READY:
        return Block(str(node.state))
    if node.last_heartbeat_at is None:
        return Block("not heard of yet")
    if now - node.last_heartbeat_at > late_seconds:
        return Block("late with its heartbeat")
    if node.cordon_reason is None:
        return Block()
    flag = "drained" if node.is_draining else "cordoned"
    end = "" if node.cordon_until is None else f" until {clock.rfc3339(node.cordon_until)}"
    return Block(f"{flag}{end} ({node.cordon_reason})", node.cordon_until)
