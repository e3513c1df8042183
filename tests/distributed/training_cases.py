"""Cases that run on ranks (`tests.support.ranks`): train through the trainer's own loop and keep what it computed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any
from unittest.mock import patch

import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from gangline.protocol.outcomes import Outcome
from gangline.protocol.pulse import Pulse
from tests.distributed.tasks import TASKS
from trainer import feed
from trainer.assembly import assemble_task
from trainer.data.loader import TrainLoader
from trainer.events import EventWriter
from trainer.loop import Surroundings, Training
from trainer.mesh import Mesh
from trainer.parallel import model, sharding
from trainer.parallel.model import ParallelModel
from trainer.parallel.whole import WholeEngine
from trainer.plan.parallel_plan import ParallelRequest, RankLayout, resolve_parallel
from trainer.plan.training_plan import RunTarget, TrainingPlan, TrainSettings
from trainer.step import _Tally
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
    val_losses: list[float] = field(default_factory=list)
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
    """A plan as it is made for a job; `parallel`: fields of the ParallelRequest."""
    request = ParallelRequest(**{"strategy": "ddp" if world_size > 1 else "single", **parallel})
    layout = RankLayout(num_nodes=1, ranks_per_node=world_size)
    return TrainingPlan(
        run=RunTarget(entry=f"tests:{task}"),
        parallel=resolve_parallel(request, layout).plan,
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
            gradients.append(_by_first_name(subject.model, lambda one: one.grad))

    subject.optimizer.register_step_pre_hook(note_gradients)
    around = Surroundings(mesh=mesh, events=events, stop=StopFlag({}), pulse=Pulse(None), say=lambda text: None)
    Training(subject, around).run()
    weights = _by_first_name(subject.model, lambda one: one)
    return Trace(
        gradients=gradients, weights=weights, losses=events.values("loss"), val_losses=events.values("val_loss")
    )


@dataclass(frozen=True, kw_only=True)
class Stopped:
    """A run that was asked to make room."""

    step: int
    losses: list[float]


class _StopAt(Pulse):
    """Asks to stop once a step is done."""

    def __init__(self, stop: StopFlag, step: int) -> None:
        super().__init__(None)
        self._stop, self._last = stop, step

    def move(self, step: int | None = None, slowest_step_seconds: float | None = None) -> None:
        super().move(step, slowest_step_seconds)
        if step == self._last:
            self._stop.set()


def train_and_stop(mesh: Mesh, task_name: str, plan: TrainingPlan, step: int) -> Stopped:
    """Train until `step`, where all ranks leave with a checkpoint, as a preempted job does."""
    events, stop = Recorder(), StopFlag({})
    subject = assemble_task(TASKS[task_name](), plan, mesh, events, {})
    around = Surroundings(mesh=mesh, events=events, stop=stop, pulse=_StopAt(stop, step), say=lambda text: None)
    ending = Training(subject, around).run()
    assert ending.outcome is Outcome.PREEMPTED, ending
    return Stopped(step=ending.step, losses=events.values("loss"))


def _by_first_name(
    parallel: ParallelModel, value_of: Callable[[torch.nn.Parameter], torch.Tensor | None]
) -> dict[str, torch.Tensor]:
    """What this rank has of each parameter, whole: every rank that shares it must call this."""
    found: Tensors = {}
    for name, parameter in parallel.inner.named_parameters():
        value = value_of(parameter)
        if value is not None:
            kept = value.detach()
            whole = kept.full_tensor() if isinstance(kept, DTensor) else kept.clone()
            found[parallel.names.first_name.get(name, name)] = whole
    return found


# --- Planted faults --------------------------------------------------------------------------------------------------


def train_with_fault(mesh: Mesh, task_name: str, plan: TrainingPlan, num_traced: int, fault: str) -> Trace:
    """As `train_and_trace`, with a fault planted into the trainer for this run."""
    with (FAULTS | SPLIT_FAULTS)[fault]():
        return train_and_trace(mesh, task_name, plan, num_traced)


def _sum_for_mean() -> AbstractContextManager[Any]:
    right = _Tally.weight
    return patch.object(
        _Tally,
        "weight",
        lambda self, micro, *, is_counted: (
            self._model.axes.data_parallel_size * right(self, micro, is_counted=is_counted)
        ),
    )


def _mean_of_means() -> AbstractContextManager[Any]:
    return patch.object(_Tally, "weight", lambda self, micro, *, is_counted: 1.0 / len(self._batches.micro_batches))


def _skipped_all_reduce() -> AbstractContextManager[Any]:
    return patch.object(WholeEngine, "_accumulating", lambda self, is_last: self._module.no_sync())


def _no_sync_on_the_last_micro_batch() -> AbstractContextManager[Any]:
    right = WholeEngine._accumulating
    return patch.object(WholeEngine, "_accumulating", lambda self, is_last: right(self, not is_last))


def _scaled_by_micro_batches_twice() -> AbstractContextManager[Any]:
    right = _Tally.weight
    return patch.object(
        _Tally,
        "weight",
        lambda self, micro, *, is_counted: right(self, micro, is_counted=is_counted) / len(self._batches.micro_batches),
    )


def _stage_gradients_not_reduced() -> AbstractContextManager[Any]:
    return patch.object(model, "average", lambda parameters, group, size: None)


def _default_reshard() -> AbstractContextManager[Any]:
    """What `fully_shard` does unless told otherwise: it reshards all units but the root after forward."""

    def shard_by_default(*arguments: Any, reshard_after_forward: bool, **others: Any) -> Any:
        return fully_shard(*arguments, **others)

    return patch.object(sharding, "fully_shard", shard_by_default)


def _tied_gradients_apart() -> AbstractContextManager[Any]:
    return patch.object(model, "sum_tied", lambda tied: None)


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
"""Of data parallelism."""
SPLIT_FAULTS = {
    "scaled_by_micro_batches_twice": _scaled_by_micro_batches_twice,
    "stage_gradients_not_reduced": _stage_gradients_not_reduced,
    "default_reshard": _default_reshard,
    "tied_gradients_apart": _tied_gradients_apart,
}
"""Of models that are split."""
