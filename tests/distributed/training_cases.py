"""Cases that run on ranks (`tests.support.ranks`): train through the trainer's own loop and keep what it computed."""

from __future__ import annotations

import dataclasses
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch

from gangline.protocol.pulse import Pulse
from tests.distributed.tasks import TASKS
from trainer import feed
from trainer.assembly import assemble_task
from trainer.data.loader import TrainLoader
from trainer.events import EventWriter
from trainer.loop import Surroundings, Training
from trainer.mesh import Mesh
from trainer.parallel.replicate import ParallelModel
from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.training_plan import RunTarget, TrainingPlan, TrainSettings
from trainer.step import Stepper
from trainer.stop import StopFlag
from trainer.task import TrainTask

Tensors = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Trace:
    """What a run computed."""

    gradients: list[Tensors]
    """Of the first steps, as the optimizer got them, by parameter name."""
    weights: Tensors
    losses: list[float]
    weights_by_step: list[Tensors] = field(default_factory=list)
    """After each step; the reference's only."""


class Recorder(EventWriter):
    """Keeps what is told."""

    def __init__(self) -> None:
        super().__init__(None)
        self.records: list[dict[str, Any]] = []

    def _put(self, record: dict[str, Any], *, is_droppable: bool) -> Any:
        self.records.append(record)
        return super()._put(record, is_droppable=is_droppable)

    def values(self, name: str) -> list[float]:
        """The values of a metric, in order."""
        told = (record["metrics"] for record in self.records if record["kind"] == "progress")
        return [float(metrics[name]) for metrics in told if name in metrics]


def plan_for(task: str, world_size: int, train: TrainSettings, **parallel: Any) -> TrainingPlan:
    """A plan as it is made for a job; `parallel`: fields of the ParallelPlan."""
    return TrainingPlan(
        run=RunTarget(entry=f"tests:{task}"),
        parallel=ParallelPlan(strategy="ddp" if world_size > 1 else "single", dp_replicate=world_size, **parallel),
        train=dataclasses.replace(train, report_every=1),
    )


def train_and_trace(mesh: Mesh, task_name: str, plan: TrainingPlan, num_traced: int) -> Trace:
    """Train to the end of the plan; trace the gradients of the first `num_traced` steps."""
    return trace_task(mesh, TASKS[task_name](), plan, num_traced)


def trace_task(mesh: Mesh, task: TrainTask, plan: TrainingPlan, num_traced: int) -> Trace:
    """As `train_and_trace`, of a task."""
    events = Recorder()
    subject = assemble_task(task, plan, mesh, events, {})
    gradients: list[Tensors] = []

    def note_gradients(*_: Any) -> None:
        if len(gradients) < num_traced:
            found = subject.model.inner.named_parameters()
            gradients.append({name: one.grad.detach().clone() for name, one in found if one.grad is not None})

    subject.optimizer.register_step_pre_hook(note_gradients)
    around = Surroundings(mesh=mesh, events=events, stop=StopFlag({}), pulse=Pulse(None), say=lambda text: None)
    Training(plan, subject, around).run()
    weights = {name: one.detach().clone() for name, one in subject.model.inner.named_parameters()}
    return Trace(gradients=gradients, weights=weights, losses=events.values("loss"))


# --- Planted faults --------------------------------------------------------------------------------------------------


def train_with_fault(mesh: Mesh, task_name: str, plan: TrainingPlan, num_traced: int, fault: str) -> Trace:
    """As `train_and_trace`, with a fault planted into the trainer for this run."""
    with FAULTS[fault]():
        return train_and_trace(mesh, task_name, plan, num_traced)


def _sum_for_mean() -> AbstractContextManager[Any]:
    right = Stepper._weight
    return patch.object(
        Stepper,
        "_weight",
        lambda self, micro, batches, *, is_counted: (
            self._mesh.world_size * right(self, micro, batches, is_counted=is_counted)
        ),
    )


def _mean_of_means() -> AbstractContextManager[Any]:
    return patch.object(
        Stepper, "_weight", lambda self, micro, batches, *, is_counted: 1.0 / len(batches.micro_batches)
    )


def _skipped_all_reduce() -> AbstractContextManager[Any]:
    return patch.object(ParallelModel, "accumulating", lambda self, is_last: self.module.no_sync())


def _no_sync_on_the_last_micro_batch() -> AbstractContextManager[Any]:
    right = ParallelModel.accumulating
    return patch.object(ParallelModel, "accumulating", lambda self, is_last: right(self, not is_last))


def _shard_read_twice() -> AbstractContextManager[Any]:
    def loader_of_rank_0(*arguments: Any, parts_rank: int, **others: Any) -> TrainLoader:
        return TrainLoader(*arguments, parts_rank=0 if parts_rank == 1 else parts_rank, **others)

    return patch.object(feed, "TrainLoader", loader_of_rank_0)


FAULTS = {
    "sum_for_mean": _sum_for_mean,
    "mean_of_means": _mean_of_means,
    "skipped_all_reduce": _skipped_all_reduce,
    "no_sync_on_the_last_micro_batch": _no_sync_on_the_last_micro_batch,
    "shard_read_twice": _shard_read_twice,
}
