"""One optimizer update: forward and backward of micro-batches, every sample (or token) of the step weighing the same.

DDP averages gradients over ranks. So that they come out as one process would have them, a mean over n samples is scaled
by n × ranks / samples of the whole step, which all ranks know beforehand. A loss that is (sum, count) is summed, and
the gradients are divided by the count over all ranks once it is known. A mean of means would be wrong for both as soon
as parts differ in size (huggingface/transformers#37766). Not for: when to step, report or save (`trainer.loop`).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from trainer.data.batches import MicroBatch, StepBatches
from trainer.failure import ConfigError
from trainer.mesh import Mesh
from trainer.parallel.batch_norm import without_samples
from trainer.parallel.replicate import ParallelModel, refuse_unused, unused_parameters
from trainer.task import TrainTask, inputs_of, target_of


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
        autocast: Callable[[], AbstractContextManager[Any]],
        moved: Callable[[], None],
    ) -> None:
        self._task = task
        self._model = model
        self._optimizer = optimizer
        self._mesh = mesh
        self._clip_norm = clip_norm
        self._autocast = autocast
        self._moved = moved
        self._parameters = [one for group in optimizer.param_groups for one in group["params"]]
        self._is_first = True

    def step(self, batches: StepBatches, *, wants_norm: bool) -> StepResult:
        """One update from the micro-batches of this rank. Raises what user code raises, and UnusedParametersError."""
        loss_sum = torch.zeros((), dtype=torch.float64, device=self._mesh.device)
        count = torch.zeros_like(loss_sum)
        is_counted = False
        last = len(batches.micro_batches) - 1
        for index, micro in enumerate(batches.micro_batches):
            with self._model.accumulating(index == last), without_samples(micro.num_samples == 0):
                value, counted = self._loss_of(micro)
                self._moved()
                is_counted = counted is not None
                weight = self._weight(micro, batches, is_counted=is_counted)
                self._check_unused(value)
                # In the precision of the loss: a Python float, not a tensor, keeps its dtype.
                (value * weight).backward()
            # Plain numbers go along with the kernel: a tensor made of one would be copied, and waited for, on a GPU.
            share = float(micro.num_samples) if counted is None else float(micro.num_samples > 0)
            loss_sum += value.detach().to(torch.float64) * share
            if micro.num_samples:
                count += micro.num_samples if counted is None else counted
            self._moved()
        if is_counted:
            self._divide_by_global(count)
        norm = self._clip(wants_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._moved()
        return StepResult(loss_sum=loss_sum, count=count, grad_norm=norm)

    def _loss_of(self, micro: MicroBatch) -> tuple[torch.Tensor, torch.Tensor | float | None]:
        """(mean, None) or (sum, count)."""
        with self._autocast():
            output = call_model(self._task, self._model.module, micro.batch)
            return checked_loss(self._task.loss(output, target_of(micro.batch)))

    def _weight(self, micro: MicroBatch, batches: StepBatches, *, is_counted: bool) -> float:
        if is_counted:
            return float(self._mesh.world_size) if micro.num_samples else 0.0
        return micro.num_samples * self._mesh.world_size / batches.num_samples

    def _check_unused(self, loss: torch.Tensor) -> None:
        """Before the first backward: afterwards ranks would wait for gradients that never come."""
        if self._is_first and self._model.checks_unused:
            refuse_unused(self._mesh, unused_parameters(loss, self._model.inner))
        self._is_first = False

    def _divide_by_global(self, count: torch.Tensor) -> None:
        total = count.clone()
        if self._mesh.world_size > 1:
            dist.all_reduce(total)
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        if gradients:
            # Nothing to count in the whole step: no gradient.
            factor = torch.where(total > 0, 1.0 / total, torch.zeros_like(total))
            torch._foreach_mul_(gradients, factor.to(gradients[0].dtype))

    def _clip(self, wants_norm: bool) -> torch.Tensor | None:
        if self._clip_norm is None and not wants_norm:
            return None
        gradients = [one.grad for one in self._parameters if one.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        if self._clip_norm is not None:
            torch.nn.utils.clip_grads_with_norm_(self._parameters, self._clip_norm, norm)
        return norm.detach()


def call_model(task: TrainTask, model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch, as the task says."""
    return task.forward(model, batch) if task.forward is not None else model(inputs_of(batch))


def checked_loss(value: Any) -> tuple[torch.Tensor, torch.Tensor | float | None]:
    """A loss function's answer as (mean, None) or (sum, count). Raises ConfigError for anything else."""
    loss, count = value if isinstance(value, tuple) and len(value) == 2 else (value, None)
    if not isinstance(loss, torch.Tensor) or loss.numel() != 1:
        what = f"a tensor of shape {tuple(loss.shape)}" if isinstance(loss, torch.Tensor) else type(loss).__name__
        raise ConfigError(f"the task's loss returned {what}; return one value: a mean over the batch, or (sum, count).")
    if count is not None and not isinstance(count, torch.Tensor | int | float):
        raise ConfigError(f"the task's loss returned (sum, {type(count).__name__}); the count must be a number.")
    return loss.reshape(()), count.reshape(()) if isinstance(count, torch.Tensor) else count
