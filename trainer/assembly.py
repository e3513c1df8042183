"""Makes what the loop needs of a plan: task, model on its device, optimizer, data, checkpoints.

Not for: running it (`trainer.loop`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import nn

from gangline.protocol.names import ENV_OFFSETS_FILE
from trainer.checkpoint.checkpointer import Checkpointer
from trainer.choosing import chosen
from trainer.entries import load_task
from trainer.events import EventWriter
from trainer.failure import ConfigError
from trainer.feed import Feed
from trainer.loop import Subject
from trainer.mesh import Mesh
from trainer.optimizers import build_optimizer, separate_kinds
from trainer.parallel.apply import parallelise
from trainer.parallel.axes import lay_out
from trainer.plan.training_plan import TrainingPlan
from trainer.rates import Speedometer, dense_peak_flops
from trainer.seeds import derive, make_deterministic, seed_all
from trainer.task import TrainTask


def assemble(plan: TrainingPlan, mesh: Mesh, events: EventWriter, environment: Mapping[str, str]) -> Subject:
    """Build everything. Runs user code. Raises ConfigError, PlanError and what user code raises."""
    if plan.train.deterministic:
        make_deterministic()
    # An entry may build its model at once, a recipe's is built below: both from the same seed on every rank.
    seed_all(derive(plan.train.seed, "init"))
    return assemble_task(load_task(plan.run), plan, mesh, events, environment)


def assemble_task(
    task: TrainTask, plan: TrainingPlan, mesh: Mesh, events: EventWriter, environment: Mapping[str, str]
) -> Subject:
    """As `assemble`, of a task that is there already."""
    plan = chosen(plan, task, mesh, events)
    axes = lay_out(plan.parallel, mesh)
    feed = Feed(task, plan, mesh, axes)
    _check_same_data(mesh, feed)
    example = feed.example if plan.parallel.pp > 1 else None
    seed_all(derive(plan.train.seed, "init"))
    parallel = parallelise(task, lambda: _model_of(task), plan.parallel, mesh, axes, example)
    optimizer = task.optimizer(parallel.inner) if task.optimizer else build_optimizer(parallel.inner, plan.train)
    separate_kinds(optimizer)
    checkpointer = None
    if plan.checkpoint_root is not None:
        checkpointer = Checkpointer(
            mesh,
            plan,
            names=parallel.names,
            emit=events.emit,
            accepted_bytes=_accepted_bytes(environment),
            note=events.notice,
        )
    name = torch.cuda.get_device_name(mesh.device) if mesh.device.type == "cuda" else ""
    speed = Speedometer(
        tokens_per_sample=task.tokens_per_sample,
        # 6 per parameter and token: 2 forward, 4 backward (Kaplan et al. 2020, section 2.1).
        flops_per_sample=task.flops_per_sample or 6.0 * parallel.num_parameters * (task.tokens_per_sample or 1),
        peak_flops=dense_peak_flops(name),
        world_size=mesh.world_size,
    )
    return Subject(
        plan=plan,
        task=task,
        model=parallel,
        optimizer=optimizer,
        feed=feed,
        checkpointer=checkpointer,
        speed=speed,
    )


def _check_same_data(mesh: Mesh, feed: Feed) -> None:
    """Ranks that count differently would wait for each other: a folder that is still being filled, say."""
    by_rank = mesh.gather(feed.sizes)
    if len(set(by_rank)) > 1:
        told = "; ".join(f"rank {rank}: {train} and {held_out}" for rank, (train, held_out) in enumerate(by_rank))
        raise ConfigError(
            f"the ranks see different data (samples and held-out samples: {told}). Let each build the same dataset."
        )


def _model_of(task: TrainTask) -> nn.Module:
    model = task.model if isinstance(task.model, nn.Module) else task.model()
    if not isinstance(model, nn.Module):
        raise ConfigError(f"the task's model function returned {type(model).__name__}; return a torch.nn.Module.")
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ConfigError("the task's model has no parameter to train (none requires a gradient).")
    return model


def _accepted_bytes(environment: Mapping[str, str]) -> Callable[[], int | None]:
    """How much of rank 0's events the API has accepted; None without a supervisor."""
    path = environment.get(ENV_OFFSETS_FILE)

    def read() -> int | None:
        if not path:
            return None
        try:
            offsets = json.loads(Path(path).read_bytes())
        except FileNotFoundError:
            return 0
        return int(offsets.get("events/0", 0))

    return read
