"""An entry whose training goes wrong as it is told. It is copied into a job's code, so it needs the trainer alone."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import Dataset

from trainer.task import TrainTask

RANK = int(os.environ.get("RANK", "0"))


class Samples(Dataset[tuple[torch.Tensor, torch.Tensor]]):
    """Samples that take `seconds` each to load, and on rank `rank` do `fault` at the `at`-th."""

    def __init__(self, length: int, seconds: float = 0.0, fault: str = "", rank: int = -1, at: int = 0) -> None:
        self.length, self.seconds = length, seconds
        self.fault = fault if rank == RANK else ""
        self.at, self.num_read = at, 0

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        self.num_read += 1
        if self.num_read == self.at:
            misbehave(self.fault)
        if self.seconds:
            time.sleep(self.seconds)
        generator = torch.Generator().manual_seed(index)
        inputs = torch.randn(8, generator=generator)
        return inputs, (inputs.sum() > 0).long()


def misbehave(fault: str) -> None:
    """What goes wrong."""
    if fault == "raise":
        raise ValueError("the sample cannot be decoded")
    if fault == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    if fault == "hang":
        time.sleep(3600)
    if fault == "stop":
        os.kill(os.getpid(), signal.SIGSTOP)
    if fault == "allocate":
        held = [torch.ones(16, 1 << 20) for _ in range(1 << 12)]
        raise AssertionError(f"{len(held)} allocations fitted")


def build(
    fault: str = "",
    rank: int = 0,
    at: int = 40,
    length: int = 4000,
    seconds: float = 0.0,
    eval_length: int = 0,
    eval_seconds: float = 0.0,
) -> TrainTask:
    """A small classifier. `fault` happens on one rank: raise, kill, hang, stop or allocate as it loads its `at`-th
    sample, or nan in its `at`-th loss."""
    calls = 0

    def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        nonlocal calls
        calls += 1
        value = nn.functional.cross_entropy(output, target)
        return value * float("nan") if fault == "nan" and rank == RANK and calls == at else value

    return TrainTask(
        model=lambda: nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 2)),
        loss=loss,
        data=Samples(length, seconds, fault, rank, at),
        eval_data=Samples(eval_length, eval_seconds) if eval_length else None,
    )


def no_task() -> str:
    """Returns something else."""
    return str(Path.cwd())
