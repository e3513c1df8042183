"""A pipeline whose layers sleep instead of computing, run on ranks through the trainer's own engine.

Busy cores slow each other, so a bubble that is measured with real work on a small machine measures contention.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from trainer.data.batches import MicroBatch
from trainer.mesh import Mesh
from trainer.parallel.apply import parallelise
from trainer.parallel.axes import lay_out
from trainer.plan.parallel_plan import ParallelRequest, RankLayout, resolve_parallel
from trainer.task import TrainTask

WIDTH = 4


@dataclass(frozen=True, kw_only=True)
class StepTimes:
    """One step on one rank, in seconds."""

    whole: float
    busy: float
    """In forward and backward of its stages."""


class _Clock:
    """Adds up how long this rank was busy."""

    busy = 0.0


class _Sleep(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.seconds = seconds
        _rest(seconds)
        return values.view_as(values)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        _rest(ctx.seconds)
        return gradients[0], None


def _rest(seconds: float) -> None:
    begun = time.perf_counter()
    time.sleep(seconds)
    _Clock.busy += time.perf_counter() - begun


class SleepingLayer(nn.Module):
    """A small linear layer that takes `seconds` forward and as long backward."""

    def __init__(self, seconds: float) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.seconds = seconds

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """[samples, WIDTH] to the same shape."""
        result: torch.Tensor = _Sleep.apply(self.linear(values), self.seconds)
        return result


def step_times(
    mesh: Mesh, schedule: str, stages_per_rank: int, micro_batches: int, seconds: float, num_steps: int
) -> list[StepTimes]:
    """Times of `num_steps` steps after one that does not count. Every stage sleeps `seconds` each way."""
    request = ParallelRequest(
        strategy="pipeline", schedule=schedule, stages_per_rank=stages_per_rank, micro_batches=micro_batches
    )
    plan = resolve_parallel(request, RankLayout(num_nodes=1, ranks_per_node=mesh.world_size)).plan
    task = TrainTask(
        model=lambda: nn.Sequential(*(SleepingLayer(seconds) for _ in range(plan.num_stages))),
        loss=lambda output, target: output.sum(),
        data=[],
    )
    torch.manual_seed(0)
    model = parallelise(task, task.model, plan, mesh, lay_out(plan, mesh), torch.zeros(1, WIDTH))
    micros = [MicroBatch(batch=torch.ones(1, WIDTH), num_samples=1) for _ in range(micro_batches)]
    found: list[StepTimes] = []
    for _ in range(num_steps + 1):
        mesh.barrier()
        _Clock.busy, begun = 0.0, time.perf_counter()
        model.accumulate(micros, lambda output, micro: output.sum(), lambda: None)
        mesh.barrier()
        found.append(StepTimes(whole=time.perf_counter() - begun, busy=_Clock.busy))
    return found[1:]
