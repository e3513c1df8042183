"""Restoring with all ranks: the newest checkpoint that every one of them can use, or the reason why there is none.

Not for: reading one (`restoring`), or which ones a job may resume from (the API).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import nn
from torch.optim import Optimizer

from trainer.checkpoint.errors import CheckpointMismatch, NoUsableCheckpoint
from trainer.checkpoint.layout import BrokenCheckpoint, Position, list_checkpoints, read_manifest, verify
from trainer.checkpoint.restoring import find_mismatch, load_own_state
from trainer.checkpoint.retention import Retention
from trainer.checkpoint.state import GlobalNames, apply_state, group_conflict, model_values, optimizer_names
from trainer.mesh import Mesh
from trainer.plan.training_plan import ResumePoint, TrainingPlan


@dataclass(frozen=True, kw_only=True)
class Restored:
    """The checkpoint that a training continues from."""

    position: Position
    path: str
    """Relative to the root."""
    world_size: int
    """Ranks that saved it."""


@dataclass(frozen=True, kw_only=True)
class Target:
    """What is restored on this rank: the part of the model that is here, and its optimizer."""

    model: nn.Module
    optimizer: Optimizer
    names: GlobalNames
    """Of the whole model."""

    def parameters(self) -> set[str]:
        """First name of each of the optimizer's parameters. Raises ConfigError."""
        return {self.names.first(name) for name in optimizer_names(model_values(self.model), self.optimizer)}


@dataclass(frozen=True, kw_only=True)
class _Read:
    """What a rank got out of a checkpoint, or why it got nothing."""

    state: dict[str, Any] | None = None
    problem: str | None = None
    """The checkpoint is unusable: the next one is tried."""
    mismatch: str | None = None
    """It is another model's: an error."""


class Restorer:
    """Tries a job's checkpoints for one rank, together with the others."""

    def __init__(
        self, mesh: Mesh, plan: TrainingPlan, root: Path, retention: Retention, note: Callable[[str], None]
    ) -> None:
        self._mesh = mesh
        self._plan = plan
        self._root = root
        self._retention = retention
        self._note = note

    def restore(self, target: Target) -> Restored | None:
        """See `Checkpointer.restore`."""
        candidates = self._candidates()
        self._retention.start([point.path for point in reversed(candidates)])
        optimized = {name for own in self._mesh.gather(target.parameters()) for name in own} if candidates else set()
        reasons: list[str] = []
        for point in candidates:
            reason, restored = self._try(point, target, optimized)
            if restored is not None:
                return restored
            reasons.append(f"{point.path} {reason}")
            self._retention.mark_broken(point.path)
            if self._mesh.is_leader:
                self._note(f"Checkpoint {point.path} was skipped: it {reason}")
        if reasons:
            raise NoUsableCheckpoint(reasons)
        return None

    def _candidates(self) -> list[ResumePoint]:
        if self._plan.resume_from is not None:
            return list(self._plan.resume_from)
        found = [ResumePoint(path=one.path, step=one.step) for one in list_checkpoints(self._root)]
        listed: list[ResumePoint] = self._mesh.gather(found if self._mesh.is_leader else None)[0]
        return listed

    def _try(self, point: ResumePoint, target: Target, optimized: set[str]) -> tuple[str, Restored | None]:
        folder = self._root / point.path
        broken = _first(self._mesh.gather(self._why_broken(folder, point)))
        if broken is not None:
            return broken, None
        read = _read(folder, target, optimized)
        outcomes = self._mesh.gather((read.mismatch, read.problem))
        mismatch = _first([one[0] for one in outcomes])
        if mismatch is not None:
            raise CheckpointMismatch(
                f"the job cannot resume from {point.path}: {mismatch}. Train the model and optimizer that saved it, or "
                "submit the job anew to start from nothing."
            )
        problem = _first([one[1] for one in outcomes])
        if problem is not None or read.state is None:
            return problem or "is unusable.", None
        apply_state(read.state, target.model, target.optimizer)
        manifest = read_manifest(folder)
        return "", Restored(position=manifest.position, path=point.path, world_size=manifest.world_size)

    def _why_broken(self, folder: Path, point: ResumePoint) -> str | None:
        mesh = self._mesh
        is_shared = self._plan.is_checkpoint_root_shared
        part, parts = (mesh.rank, mesh.world_size) if is_shared else (mesh.local_rank, mesh.local_world_size)
        try:
            manifest = verify(folder, part, parts)
        except BrokenCheckpoint as broken:
            return str(broken)
        if manifest.position.step != point.step:
            return f"holds step {manifest.position.step}, not {point.step}."
        return None


def _read(folder: Path, target: Target, optimized: set[str]) -> _Read:
    try:
        mismatch = find_mismatch(read_manifest(folder), target.model, target.optimizer, target.names, optimized)
        if mismatch is not None:
            return _Read(mismatch=mismatch)
        state = load_own_state(folder, target.model, target.optimizer, target.names)
    except BrokenCheckpoint as broken:
        return _Read(problem=str(broken))
    return _Read(state=state, mismatch=group_conflict(state, target.model, target.optimizer))


def _first(problems: Sequence[str | None]) -> str | None:
    """The problem of the lowest rank that has one, with the rank unless that is 0; None: nobody has."""
    for rank, problem in enumerate(problems):
        if problem is not None:
            return problem if rank == 0 else f"{problem} (Seen by rank {rank}.)"
    return None
