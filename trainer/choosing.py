"""What the ranks choose by themselves: the plan of a job that says `auto` and was not planned before it got its GPUs.

Every rank makes the same model profile and applies the same rules, so all choose alike; rank 0 tells it as an event.
Not for: the rules (`trainer.plan.auto_plan`), jobs that were planned at submission.
"""

from __future__ import annotations

import dataclasses

import torch

from trainer.events import EventWriter
from trainer.failure import ConfigError
from trainer.mesh import Mesh
from trainer.plan.auto_plan import choose_plan
from trainer.plan.estimate import OptimizerKind
from trainer.plan.parallel_plan import RankLayout
from trainer.plan.planned_file import wish_of
from trainer.plan.training_plan import TrainingPlan
from trainer.profile import profile_task
from trainer.task import TrainTask


def chosen(plan: TrainingPlan, task: TrainTask, mesh: Mesh, events: EventWriter) -> TrainingPlan:
    """`plan` with its ways to split decided; as it is where they are. All ranks call it. Raises PlanError when nothing
    fits, ConfigError and what user code raises when there is no profile to be had."""
    if plan.parallel.strategy != "auto":
        return plan
    choice = choose_plan(
        profile_task(task, kernels=mesh.device.type),
        wish_of(plan.parallel),
        RankLayout(num_nodes=mesh.num_nodes, ranks_per_node=mesh.local_world_size),
        gpu_memory_bytes=_least_memory(mesh),
        batch_size=plan.train.batch_size,
        optimizer=OptimizerKind(name="other" if task.optimizer else plan.train.optimizer, momentum=plan.train.momentum),
    )
    plans = mesh.gather(choice.plan)
    other = next((rank for rank, plan_of_rank in enumerate(plans) if plan_of_rank != plans[0]), None)
    if other is not None:
        raise ConfigError(
            f"strategy auto: rank 0 chose {plans[0]}, rank {other} {plans[other]}: they see different models. Let each "
            "rank build the same one, or name a strategy."
        )
    events.notice(f"Strategy auto: {choice.why}")
    for warning in choice.warnings:
        events.notice(warning)
    return dataclasses.replace(plan, parallel=choice.plan)


def _least_memory(mesh: Mesh) -> int | None:
    """Bytes of the smallest GPU of all ranks; None on CPUs, which share theirs."""
    if mesh.device.type != "cuda":
        return None
    own = torch.cuda.get_device_properties(mesh.device).total_memory
    return -int(mesh.max([-float(own)])[0])
