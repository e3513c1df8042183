"""A node claims its part of an attempt, with a token that it made itself; the answer is the launch plan.

The same token again gets the same answer, so a lost answer strands nothing.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from sqlalchemy import Row, func, select

from gangline.protocol.launch import AssignedGPU, CodeSource, LaunchPlan, NodeFailure, NodeReport, RunPlan, encode
from gangline.protocol.outcomes import JobState, Outcome, StopIntent
from service.auth.tokens import hash_token
from service.db.session import Database, Write
from service.db.tables import allocations, attempt_nodes, attempts, gpus, jobs
from service.db.transitions import StaleTransition, move_attempt, move_attempt_node
from service.domain.spec import JobSpec
from service.domain.states import AttemptNodeState, AttemptState
from service.errors import AlreadyClaimed, NotAssigned
from service.operations.accept_checkpoints import choose_start, resume_points, subfolder_of
from service.operations.job_lock import lock_job_of
from service.operations.settle_attempt import end_attempt_node, settle_attempt
from service.operations.stop_attempt import stop_attempt
from service.settings import Settings
from trainer.plan.parallel_plan import RankLayout
from trainer.plan.planning import plan_on
from trainer.plan.problem import PlanError
from trainer.plan.training_plan import TrainingPlan, TrainingSpec


def claim_attempt(
    database: Database,
    settings: Settings,
    pool_id: str,
    node: Row[Any],
    attempt_id: int,
    *,
    token: str,
    incarnation: str,
) -> LaunchPlan:
    """Claim for `node`. Raises NotAssigned (ended, stopping or somebody else's) and AlreadyClaimed (other token).

    A training that this version cannot plan (it was submitted to another) ends as a config error.
    """
    try:
        with database.write() as tx:
            return _claim_part(tx, settings, pool_id, node, attempt_id, hash_token(token), incarnation)
    except PlanError as error:
        # A version that could run it took the job. Nothing is claimed; without this it would be tried for ever.
        _end_unplannable(database, settings, node, attempt_id, error)
        raise NotAssigned(f"attempt {attempt_id} cannot be planned: {error}") from error


def _claim_part(
    tx: Write, settings: Settings, pool_id: str, node: Row[Any], attempt_id: int, token_hash: str, incarnation: str
) -> LaunchPlan:
    lock_job_of(tx, attempt_id)
    row = tx.connection.execute(
        select(attempt_nodes)
        .where(attempt_nodes.c.attempt_id == attempt_id, attempt_nodes.c.node_id == node.id)
        .with_for_update()
    ).one_or_none()
    if row is None or row.state == AttemptNodeState.ENDED:
        raise NotAssigned(f"attempt {attempt_id} is not, or no longer, assigned to {node.name}")
    attempt = tx.connection.execute(select(attempts).where(attempts.c.id == attempt_id).with_for_update()).one()
    job = tx.connection.execute(select(jobs).where(jobs.c.id == attempt.job_id)).one()
    spec = JobSpec.from_json(job.spec)
    if row.state == AttemptNodeState.ALLOCATED:
        if attempt.state not in (AttemptState.ALLOCATED, AttemptState.LAUNCHING) or job.state != JobState.STARTING:
            raise NotAssigned(f"attempt {attempt_id} is {attempt.state}")
        _claim(tx, row, attempt, token_hash, incarnation)
        if attempt.resume_from is None and spec.training is not None:
            choose_start(tx, attempt_id, job.id)
            attempt = tx.connection.execute(select(attempts).where(attempts.c.id == attempt_id)).one()
    elif row.token_hash != token_hash:
        raise AlreadyClaimed(f"attempt {attempt_id} on {node.name} was claimed with another token")
    return _launch_plan(tx, settings, pool_id, node, row, attempt, job, spec)


def _end_unplannable(database: Database, settings: Settings, node: Row[Any], attempt_id: int, error: PlanError) -> None:
    """End the node's unclaimed part, and with it the job, by what keeps it from being planned."""
    with database.write() as tx:
        lock_job_of(tx, attempt_id)
        row = tx.connection.execute(
            select(attempt_nodes).where(
                attempt_nodes.c.attempt_id == attempt_id,
                attempt_nodes.c.node_id == node.id,
                attempt_nodes.c.state == AttemptNodeState.ALLOCATED,
            )
        ).one_or_none()
        if row is None:
            return
        failure = NodeFailure(
            outcome=Outcome.CONFIG_ERROR, message=f"it cannot be planned on its GPUs: {error}", at=tx.now
        )
        end_attempt_node(
            tx, row, report=NodeReport(ranks=(), failure=failure, stop_intent=None, process_set_empty=True)
        )
        stop_attempt(tx, attempt_id, StopIntent.PEER_FAILURE, detail=str(error), settle_seconds=settings.settle_seconds)
        settle_attempt(tx, attempt_id)


def _claim(tx: Write, row: Row[Any], attempt: Row[Any], token_hash: str, incarnation: str) -> None:
    try:
        move_attempt_node(
            tx,
            row.id,
            AttemptNodeState.CLAIMED,
            columns={"token_hash": token_hash, "incarnation": incarnation, "claimed_at": tx.now},
        )
        if attempt.state == AttemptState.ALLOCATED:
            move_attempt(tx, attempt.id, AttemptState.LAUNCHING)
    except StaleTransition as stale:
        raise NotAssigned(str(stale)) from stale


def _launch_plan(
    tx: Write,
    settings: Settings,
    pool_id: str,
    node: Row[Any],
    row: Row[Any],
    attempt: Row[Any],
    job: Row[Any],
    spec: JobSpec,
) -> LaunchPlan:
    assigned = tx.connection.execute(
        select(gpus.c.gpu_index, gpus.c.uuid, gpus.c.kind)
        .join(allocations, (allocations.c.node_id == gpus.c.node_id) & (allocations.c.gpu_index == gpus.c.gpu_index))
        .where(allocations.c.attempt_node_id == row.id, allocations.c.released_at.is_(None))
        .order_by(gpus.c.gpu_index)
    ).all()
    disconnect_stop = None
    if spec.on_disconnect == "stop":
        disconnect_stop = disconnect_stop_seconds(settings, spec.stop_grace_seconds)
    return LaunchPlan(
        attempt_id=attempt.id,
        job_id=job.id,
        job_name=job.name,
        attempt_number=attempt.number,
        pool_id=pool_id,
        node_name=node.name,
        node_rank=row.node_rank,
        num_nodes=attempt.num_nodes,
        node_address=node.address,
        processes_per_node=attempt.processes_per_node,
        first_rank=row.node_rank * attempt.processes_per_node,
        world_size=attempt.num_nodes * attempt.processes_per_node,
        gpus=tuple(AssignedGPU(index=gpu.gpu_index, uuid=gpu.uuid, kind=gpu.kind) for gpu in assigned),
        cpus=row.cpus,
        memory_bytes=row.memory_bytes or None,
        run=RunPlan(
            kind=spec.run.kind,
            script=spec.run.script,
            args=spec.run.args,
            command=spec.run.command,
            shell=spec.run.shell,
        ),
        code=CodeSource(bundle=spec.code.bundle, path=spec.code.path),
        python=spec.python,
        env=dict(spec.env),
        time_limit_seconds=job.limit_seconds,
        stop_grace_seconds=spec.stop_grace_seconds,
        start_timeout_seconds=settings.start_seconds,
        disconnect_stop_seconds=disconnect_stop,
        gather_seconds=settings.gather_seconds,
        start_reason=attempt.start_reason,
        training=None if spec.training is None else encode(_training_plan(tx, spec.training, attempt)),
        shared_folder_id=attempt.shared_folder_id,
    )


def _training_plan(tx: Write, training: TrainingSpec, attempt: Row[Any]) -> TrainingPlan:
    """The plan file for the GPUs of this attempt, but for the folders that only the node knows."""
    layout = RankLayout(num_nodes=attempt.num_nodes, ranks_per_node=attempt.processes_per_node)
    return replace(
        plan_on(training, layout, gpu_memory_bytes=_least_gpu_memory(tx, attempt.id)).plan,
        checkpoint_subfolder=subfolder_of(attempt.id),
        is_checkpoint_root_shared=attempt.shared_folder_id is not None,
        resume_from=resume_points(attempt.resume_from),
    )


def _least_gpu_memory(tx: Write, attempt_id: int) -> int | None:
    """Memory of the attempt's smallest GPU, over all nodes, so that each of them plans the same; None on CPU slots."""
    smallest = tx.connection.execute(
        select(func.min(gpus.c.memory_bytes))
        .join(allocations, (allocations.c.node_id == gpus.c.node_id) & (allocations.c.gpu_index == gpus.c.gpu_index))
        .join(attempt_nodes, attempt_nodes.c.id == allocations.c.attempt_node_id)
        .where(attempt_nodes.c.attempt_id == attempt_id)
    ).scalar_one()
    return smallest or None


def disconnect_stop_seconds(settings: Settings, grace_seconds: float) -> float:
    """When a cut-off supervisor stops its ranks by itself: early enough to be done before the node is called lost."""
    margin = settings.lost_seconds * 0.1
    return settings.lost_seconds - grace_seconds - margin
