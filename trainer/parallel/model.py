"""`ParallelModel`: this rank's part of a model as a plan made it, and the two things a loop does with it: forward and
backward of a step's micro-batches, and forward alone. What has to be exchanged between ranks is exchanged inside.

Not for: making one (`trainer.parallel.apply`), what a loss weighs (`trainer.step`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from trainer.checkpoint.state import GlobalNames
from trainer.data.batches import MicroBatch
from trainer.mesh import Mesh
from trainer.parallel.axes import Axes
from trainer.parallel.gradients import TiedWeight, average, clip, sum_tied, total_norm
from trainer.parallel.precision import Autocast
from trainer.task import TrainTask, inputs_of

Score = Callable[[Any, MicroBatch], torch.Tensor]
"""(output, micro-batch) to the loss that is differentiated: one value, weighted already."""


class Engine(Protocol):
    """How forward and backward run."""

    def accumulate(self, micro_batches: Sequence[MicroBatch], score: Score, moved: Callable[[], None]) -> None:
        """Add the gradients of all micro-batches to `.grad`, exchanged as far as the engine does it by itself. `score`
        is called where the output is, `moved` after each part, for the pulse. Raises what user code raises."""

    def predict(self, batch: Any) -> Any:
        """The model's output for a batch, without gradients and in whatever mode the modules are; None on ranks that do
        not have it. All ranks that share a copy call it for the same batches."""


@dataclass(frozen=True, kw_only=True, eq=False)
class ParallelModel:
    """This rank's part of a model."""

    inner: nn.Module
    """The part under the model's own names: for checkpoints, the optimizer, training and evaluation mode."""
    engine: Engine
    axes: Axes
    autocast: Autocast
    """What a loss is computed under."""
    names: GlobalNames
    """Of the whole model."""
    num_parameters: int
    """Of the whole model."""
    averages_itself: bool = False
    """Whether gradients are averaged over `dp_replicate` here: neither DDP nor FSDP does."""
    speaks: bool = True
    """Whether this rank is the one that tells the loss of its part of the data: several ranks work on the same part."""
    is_forward_shared: bool = False
    """Whether forward needs other ranks too, so that all must call it equally often."""
    tied: tuple[TiedWeight, ...] = ()

    def accumulate(self, micro_batches: Sequence[MicroBatch], score: Score, moved: Callable[[], None]) -> None:
        """Gradients of all micro-batches, averaged over data-parallel ranks, into `.grad`."""
        self.engine.accumulate(micro_batches, score, moved)
        if self.averages_itself:
            average(self.inner.parameters(), self.axes.group("dp_replicate"), self.axes.dp_replicate)
        if self.tied:
            sum_tied(self.tied)

    def predict(self, batch: Any) -> Any:
        """The model's output for a batch; None where it is on another rank. All ranks that share a copy call it."""
        return self.engine.predict(batch)

    def clip(
        self, parameters: Sequence[nn.Parameter], max_norm: float | None, *, wants_norm: bool
    ) -> torch.Tensor | None:
        """Norm of the whole gradient before clipping; None when nobody needs it. All ranks call it."""
        if max_norm is None and not wants_norm:
            return None
        norm = total_norm(parameters, self.tied, self.axes)
        if max_norm is not None:
            clip(parameters, max_norm, norm)
        return norm.detach()

    def rest(self) -> None:
        """Give back what FSDP gathered for a forward without a backward."""
        for module in self.inner.modules():
            if isinstance(module, FSDPModule):
                module.reshard()

    def share_buffers(self, mesh: Mesh) -> None:
        """Give ranks that hold the same part the buffers of the first of them (BatchNorm statistics, say), before they
        are evaluated with or saved."""
        if mesh.world_size == 1 or self.axes.data_parallel_size == 1:
            return
        for buffer in self.inner.buffers():
            if buffer.numel():
                # NCCL takes contiguous tensors only.
                shared = buffer.contiguous()
                dist.broadcast(shared, src=self.axes.data_group_source(), group=self.axes.data_group)
                if shared is not buffer:
                    buffer.copy_(shared)


def call_model(task: TrainTask, model: nn.Module, batch: Any) -> Any:
    """The model's output for a batch, as the task says."""
    return task.forward(model, batch) if task.forward is not None else model(inputs_of(batch))
