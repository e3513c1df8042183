"""One optimizer update: forward and backward of micro-batches, every sample (or token) of the step weighing the same.

Data parallelism averages gradients over its ranks. So that they come out as one process would have them, a mean over n
samples is scaled by n × those ranks / samples of the whole step, which all ranks know beforehand. A loss that is
(sum, count) is summed, and the gradients are divided by the count over all ranks once it is known. A mean of means
would be wrong for both as soon as parts differ in size (huggingface/transformers#37766).

Not for: when to step, report or save (`trainer.loop`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from trainer.data.batches import MicroBatch, StepBatches
from trainer.failure import ConfigError
from trainer.mesh import Mesh
from trainer.parallel.gradients import local_of
from trainer.parallel.model import ParallelModel
from trainer.task import TrainTask, target_of


@dataclass(frozen=True, kw_only=True)
class StepResult:
    """What a step came to. Tensors on the device: nothing waits for a GPU here."""

    loss_sum: torch.Tensor
    """Sum of this rank's losses over what it counts; () float64."""
    count: torch.Tensor
    """What this rank counted: samples, or what the loss counts; () float64."""
    grad_norm: torch.Tensor | None
    """Of the whole gradient before clipping; None when nobody needed it."""


class Stepper:
    """Runs steps of one model. `moved` is called after each part, for the pulse."""

    def __init__(
        self,
        task: TrainTask,
        model: ParallelModel,
        optimizer: torch.optim.Optimizer,
        mesh: Mesh,
        *,
        clip_norm: float | None,
        moved: Callable[[], None],
    ) -> None:
        self._task, self._model, self._optimizer, self._mesh = task, model, optimizer, mesh
        self._clip_norm, self._moved = clip_norm, moved
        self._parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._is_counted: bool | None = None
        """Whether the loss says what it counts; None before the first step."""

    def step(self, batches: StepBatches, *, wants_norm: bool) -> StepResult:
        """One update from the micro-batches of this rank. Raises what user code raises, and UnusedParametersError."""
        tally = _Tally(self._task, self._model, batches, self._mesh.device)
        self._model.accumulate(batches.micro_batches, tally.score, self._moved)
        if self._is_counted is None:
            # A stage of a pipeline that never sees the loss has to be told what it is like.
            self._is_counted = any(self._mesh.gather(tally.is_counted))
        if self._is_counted:
            self._divide_by_global(tally.count)
        norm = self._model.clip(self._parameters, self._clip_norm, wants_norm=wants_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._moved()
        return StepResult(loss_sum=tally.loss_sum, count=tally.count, grad_norm=norm)

    def _divide_by_global(self, count: torch.Tensor) -> None:
        total = count.clone()
        if self._mesh.world_size > 1:
            dist.all_reduce(total)
        gradients = [local_of(one.grad) for one in self._parameters if one.grad is not None]
        if gradients:
            # Nothing to count in the whole step: no gradient.
            factor = torch.where(total > 0, 1.0 / total, torch.zeros_like(total))
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))


class _Tally:
    """Weighs the losses of a step's micro-batches and adds them up."""

    def __init__(self, task: TrainTask, model: ParallelModel, batches: StepBatches, device: torch.device) -> None:
        self._task, self._model, self._batches = task, model, batches
        self.loss_sum = torch.zeros((), dtype=torch.float64, device=device)
        self.count = torch.zeros_like(self.loss_sum)
        self.is_counted = False

    def score(self, output: Any, micro: MicroBatch) -> torch.Tensor:
        """The weighted loss of a micro-batch, to be differentiated. Raises what the task's loss raises."""
        with self._model.autocast():
            value, counted = checked_loss(self._task.loss(output, target_of(micro.batch)))
        self.is_counted = counted is not None
        if self._model.speaks:
            # Plain numbers go along with the kernel: a tensor made of one would be copied, and waited for, on a GPU.
            share = float(micro.num_samples) if counted is None else float(micro.num_samples > 0)
            self.loss_sum += value.detach().to(torch.float64) * share
            if micro.num_samples:
                self.count += micro.num_samples if counted is None else counted
        # In the precision of the loss: a Python float, not a tensor, keeps its dtype.
        return value * self.weight(micro, is_counted=self.is_counted)

    def weight(self, micro: MicroBatch, *, is_counted: bool) -> float:
        """What a loss is multiplied by, so that the mean over data-parallel ranks of the sums is the whole's mean."""
        size = self._model.axes.data_parallel_size
        if is_counted:
            return float(size) if micro.num_samples else 0.0
        return micro.num_samples * size / self._batches.num_samples


def checked_loss(value: Any) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """A loss function's answer as (mean, None) or (sum, count). Raises ConfigError for anything else."""
    loss, count = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ConfigError(f"the task's loss returned {what}; return one value: a mean over the batch, or (sum, count).")
    if count is not None and not isinstance(count, torch.Tensor | int | float):
        raise ConfigError(f"the task's loss returned (sum, {type(count).__name__}); the count must be a number.")
    return loss.reshape(()), count.reshape(()) if isinstance(count, torch.Tensor) else count
