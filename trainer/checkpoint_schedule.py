"""When a checkpoint is due, and which one is in flight. Every rank decides the same from what all of them know.

Not for: writing one (`trainer.checkpoint`).
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import nn

from trainer.checkpoint.checkpointer import Checkpointer, Position, Restored
from trainer.mesh import Mesh
from trainer.plan.training_plan import CheckpointSettings


class CheckpointSchedule:
    """Drives a `Checkpointer`. `checkpointer` None: this training keeps none, and every call does nothing."""

    def __init__(
        self, checkpointer: Checkpointer | None, settings: CheckpointSettings, mesh: Mesh, say: Callable[[str], None]
    ) -> None:
        self._checkpointer = checkpointer
        self._settings = settings
        self._mesh = mesh
        self._say = say
        self._saved_step = 0
        self._saved_at = time.perf_counter()
        self._is_announced = True

    @property
    def is_finished(self) -> bool:
        """Whether the one in flight is complete, as far as this rank's copy goes."""
        checkpointer = self._checkpointer
        if checkpointer is None or self._is_announced:
            return False
        return checkpointer.finished_or_failed >= self._saved_step

    @property
    def has_failed(self) -> bool:
        """Whether the one in flight failed here."""
        return self._checkpointer is not None and self._checkpointer.finished_or_failed < 0

    def restore(self, model: nn.Module, optimizer: torch.optim.Optimizer) -> Restored | None:
        """Load the newest checkpoint that can be used; None when there is none to resume from."""
        if self._checkpointer is None:
            return None
        restored = self._checkpointer.restore(model, optimizer)
        if restored is not None:
            self._saved_step = restored.position.step
        self.restart_clock()
        return restored

    def restart_clock(self) -> None:
        """Count the time to the next checkpoint from now."""
        self._saved_at = time.perf_counter()

    def is_due(self, step: int) -> bool:
        """Whether one is due after `step` by the number of steps."""
        every = self._settings.every_steps
        return self._checkpointer is not None and every is not None and step % every == 0

    def is_clock_due(self) -> bool:
        """Whether one is due by the clock of rank 0; False on every other rank."""
        every = self._settings.every_seconds
        if self._checkpointer is None or every is None or not self._mesh.is_leader:
            return False
        return self._is_announced and time.perf_counter() - self._saved_at >= every

    def needs(self, step: int) -> bool:
        """Whether `step` is not saved yet."""
        return self._checkpointer is not None and self._saved_step != step

    def save(self, model: nn.Module, optimizer: torch.optim.Optimizer, position: Position, *, is_async: bool) -> float:
        """Begin a checkpoint, after the one in flight; returns the seconds it blocked. Raises CheckpointFailed."""
        assert self._checkpointer is not None, "needs() said so"
        self.wait()
        blocked = self._checkpointer.save(model, optimizer, position, is_async=is_async)
        self._saved_step = position.step
        self.restart_clock()
        self._is_announced = False
        if not is_async:
            self.wait()
        return blocked

    def follow(self, *, is_finished: bool, has_failed: bool) -> None:
        """Do what all ranks agreed on about the one in flight: tell of it, or fail together.

        Every rank calls it at the same step. Raises CheckpointFailed."""
        if self._checkpointer is None or self._is_announced:
            return
        if has_failed:
            self._checkpointer.wait()  # raises the same cause on every rank
        if is_finished:
            self._checkpointer.announce(self._saved_step)
            self._note_announced()

    def wait(self) -> None:
        """Until the one in flight is written and told of. Every rank calls it. Raises CheckpointFailed."""
        if self._checkpointer is not None and not self._is_announced:
            self._checkpointer.wait()
            self._note_announced()

    def _note_announced(self) -> None:
        self._is_announced = True
        self._say(f"checkpoint of step {self._saved_step} is written")
