"""The engine of pipelines: this rank's stages, fed by torch's schedules with the micro-batches of a step.

Every stage gets tensors of the same shape at each micro-batch of a step, so a smaller one beside larger ones (a batch
that does not divide) is filled up with copies of its last sample, and the loss sees the real samples only: its gradient
is that of the unfilled batch, where samples do not see each other (BatchNorm is refused with several micro-batches).
`model` is a pipeline with one micro-batch: the same additions in the same order as one process, so the same bits.

Not for: which layers make a stage (`trainer.parallel.stages`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.distributed.pipelining import PipelineStage, schedules
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from trainer.data.batches import MicroBatch
from trainer.failure import ConfigError
from trainer.parallel.axes import Axes
from trainer.parallel.batch_norm import without_samples
from trainer.parallel.in_place import begins_in_place
from trainer.parallel.model import Score
from trainer.parallel.precision import Autocast
from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.split import rank_of_stage
from trainer.task import inputs_of

SINGLE_STAGE_SCHEDULES: Final = ("GPipe", "1F1B")


@dataclass(frozen=True, kw_only=True)
class Boundary:
    """What goes from one stage to the next, for one sample."""

    shape: torch.Size
    """Without the dimension of the samples."""
    dtype: torch.dtype

    def for_samples(self, num: int) -> torch.Tensor:
        """A tensor of that kind without memory."""
        return torch.empty((num, *self.shape), dtype=self.dtype, device="meta")


class StageBody(nn.Module):
    """What a stage runs: its layers, in the plan's precision; what it hands on is in the boundary's type."""

    def __init__(self, layers: nn.Module, autocast: Autocast, *, is_first: bool, output: Boundary | None) -> None:
        """`output`: None for the last stage."""
        super().__init__()
        self.layers = layers
        self.moved: Callable[[], None] = _do_nothing
        self._autocast, self._is_first, self._output = autocast, is_first, output
        self._begins_in_place = begins_in_place(layers)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[samples, …] to [samples, …]."""
        if not self._is_first:
            values = _Contiguous.apply(values, self._tell)
            if self._begins_in_place:
                values = values.clone()  # autograd lets nobody write over what such a function returns
        with self._autocast():
            result: torch.Tensor = self.layers(values)
        self._tell()
        # It is sent to another rank: gloo and NCCL take what lies in one piece.
        return result if self._output is None else result.to(self._output.dtype).contiguous()

    def _tell(self) -> None:
        self.moved()


class _Contiguous(torch.autograd.Function):
    """The identity, whose gradient is contiguous: it is sent to another rank, and gloo takes no other."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, tell: Callable[[], None]) -> torch.Tensor:
        ctx.tell = tell
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        ctx.tell()
        return gradients[0].contiguous(), None


@dataclass(frozen=True, kw_only=True, eq=False)
class _Scheduled:
    """torch's schedule for micro-batches of one size, with its stages."""

    schedule: Any
    stages: list[PipelineStage]


class PipelineEngine:
    """Runs this rank's stages. All ranks of a pipeline get the same samples."""

    def __init__(
        self,
        bodies: Mapping[int, StageBody],
        boundaries: Sequence[Boundary],
        plan: ParallelPlan,
        axes: Axes,
        *,
        device: torch.device,
        example: torch.Tensor,
    ) -> None:
        """`bodies`: this rank's stages by number. `boundaries`: what leaves each stage of the pipeline (the last one's:
        the model's output). `example`: one sample of the model's input, [1, …], on any device."""
        self._bodies = dict(sorted(bodies.items()))
        self._boundaries = boundaries
        self._plan, self._axes, self._device = plan, axes, device
        self._input = Boundary(shape=example.shape[1:], dtype=example.dtype)
        self._group = axes.group("pp")
        self._score: Score | None = None
        # Whatever a layer raises it would log with a table of the whole schedule; the rank tells it itself.
        logging.getLogger(schedules.__name__).setLevel(logging.CRITICAL)
        self._schedules: dict[int, _Scheduled] = {}
        """By the samples of a micro-batch: there are few sizes, those of a full step and of a smaller last one."""

    @property
    def has_output(self) -> bool:
        """Whether the model's output comes out on this rank."""
        return len(self._boundaries) - 1 in self._bodies

    # --- Training ----------------------------------------------------------------------------------------------------

    def accumulate(self, micro_batches: Sequence[MicroBatch], score: Score, moved: Callable[[], None]) -> None:
        """As `Engine.accumulate`: the schedule once for each `plan.micro_batches` of them."""
        self._score = score
        for body in self._bodies.values():
            body.moved = moved
        for first in range(0, len(micro_batches), self._plan.micro_batches):
            self._run(list(micro_batches[first : first + self._plan.micro_batches]))
            moved()

    def _run(self, micro_batches: list[MicroBatch]) -> None:
        # All ranks of a pipeline have the same micro-batches, and so find the same size.
        num_samples = max(_num_rows(micro) for micro in micro_batches)
        inputs = [self._filled(micro, num_samples) for micro in micro_batches]
        # A schedule that is run for the first time clears the gradients of sharded stages, also those of runs before.
        held = self._held_gradients() if num_samples not in self._schedules else []
        scheduled = self._scheduled(num_samples)
        schedule, stages = scheduled.schedule, scheduled.stages
        # What `schedule.step` does, but with micro-batches as they are: it would cut a batch into equal parts.
        for stage in stages:
            stage.has_backward = True
            stage.clear_runtime_states()
        arguments = [(values,) if 0 in self._bodies else () for values in inputs]
        is_idle = all(micro.num_samples == 0 for micro in micro_batches)
        try:
            with without_samples(is_idle):
                schedule._step_microbatches(arguments, None, micro_batches, None, return_outputs=False)
        except RuntimeError as error:
            # torch wraps what a layer raises; the user's own error is what they can act on.
            if isinstance(error.__cause__, Exception) and "failed to run" in str(error).lower():
                raise error.__cause__ from None
            raise
        for parameter, gradient in held:
            parameter.grad = gradient if parameter.grad is None else gradient + parameter.grad

    def _held_gradients(self) -> list[tuple[nn.Parameter, torch.Tensor]]:
        """Taken out of the parameters of sharded stages; the gradients of others stay where they are."""
        held: dict[nn.Parameter, torch.Tensor] = {}
        for body in self._bodies.values() if self._plan.dp_shard > 1 else ():
            for parameter in body.parameters():
                if parameter.grad is not None:
                    held[parameter], parameter.grad = parameter.grad, None
        return list(held.items())

    def _loss(self, output: torch.Tensor, micro: MicroBatch) -> torch.Tensor:
        assert self._score is not None, "a schedule runs inside accumulate"
        return self._score(output[: _num_rows(micro)], micro)

    def _filled(self, micro: MicroBatch, num_samples: int) -> torch.Tensor:
        """The micro-batch's input, as many samples as the largest one beside it has."""
        values = checked_input(micro.batch)
        if values.shape[1:] != self._input.shape or values.dtype != self._input.dtype:
            raise ConfigError(
                f"a batch of the training data is {_told(values)} per sample, the first was {self._input.dtype} "
                f"{list(self._input.shape)}. A pipeline needs samples of one shape: pad or cut them."
            )
        missing = num_samples - values.shape[0]
        return values if missing == 0 else torch.cat([values, values[-1:].expand(missing, *values.shape[1:])])

    def _scheduled(self, num_samples: int) -> _Scheduled:
        if num_samples not in self._schedules:
            self._schedules[num_samples] = self._make_schedule(num_samples)
        return self._schedules[num_samples]

    def _make_schedule(self, num_samples: int) -> _Scheduled:
        last = len(self._boundaries) - 1
        stages = [
            PipelineStage(
                body,
                number,
                last + 1,
                self._device,
                input_args=self._received(number, num_samples).requires_grad_(number > 0),
                output_args=self._boundaries[number].for_samples(num_samples).requires_grad_(),
                group=self._group,
            )
            for number, body in self._bodies.items()
        ]
        made: Any = get_schedule_class(self._plan.schedule)
        first: Any = stages if issubclass(made, PipelineScheduleMulti) else stages[0]
        schedule = made(first, self._plan.micro_batches, loss_fn=self._loss, scale_grads=False)
        return _Scheduled(schedule=schedule, stages=stages)

    def _received(self, number: int, num_samples: int) -> torch.Tensor:
        """What a stage takes, without memory."""
        boundary = self._input if number == 0 else self._boundaries[number - 1]
        return boundary.for_samples(num_samples)

    # --- Evaluation --------------------------------------------------------------------------------------------------

    def predict(self, batch: Any) -> torch.Tensor | None:
        """As `Engine.predict`: a batch of any size goes through all stages; the last stage's rank has the output."""
        values: torch.Tensor | None = None
        inputs = checked_input(batch)
        for number, body in self._bodies.items():
            if number == 0:
                taken = inputs
            elif number - 1 in self._bodies:
                assert values is not None, "this rank ran the stage before"
                taken = values
            else:
                taken = self._receive(number, inputs.shape[0])
            values = body(taken)
            if number < len(self._boundaries) - 1 and number + 1 not in self._bodies:
                self._send(number, values)
        return values if self.has_output else None

    def _receive(self, number: int, num_samples: int) -> torch.Tensor:
        boundary = self._boundaries[number - 1]
        values = torch.empty((num_samples, *boundary.shape), dtype=boundary.dtype, device=self._device)
        dist.recv(values, src=self._rank_of(number - 1), group=self._group)
        return values

    def _send(self, number: int, values: torch.Tensor) -> None:
        if values.shape[1:] != self._boundaries[number].shape:
            raise ConfigError(
                f"held-out samples are {_told(values)} between stages, training samples "
                f"{list(self._boundaries[number].shape)}. A pipeline needs samples of one shape: pad or cut them."
            )
        dist.send(values.contiguous(), dst=self._rank_of(number + 1), group=self._group)

    def _rank_of(self, number: int) -> int:
        return dist.get_global_rank(self._group, rank_of_stage(self._plan, number))


def checked_input(batch: Any) -> torch.Tensor:
    """The one tensor that the first layer takes. Raises ConfigError."""
    values = inputs_of(batch)
    if not isinstance(values, torch.Tensor) or values.dim() == 0:
        raise ConfigError(
            "a pipeline's input must be one tensor with the samples in its first dimension, not "
            f"{type(values).__name__}. Let the dataset return (input, target), or use another strategy."
        )
    return values


def _num_rows(micro: MicroBatch) -> int:
    return checked_input(micro.batch).shape[0]


def _told(values: torch.Tensor) -> str:
    return f"{values.dtype} {list(values.shape[1:])}"


def _do_nothing() -> None:
    return None
