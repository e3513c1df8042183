"""What a rank measured since it last reported. Not for: what is done with it (`trainer.loop`)."""

from __future__ import annotations

import math
import time

import torch

from trainer import rates
from trainer.data.batches import StepBatches
from trainer.step import StepResult


class Window:
    """What this rank measured since the last report. Losses stay on the device until the ranks agree."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._first_bad_loss = torch.zeros((), dtype=torch.int64, device=device)
        self._first_bad_norm = torch.zeros((), dtype=torch.int64, device=device)
        self.lr = 0.0
        self.restart()

    def restart(self) -> None:
        """A new window begins."""
        self._loss_sum = torch.zeros((), dtype=torch.float64, device=self._device)
        self._count = torch.zeros_like(self._loss_sum)
        self._grad_norm: torch.Tensor | None = None
        self._num_steps, self._num_samples, self._data_seconds = 0, 0, 0.0
        self._begun_at = time.perf_counter()

    @property
    def num_steps(self) -> int:
        """Steps of the window so far."""
        return self._num_steps

    def leave_out(self, seconds: float) -> None:
        """So long nothing was trained: it is no time of the steps."""
        self._begun_at += seconds

    def add(self, step: int, result: StepResult, batches: StepBatches) -> None:
        """A step was done."""
        self._loss_sum += result.loss_sum
        self._count += result.count
        self._first_bad_loss = _note_first(self._first_bad_loss, result.loss_sum, step)
        if result.grad_norm is not None:
            self._grad_norm = result.grad_norm
            self._first_bad_norm = _note_first(self._first_bad_norm, result.grad_norm, step)
        self._num_steps += 1
        self._num_samples += batches.num_samples
        self._data_seconds += batches.data_seconds

    @property
    def loss_sum(self) -> float:
        """Waits for the device."""
        value = float(self._loss_sum)
        return value if math.isfinite(value) else 0.0

    @property
    def count(self) -> float:
        """What the losses were counted over."""
        return float(self._count)

    @property
    def step_seconds(self) -> float:
        """Mean over the window."""
        return (time.perf_counter() - self._begun_at) / max(1, self._num_steps)

    @property
    def first_bad_loss_step(self) -> int:
        """First step at which this rank's own loss was not finite; 0: none."""
        return int(self._first_bad_loss)

    @property
    def first_bad_norm_step(self) -> int:
        """First step at which the norm of the gradient was not finite; 0: none."""
        return int(self._first_bad_norm)

    @property
    def is_not_finite(self) -> bool:
        """Whether either was."""
        return bool(self.first_bad_loss_step or self.first_bad_norm_step)

    def metrics(self, loss: float, speed: rates.Speedometer) -> dict[str, float]:
        """The values to report, by name. `loss`: the mean over all ranks."""
        seconds = self.step_seconds
        samples_per_second = self._num_samples / (seconds * max(1, self._num_steps)) if seconds else 0.0
        found = {
            "loss": loss,
            "lr": self.lr,
            "step_seconds": seconds,
            "data_seconds": self._data_seconds / max(1, self._num_steps),
            "samples_per_second": samples_per_second,
            "peak_memory_bytes": float(rates.peak_memory_bytes(self._device)),
            **speed.rates(samples_per_second),
        }
        if self._grad_norm is not None:
            found["grad_norm"] = float(self._grad_norm)
        return found


def _note_first(first: torch.Tensor, value: torch.Tensor, step: int) -> torch.Tensor:
    is_new = (first == 0) & ~torch.isfinite(value)
    return torch.where(is_new, torch.full_like(first, step), first)
