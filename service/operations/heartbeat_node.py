"""A node's heartbeat: it is alive, this is what it has and runs; the answer says what it should start and forget."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Row, insert, select, update

from gangline.protocol.launch import NodeFailure, NodeReport
from gangline.protocol.outcomes import Outcome, StopIntent
from service.db.session import Database, Write
from service.db.tables import attempt_nodes, gpus, nodes
from service.db.transitions import add_event, move_node
from service.db.world_changes import mark_changed
from service.domain.gpu_use import COUNTED_INTERVALS, GPUSample
from service.domain.states import AttemptNodeState, NodeState
from service.operations.job_lock import lock_job_of
from service.operations.record_gpu_use import add_busy_seconds, record_gpu_use
from service.operations.settle_attempt import end_attempt_node, settle_attempt
from service.operations.stop_attempt import stop_attempt
from service.settings import SMALL_POOL_NODES, Settings, interval_seconds, silent_seconds


@dataclass(frozen=True, kw_only=True)
class GPUFacts:
    """One device as the agent's inventory tells it."""

    index: int
    uuid: str
    kind: str
    model: str
    memory_bytes: int
    link_group: str | None
    numa_node: int | None


@dataclass(frozen=True, kw_only=True)
class Heartbeat:
    """What an agent says."""

    incarnation: str
    boot_id: str
    version: str
    cpus: float
    memory_bytes: int
    gpus: tuple[GPUFacts, ...]
    attempts: frozenset[int]
    """Attempts that have a state file on the node."""
    process_sets: frozenset[int]
    """Attempts of which marked processes live on the node."""
    quarantined: dict[str, str]
    """GPUs that the agent found not clean, by UUID, with the reason."""
    shared_folder_id: str | None = None
    """Id read from the agent's shared folder; None when it has none."""
    gpu_use: tuple[GPUSample, ...] = ()
    """How much each GPU works, as far as the agent knows."""


@dataclass(frozen=True, kw_only=True)
class HeartbeatAnswer:
    """What the service wants of the agent."""

    interval_seconds: float
    pool_id: str
    launch: tuple[int, ...]
    fenced: tuple[int, ...]


def heartbeat_node(
    database: Database, settings: Settings, pool_id: str, node_id: int, heartbeat: Heartbeat
) -> HeartbeatAnswer:
    """Record a heartbeat and answer it."""
    with database.write() as tx:
        node = tx.connection.execute(select(nodes).where(nodes.c.id == node_id).with_for_update()).one()
        num_nodes = len(tx.connection.execute(select(nodes.c.id).limit(SMALL_POOL_NODES + 1)).all())
        _record(tx, node, heartbeat, silent_seconds(settings, num_nodes))
        rows = tx.connection.execute(
            select(attempt_nodes).where(
                attempt_nodes.c.node_id == node_id, attempt_nodes.c.state != AttemptNodeState.ENDED
            )
        ).all()
        open_attempts = {row.attempt_id for row in rows}
        missing = _notice_missing(tx, settings, rows, heartbeat)
        strangers = (heartbeat.attempts | heartbeat.process_sets) - open_attempts
        if not strangers:
            _clear_quarantine(tx, node, heartbeat)
        interval = interval_seconds(settings, num_nodes)
        offered = {gpu.index for gpu in heartbeat.gpus}
        samples = [sample for sample in heartbeat.gpu_use if sample.index in offered]
        busy = record_gpu_use(tx, node_id, samples, longest_seconds=interval * COUNTED_INTERVALS)
    add_busy_seconds(database, busy)
    for row in missing:
        with database.write() as tx:
            _end_missing(tx, settings, node, row)
    return HeartbeatAnswer(
        interval_seconds=interval,
        pool_id=pool_id,
        launch=tuple(sorted(row.attempt_id for row in rows if row.state == AttemptNodeState.ALLOCATED)),
        fenced=tuple(sorted(strangers)),
    )


def _record(tx: Write, node: Row[Any], heartbeat: Heartbeat, late_seconds: float) -> None:
    inventory = json.dumps(
        [heartbeat.cpus, heartbeat.memory_bytes, [vars(gpu) for gpu in heartbeat.gpus]], sort_keys=True
    )
    inventory_hash = hashlib.sha256(inventory.encode()).hexdigest()
    tx.connection.execute(
        update(nodes)
        .where(nodes.c.id == node.id)
        .values(
            last_heartbeat_at=tx.now,
            incarnation=heartbeat.incarnation,
            boot_id=heartbeat.boot_id,
            agent_version=heartbeat.version,
            cpus=heartbeat.cpus,
            memory_bytes=heartbeat.memory_bytes,
            inventory_hash=inventory_hash,
            shared_folder_id=heartbeat.shared_folder_id,
        )
    )
    if inventory_hash != node.inventory_hash:
        _record_inventory(tx, node.id, heartbeat.gpus)
    is_new = inventory_hash != node.inventory_hash or heartbeat.shared_folder_id != node.shared_folder_id
    # It got no new work while it was late; now it may.
    was_late = node.last_heartbeat_at is None or tx.now - node.last_heartbeat_at > late_seconds
    if is_new or was_late:
        mark_changed(tx, "node", node.id)
    if node.state != NodeState.READY:
        text = f"{node.name} answers again." if node.last_heartbeat_at else f"{node.name} joined the pool."
        move_node(tx, node.id, NodeState.READY, name=node.name, text=text, columns={"lost_at": None})


def _record_inventory(tx: Write, node_id: int, seen: Sequence[GPUFacts]) -> None:
    known = {row.gpu_index for row in tx.connection.execute(select(gpus.c.gpu_index).where(gpus.c.node_id == node_id))}
    for gpu in seen:
        facts = {**vars(gpu), "removed_at": None}
        facts["gpu_index"] = facts.pop("index")
        if gpu.index in known:
            tx.connection.execute(
                update(gpus).where(gpus.c.node_id == node_id, gpus.c.gpu_index == gpu.index).values(**facts)
            )
        else:
            tx.connection.execute(insert(gpus).values(node_id=node_id, **facts))
    tx.connection.execute(
        update(gpus)
        .where(gpus.c.node_id == node_id, gpus.c.gpu_index.not_in([gpu.index for gpu in seen]))
        .values(removed_at=tx.now)
    )


def _notice_missing(tx: Write, settings: Settings, rows: Sequence[Row[Any]], heartbeat: Heartbeat) -> list[Row[Any]]:
    """Claimed parts that the agent has not known for a while (its folder was wiped, say): they must be ended."""
    overdue = []
    for row in rows:
        if row.state == AttemptNodeState.ALLOCATED:
            continue
        is_missing = row.attempt_id not in heartbeat.attempts and row.attempt_id not in heartbeat.process_sets
        if not is_missing:
            if row.missing_since is not None:
                _set_missing_since(tx, row.id, None)
        elif row.missing_since is None:
            _set_missing_since(tx, row.id, tx.now)
        elif tx.now - row.missing_since > settings.missing_attempt_seconds:
            overdue.append(row)
    return overdue


def _set_missing_since(tx: Write, attempt_node_id: int, value: float | None) -> None:
    tx.connection.execute(
        update(attempt_nodes).where(attempt_nodes.c.id == attempt_node_id).values(missing_since=value)
    )


def _end_missing(tx: Write, settings: Settings, node: Row[Any], row: Row[Any]) -> None:
    lock_job_of(tx, row.attempt_id)
    present = tx.connection.execute(select(attempt_nodes.c.state).where(attempt_nodes.c.id == row.id)).scalar_one()
    if present == AttemptNodeState.ENDED:
        return
    message = f"the agent of {node.name} no longer knows attempt {row.attempt_id} (its folder was removed?)"
    failure = NodeFailure(outcome=Outcome.SUPERVISOR_LOST, message=message, at=tx.now)
    report = NodeReport(ranks=(), failure=failure, stop_intent=None, process_set_empty=True)
    end_attempt_node(tx, row, report=report)
    stop_attempt(
        tx,
        row.attempt_id,
        StopIntent.PEER_FAILURE,
        detail=message,
        settle_seconds=settings.settle_seconds,
    )
    settle_attempt(tx, row.attempt_id)


def _clear_quarantine(tx: Write, node: Row[Any], heartbeat: Heartbeat) -> None:
    """Nothing of an ended attempt runs on the node: its GPUs are clean, save those the agent itself sets aside."""
    rows = tx.connection.execute(
        select(gpus.c.gpu_index, gpus.c.uuid, gpus.c.quarantine_reason).where(
            gpus.c.node_id == node.id, gpus.c.removed_at.is_(None)
        )
    ).all()
    for gpu in rows:
        reason = heartbeat.quarantined.get(gpu.uuid)
        if gpu.quarantine_reason == reason:
            continue
        tx.connection.execute(
            update(gpus)
            .where(gpus.c.node_id == node.id, gpus.c.gpu_index == gpu.gpu_index)
            .values(quarantine_reason=reason)
        )
        text = f"{node.name} GPU {gpu.gpu_index}: {reason or 'proved clean again'}."
        add_event(tx, "gpu_quarantine", actor="node", node_name=node.name, text=text)
        mark_changed(tx, "node", node.id)
