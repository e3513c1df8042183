"""A job as the API shows it, from its rows. Pure, but for `load_attempts`, which reads the attempts of a page."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from sqlalchemy import Connection, Row, func, select

from gangline.protocol.launch import encode
from service.clock import rfc3339
from service.db.tables import allocations, attempt_nodes, attempts, checkpoints, nodes
from service.domain.gang_layout import layouts_from_json
from service.domain.hold import Hold
from service.domain.progress import Progress
from service.domain.start_time import shown_in_zone
from service.domain.states import AttemptState
from trainer.plan.planning import Planned


class Latest(NamedTuple):
    """What the latest attempts of a job tell about it."""

    attempt: dict[str, Any] | None = None
    """The attempt itself while it is open."""
    progress: Progress | None = None
    size: dict[str, int] | None = None
    """What it has or had; None before the first attempt."""
    ended: dict[str, Any] | None = None
    """The attempt that ended last."""


def job_json(
    row: Any,
    *,
    latest: Latest,
    checkpoint: Row[Any] | None,
    now: float,
    is_insider: bool,
    is_whole: bool,
) -> dict[str, Any]:
    """One job. `is_insider`: may see its inside; `is_whole`: with spec and every rank (not in lists)."""
    cause = json.loads(row.cause) if row.cause else None
    if cause is not None:
        cause.pop("fault", None)
        if not is_insider:
            cause["error"] = None
            cause["sentence"] = f"Ended as {cause['outcome']}."
        if not is_whole:
            cause.pop("ranks", None)
    attempt, progress, size, ended = latest
    return {
        "id": row.id,
        "name": row.name,
        "owner": row.owner,
        "team": row.team,
        "private": row.is_private,
        "state": row.state,
        "submitted_at": rfc3339(row.submitted_at),
        "started_at": rfc3339(row.started_at),
        "ended_at": rfc3339(row.ended_at),
        "resources": resources_json(row.num_nodes, row.gpus_per_node, least_gpus(row.layouts), row.gpu_type),
        "processes_per_node": row.processes_per_node,
        "size": size,
        # All that it may run, extensions included; null: no limit.
        "limit_seconds": row.limit_seconds,
        "preemptible": bool(row.is_preemptible),
        "priority": row.priority,
        **turn_json(row),
        "tags": json.loads(row.tags) if is_insider else {},
        "attempts": row.num_attempts,
        "attempt": attempt,
        "last_attempt": ended,
        "reason": json.loads(row.reason) if row.reason else None,
        "outcome": row.outcome,
        "cause": cause,
        # While it waits for its next attempt, nothing of it makes progress.
        "progress": progress_json(progress, now) if progress and is_insider and row.state != "waiting" else None,
        "checkpoint": newest_checkpoint_json(checkpoint) if checkpoint is not None and is_insider else None,
        # Whether it told how far it is of how much. Not how far: that is its inside.
        "reports_progress": progress is not None and progress.step is not None and progress.total_steps is not None,
        "cost": {"gpu_seconds": round(row.gpu_seconds + (attempt["held_gpu_seconds"] if attempt else 0.0), 3)},
        "version": row.version,
        "spec": json.loads(row.spec) if is_insider and is_whole else None,
    }


def turn_json(row: Any) -> dict[str, Any]:
    """What its owner or an admin said of its turn."""
    hold = Hold.from_json(row.hold_reason)
    held = None
    if hold is not None:
        held = {**asdict(hold), "since": rfc3339(row.submitted_at if hold.since is None else hold.since)}
    shown = None if row.start_after is None else shown_in_zone(row.start_after, row.start_zone or "UTC")
    return {"held": held, "start_after": shown}


def resources_json(num_nodes: int, gpus_per_node: int, min_gpus: int | None, gpu_type: str | None) -> dict[str, Any]:
    """What a job asks for. With a range of GPUs: its largest layout, and from how many on it runs."""
    gpus = num_nodes * gpus_per_node
    return {"nodes": num_nodes, "gpus_per_node": gpus_per_node, "gpus": gpus, "min_gpus": min_gpus, "gpu": gpu_type}


def least_gpus(layouts: str | None) -> int | None:
    """The least GPUs that a job runs on, from its stored layouts; None if it runs on one number only."""
    return None if layouts is None else layouts_from_json(layouts)[-1].num_gpus


def progress_json(progress: Progress, now: float) -> dict[str, Any]:
    """Progress as the API shows it."""
    fraction = None
    if progress.step is not None and progress.total_steps:
        fraction = min(1.0, progress.step / progress.total_steps)
    return {
        "step": progress.step,
        "total_steps": progress.total_steps,
        "fraction": fraction,
        "eta_seconds": progress.eta_seconds(now),
        "phase": progress.phase,
        "checkpoint": progress.checkpoint,
        "metrics": progress.metrics,
        "updated_at": rfc3339(progress.updated_at),
    }


def newest_checkpoint_json(row: Row[Any]) -> dict[str, Any]:
    """The checkpoint that a job would resume from, in short."""
    return {"step": row.step, "samples_seen": row.samples_seen, "accepted_at": rfc3339(row.accepted_at)}


def checkpoint_json(row: Row[Any]) -> dict[str, Any]:
    """A checkpoint as the API shows it, with where it lies. `row` also has the number of its `attempt`."""
    return {
        **newest_checkpoint_json(row),
        "attempt": row.attempt,
        "path": row.path,
        "num_bytes": row.num_bytes,
        "shared_folder_id": row.shared_folder_id,
        "nodes": json.loads(row.node_names),
    }


def plan_json(planned: Planned) -> dict[str, Any]:
    """What was resolved for a training, and what its owner should know about it."""
    plan, parallel, choice = planned.plan, planned.plan.parallel, planned.choice
    return {
        "strategy": parallel.strategy,
        "ranks": parallel.world_size,
        "precision": parallel.precision,
        "grad_accum_steps": parallel.grad_accum_steps,
        "batch_size": plan.train.batch_size,
        "notes": list(plan.notes),
        "parallel": encode(parallel),
        "memory_bytes": None if choice is None else choice.memory.worst.total,
        "why": None if choice is None else choice.why,
        "alternatives": [] if choice is None else [one.text for one in choice.alternatives],
        "lines": list(planned.lines),
    }


def load_newest_checkpoints(connection: Connection, job_ids: Sequence[int]) -> dict[int, Row[Any]]:
    """Per job the checkpoint that it would resume from; jobs without any are not in it."""
    if not job_ids:
        return {}
    rows = connection.execute(
        select(checkpoints)
        .where(checkpoints.c.job_id.in_(job_ids), checkpoints.c.removed_at.is_(None))
        .order_by(checkpoints.c.step, checkpoints.c.id)
    )
    return {row.job_id: row for row in rows}


def load_attempts(connection: Connection, job_ids: Sequence[int], now: float) -> dict[int, Latest]:
    """Per job what its latest attempt tells, and the one before if that is open; jobs without any are not in it."""
    if not job_ids:
        return {}
    latest = (
        select(attempts.c.job_id, func.max(attempts.c.number).label("number"))
        .where(attempts.c.job_id.in_(job_ids))
        .group_by(attempts.c.job_id)
        .subquery()
    )
    rows = connection.execute(
        select(attempts)
        .join(latest, (attempts.c.job_id == latest.c.job_id) & (attempts.c.number >= latest.c.number - 1))
        .order_by(attempts.c.number)
    ).all()
    open_ids = [row.id for row in rows if row.state != AttemptState.ENDED]
    shares = _load_shares(connection, open_ids, now) if open_ids else {}
    last = {row.job_id: row for row in rows}
    ended = {row.job_id: _ended_json(row) for row in rows if row.state == AttemptState.ENDED}
    return {
        job_id: Latest(_attempt_json(row, shares), _progress(row), size_json(row), ended.get(job_id))
        for job_id, row in last.items()
    }


def size_json(row: Any) -> dict[str, int]:
    """The size of an attempt."""
    return {
        "nodes": row.num_nodes,
        "gpus_per_node": row.gpus_per_node,
        "gpus": row.num_nodes * row.gpus_per_node,
        "processes_per_node": row.processes_per_node,
    }


def _progress(row: Row[Any]) -> Progress | None:
    return Progress.from_json(json.loads(row.progress)) if row.progress else None


def _attempt_json(row: Row[Any], shares: dict[int, list[dict[str, Any]]]) -> dict[str, Any] | None:
    if row.state == AttemptState.ENDED:
        return None
    parts = shares.get(row.id, [])
    return {
        "id": row.id,
        "number": row.number,
        "state": row.state,
        "started_at": rfc3339(row.running_at),
        "nodes": [{key: value for key, value in part.items() if key != "held_gpu_seconds"} for part in parts],
        "held_gpu_seconds": round(sum(part["held_gpu_seconds"] for part in parts), 3),
        "stop_reason": row.stop_intent,
        "stop_requested_at": rfc3339(row.stop_requested_at),
    }


def _ended_json(row: Row[Any]) -> dict[str, Any]:
    """`started_at`: when its ranks began to run; None: they never did."""
    return {
        "number": row.number,
        "outcome": row.outcome,
        "started_at": rfc3339(row.running_at),
        "ended_at": rfc3339(row.ended_at),
    }


def _load_shares(connection: Connection, attempt_ids: Sequence[int], now: float) -> dict[int, list[dict[str, Any]]]:
    rows = connection.execute(
        select(
            attempt_nodes.c.id,
            attempt_nodes.c.attempt_id,
            attempt_nodes.c.node_rank,
            attempt_nodes.c.state,
            attempt_nodes.c.created_at,
            nodes.c.name,
            allocations.c.gpu_index,
        )
        .join(nodes, nodes.c.id == attempt_nodes.c.node_id, isouter=True)
        .join(
            allocations,
            (allocations.c.attempt_node_id == attempt_nodes.c.id) & allocations.c.released_at.is_(None),
            isouter=True,
        )
        .where(attempt_nodes.c.attempt_id.in_(attempt_ids))
        .order_by(attempt_nodes.c.attempt_id, attempt_nodes.c.node_rank, allocations.c.gpu_index)
    )
    parts: dict[int, dict[str, Any]] = {}
    by_attempt: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for row in rows:
        if row.id not in parts:
            parts[row.id] = {
                "name": row.name,
                "node_rank": row.node_rank,
                "state": row.state,
                "gpus": [],
                "held_gpu_seconds": 0.0,
            }
            by_attempt[row.attempt_id].append(parts[row.id])
        if row.gpu_index is not None:
            parts[row.id]["gpus"].append(row.gpu_index)
            parts[row.id]["held_gpu_seconds"] += now - row.created_at
    return by_attempt
