"""How long a checkpoint makes the step wait: the trainer's own checkpointer, synchronous and asynchronous in turns.

Runs on a rank (`tests.support.ranks`). Not for: figures (`ratios`), or whether what is written is right.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import nn

from tests.bench.support.ratios import turn_order
from trainer.checkpoint.checkpointer import Checkpointer, Position
from trainer.mesh import Mesh
from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.training_plan import CheckpointSettings, RunTarget, TrainingPlan, TrainSettings

SYNC, ASYNC = "sync", "async"
WIDTH: Final = 2_048
BYTES_PER_PARAMETER: Final = 12
"""float32 weight and AdamW's two moments."""


@dataclass(frozen=True, kw_only=True)
class BlockingTimes:
    """Seconds that saves blocked, one of each kind per turn."""

    sync_seconds: list[float]
    async_seconds: list[float]
    num_bytes: int
    """On disk, of one checkpoint."""


def blocking_times(mesh: Mesh, num_bytes: int, num_turns: int, folder: str) -> BlockingTimes:
    """Save a model and its AdamW of about `num_bytes` together, `num_turns` times in each way, in turns.

    One of each comes first and does not count: files, page cache and the memory of copies are warm then.
    """
    model, optimizer = _trained(num_bytes)
    announced: list[int] = []
    plan = TrainingPlan(
        run=RunTarget(entry="bench:model"),
        parallel=ParallelPlan(),
        train=TrainSettings(steps=1),
        checkpoint=CheckpointSettings(keep=1),
        checkpoint_root=folder,
    )

    def note_event(record: dict[str, object]) -> object:
        if record["kind"] == "checkpoint":
            announced.append(int(str(record["num_bytes"])))
        return lambda: None

    checkpointer = Checkpointer(
        mesh,
        plan,
        emit=note_event,  # type: ignore[arg-type]  # the offsets of a file that is not there
        accepted_bytes=lambda: None,
        note=lambda text: None,
    )
    took: dict[str, list[float]] = {SYNC: [], ASYNC: []}
    step = 0
    for turn in range(num_turns + 1):
        for kind in turn_order((SYNC, ASYNC), turn):
            step += 1
            position = Position(step=step, samples_seen=step)
            took[kind].append(checkpointer.save(model, optimizer, position, is_async=kind == ASYNC))
            checkpointer.wait()
    checkpointer.close()
    if len(announced) != step:
        raise RuntimeError(f"{len(announced)} of {step} checkpoints were completed, so their times mean nothing")
    return BlockingTimes(sync_seconds=took[SYNC][1:], async_seconds=took[ASYNC][1:], num_bytes=announced[-1])


def _trained(num_bytes: int) -> tuple[nn.Module, torch.optim.Optimizer]:
    """A model of square layers and an AdamW that has made a step."""
    num_layers = max(1, round(num_bytes / (BYTES_PER_PARAMETER * WIDTH**2)))
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num_layers)))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 1e-3)
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer
