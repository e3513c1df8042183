"""What the tests of checkpoints share: a small model, a checkpointer that keeps what it tells, equality of states."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from trainer.checkpoint.checkpointer import Checkpointer, Position
from trainer.checkpoint.layout import step_folder
from trainer.checkpoint.state import flat_state
from trainer.mesh import Mesh
from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.training_plan import CheckpointSettings, ResumePoint, RunTarget, TrainingPlan, TrainSettings

ALONE = Mesh(
    rank=0, local_rank=0, world_size=1, local_world_size=1, node_rank=0, num_nodes=1, device=torch.device("cpu")
)
OPTIMIZERS: dict[str, Callable[[nn.Module], torch.optim.Optimizer]] = {
    "adamw": lambda model: torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1),
    "sgd": lambda model: torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9, dampening=0.1),
    "sgd_plain": lambda model: torch.optim.SGD(model.parameters(), lr=0.01),
}


class Told:
    """Plays the events file and the API that accepts its bytes: each record is 100 bytes long."""

    def __init__(self, *, has_supervisor: bool = False) -> None:
        self.records: list[dict[str, Any]] = []
        self.notes: list[str] = []
        self.accepted: int | None = 0 if has_supervisor else None

    def emit(self, record: dict[str, Any]) -> Callable[[], int | None]:
        self.records.append(record)
        end = 100 * len(self.records)
        return lambda: end

    def accept_all(self) -> None:
        self.accepted = 100 * len(self.records)

    def paths(self, kind: str) -> list[str]:
        return [record["path"] for record in self.records if record["kind"] == kind]


def small_model(seed: int = 0) -> nn.Sequential:
    """With parameters of several shapes, a buffer that counts, and one weight under two names."""
    torch.manual_seed(seed)
    model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 8), nn.Linear(8, 8))
    model[4].weight = model[3].weight
    return model


def train(model: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, *, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(torch.randn(16, 6, generator=generator)).square().mean().backward()
        optimizer.step()


def plan_for(
    root: Path,
    *,
    attempt: int = 1,
    keep: int = 3,
    resume_from: list[tuple[str, int]] | None = None,
    is_shared: bool = True,
) -> TrainingPlan:
    points = None if resume_from is None else tuple(ResumePoint(path=path, step=step) for path, step in resume_from)
    return TrainingPlan(
        run=RunTarget(recipe="mlp"),
        parallel=ParallelPlan(),
        train=TrainSettings(steps=100),
        checkpoint=CheckpointSettings(keep=keep),
        checkpoint_root=str(root),
        checkpoint_subfolder=f"attempt-{attempt}",
        is_checkpoint_root_shared=is_shared,
        resume_from=points,
    )


def checkpointer_for(mesh: Mesh, plan: TrainingPlan, told: Told) -> Checkpointer:
    return Checkpointer(mesh, plan, emit=told.emit, accepted_bytes=lambda: told.accepted, note=told.notes.append)


def at(step: int) -> Position:
    return Position(step=step, samples_seen=16 * step)


def path_of(step: int, attempt: int = 1) -> str:
    return f"attempt-{attempt}/{step_folder(step)}"


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
    """All that a checkpoint holds, as it is now."""
    return {
        key: value.detach().clone() if isinstance(value, torch.Tensor) else dict(value)
        for key, value in flat_state(model, optimizer).items()
    }


def differences(found: dict[str, Any], expected: dict[str, Any]) -> list[str]:
    """Keys that differ in any bit."""
    return sorted(
        key
        for key in found.keys() | expected.keys()
        if key not in found or key not in expected or not _is_same(found[key], expected[key])
    )


def _is_same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return one.dtype == other.dtype and torch.equal(one, other)
    return bool(one == other)


def damage(file: Path, *, at_byte: int) -> None:
    """Flip the bits of one byte; the size stays."""
    data = bytearray(file.read_bytes())
    data[at_byte] ^= 0xFF
    file.write_bytes(data)
