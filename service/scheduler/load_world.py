"""Load the scheduler's `World` from SQL. Part of the shell: `world` itself is pure."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from sqlalchemy import Connection, func, select

from service.db.tables import allocations, attempt_nodes, checkpoints, gpus, jobs, nodes
from service.domain.checkpoints import CheckpointHome
from service.domain.gang_layout import layouts_of
from service.domain.states import AttemptNodeState, JobState, NodeState
from service.scheduler.world import GPUView, NodeView, WaitingJob, World
from service.settings import Settings, silent_seconds

_OPEN_ALLOCATIONS = select(allocations.c.node_id, allocations.c.gpu_index).where(allocations.c.released_at.is_(None))
_HELD = (
    select(attempt_nodes.c.node_id, func.sum(attempt_nodes.c.cpus), func.sum(attempt_nodes.c.memory_bytes))
    .where(attempt_nodes.c.state != AttemptNodeState.ENDED)
    .group_by(attempt_nodes.c.node_id)
)
_GPUS = select(gpus).where(gpus.c.removed_at.is_(None)).order_by(gpus.c.node_id, gpus.c.gpu_index)
_NODES = select(nodes).order_by(nodes.c.name)
_WAITING = select(
    jobs.c.id,
    jobs.c.team_id,
    jobs.c.priority,
    jobs.c.submitted_at,
    jobs.c.gpu_type,
    jobs.c.memory_bytes_per_node,
    jobs.c.not_before,
    jobs.c.reason,
    jobs.c.layouts,
    jobs.c.num_nodes,
    jobs.c.gpus_per_node,
    jobs.c.processes_per_node,
    jobs.c.cpus_per_node,
).where(jobs.c.state == JobState.WAITING)


def load_world(connection: Connection, now: float, settings: Settings) -> tuple[World, dict[int, str | None]]:
    """The world, and the stored reason (JSON text) of each waiting job.

    A node that is late with its heartbeat gets no new work, though it is not yet unreachable.
    """
    waiting, reasons = load_waiting(connection)
    return World(nodes=load_nodes(connection, now, settings), waiting=waiting), reasons


def load_waiting(connection: Connection) -> tuple[tuple[WaitingJob, ...], dict[int, str | None]]:
    """The waiting jobs, and the stored reason of each."""
    reasons: dict[int, str | None] = {}
    waiting = []
    homes = load_homes(connection)
    for row in connection.execute(_WAITING):
        reasons[row.id] = row.reason
        waiting.append(
            WaitingJob(
                id=row.id,
                team_id=row.team_id,
                priority=row.priority,
                submitted_at=row.submitted_at,
                layouts=layouts_of(
                    row.layouts, row.num_nodes, row.gpus_per_node, row.processes_per_node, row.cpus_per_node
                ),
                gpu_type=row.gpu_type,
                memory_bytes_per_node=row.memory_bytes_per_node,
                not_before=row.not_before,
                home=homes.get(row.id),
            )
        )
    return tuple(waiting), reasons


_HOMES = (
    select(checkpoints.c.job_id, checkpoints.c.shared_folder_id, checkpoints.c.node_names)
    .join(jobs, jobs.c.id == checkpoints.c.job_id)
    .where(jobs.c.state == JobState.WAITING, checkpoints.c.removed_at.is_(None))
    .order_by(checkpoints.c.step, checkpoints.c.id)
)


def load_homes(connection: Connection) -> dict[int, CheckpointHome]:
    """Where the newest checkpoint of each waiting job lies; jobs without any are not in it."""
    newest = {job_id: place for job_id, *place in connection.execute(_HOMES)}
    return {job_id: CheckpointHome.of_row(*place) for job_id, place in newest.items()}


def load_nodes(connection: Connection, now: float, settings: Settings) -> tuple[NodeView, ...]:
    """All nodes with what is free of them."""
    taken: defaultdict[int, set[int]] = defaultdict(set)
    for node_id, index in connection.execute(_OPEN_ALLOCATIONS):
        taken[node_id].add(index)
    held = {node_id: (cpus, memory) for node_id, cpus, memory in connection.execute(_HELD)}
    views: defaultdict[int, list[GPUView]] = defaultdict(list)
    for gpu in connection.execute(_GPUS):
        is_free = gpu.gpu_index not in taken[gpu.node_id] and gpu.quarantine_reason is None
        views[gpu.node_id].append(
            GPUView(
                index=gpu.gpu_index,
                model=gpu.model,
                link_group=gpu.link_group,
                numa_node=gpu.numa_node,
                is_free=is_free,
            )
        )
    result = []
    rows = connection.execute(_NODES).all()
    late_seconds = silent_seconds(settings, len(rows))
    for node in rows:
        cpus, memory = held.get(node.id, (0.0, 0))
        result.append(
            NodeView(
                id=node.id,
                name=node.name,
                blocked_by=_blocked_by(node, now, late_seconds),
                gpus=tuple(views[node.id]),
                cpus=node.cpus,
                memory_bytes=node.memory_bytes,
                free_cpus=node.cpus - cpus,
                free_memory_bytes=node.memory_bytes - int(memory),
                shared_folder_id=node.shared_folder_id,
            )
        )
    return tuple(result)


def _blocked_by(node: Any, now: float, late_seconds: float) -> str | None:
    if node.state != NodeState.READY:
        return str(node.state)
    if node.last_heartbeat_at is None:
        return "not heard of yet"
    if now - node.last_heartbeat_at > late_seconds:
        return "late with its heartbeat"
    if node.cordon_reason is not None:
        return f"cordoned ({node.cordon_reason})"
    return None
