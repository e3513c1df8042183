"""Start an attempt of a waiting job on the GPUs that it was given: the rows of all nodes, or none.

Not for: choosing the GPUs (`service.scheduler`), nor what nodes do with it (`claim_attempt`).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from sqlalchemy import Row, insert

from gangline.protocol.names import node_queue
from gangline.protocol.outcomes import JobState
from service.db.session import Write
from service.db.tables import allocations, attempt_nodes, attempts
from service.db.transitions import add_hint, move_job
from service.domain.states import AttemptNodeState, AttemptState
from service.scheduler.facts import PlacedGang

_INSERT_ATTEMPT = insert(attempts).returning(attempts.c.id)
_INSERT_PART = insert(attempt_nodes).returning(attempt_nodes.c.id)
_INSERT_ALLOCATIONS = insert(allocations)


def start_attempt(tx: Write, job: Row[Any], gang: PlacedGang, epoch: int, node_names: Mapping[int, str]) -> None:
    """The attempt with its part and its GPUs on every node, hints to them, and the job's move.

    `job`: its row, locked, with what the attempt takes from it. Raises StaleTransition when it waits no more,
    IntegrityError when one of the GPUs is held by another attempt.
    """
    layout, shares = gang.layout, gang.shares
    number = job.num_attempts + 1
    attempt_id = tx.connection.execute(
        _INSERT_ATTEMPT,
        {
            "job_id": job.id,
            "number": number,
            "state": AttemptState.ALLOCATED,
            "num_nodes": layout.num_nodes,
            "gpus_per_node": layout.gpus_per_node,
            "processes_per_node": layout.processes_per_node,
            "start_reason": job.start_reason,
            "leader_epoch": epoch,
            "stop_detail": "",
            "stop_grace_seconds": 0.0,
            "directive_version": 1,
            "created_at": tx.now,
        },
    ).scalar_one()
    for node_rank, share in enumerate(shares):
        attempt_node_id = tx.connection.execute(
            _INSERT_PART,
            {
                "attempt_id": attempt_id,
                "node_id": share.node_id,
                "node_rank": node_rank,
                "state": AttemptNodeState.ALLOCATED,
                "is_lost": False,
                "clock_offset_seconds": 0.0,
                "cpus": layout.cpus_per_node,
                "memory_bytes": job.memory_bytes_per_node,
                "created_at": tx.now,
            },
        ).scalar_one()
        if share.gpu_indices:
            tx.connection.execute(
                _INSERT_ALLOCATIONS,
                [
                    {
                        "attempt_node_id": attempt_node_id,
                        "node_id": share.node_id,
                        "gpu_index": index,
                        "allocated_at": tx.now,
                    }
                    for index in share.gpu_indices
                ],
            )
        add_hint(tx, node_queue(node_names[share.node_id]), attempt_id)
    where = ", ".join(
        f"{node_names[share.node_id]} GPU {','.join(map(str, share.gpu_indices)) or '–'}" for share in shares
    )
    # Of a job that always asks for the same, the number goes without saying.
    size = "" if job.layouts is None else f"with {layout.num_gpus} GPU{'' if layout.num_gpus == 1 else 's'} "
    move_job(
        tx,
        job.id,
        JobState.STARTING,
        actor="scheduler",
        text=f"Attempt {number} starts {size}on {where}.",
        attempt_number=number,
        columns={"num_attempts": number, "reason": None, "not_before": None},
    )
