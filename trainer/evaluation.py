"""Evaluation: each held-out sample once over all ranks, so the result is the same for any number of them.

All ranks run forward equally often (some on stand-ins), since forward may need other ranks; between batches all agree
now and then whether to go on, which is how a stop ends an evaluation early on every rank.

Not for: when to evaluate (`trainer.loop`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

import torch

from trainer.data.batches import MicroBatch
from trainer.failure import ConfigError
from trainer.mesh import Mesh
from trainer.parallel.model import ParallelModel
from trainer.step import checked_loss
from trainer.task import TrainTask, target_of

ROUND_SECONDS: Final = 1.0
"""Ranks agree about this often whether to go on."""
MAX_ROUND_BATCHES: Final = 1_000
_LOSS: Final = "loss"


@dataclass(frozen=True, kw_only=True)
class Evaluator:
    """Evaluates one model. `moved` is called after each batch, for the pulse."""

    task: TrainTask
    model: ParallelModel
    mesh: Mesh
    is_stop_asked: Callable[[], bool]
    moved: Callable[[], None]

    def __post_init__(self) -> None:
        """Raises ConfigError for a metric whose values would take the place of the loss."""
        if _LOSS in self.task.metrics:
            raise ConfigError(
                f"the task has a metric {_LOSS!r}, which is what the held-out loss is called (val_{_LOSS}). Give the "
                "metric another name."
            )

    def run(self, batches: Iterator[MicroBatch], num_batches: int) -> dict[str, float] | None:
        """Means over all held-out samples, by name: `loss` and the task's metrics. Every rank gets the same.

        `num_batches`: the most that any rank has, the same number on every rank. None: given up, since the training is
        to stop. Raises what user code raises.
        """
        names = [_LOSS, *self.task.metrics]
        sums = torch.zeros(len(names), dtype=torch.float64, device=self.mesh.device)
        counts = torch.zeros_like(sums)
        # Module by module: a part that the user keeps in evaluation mode (a frozen backbone) must stay there.
        modes = [(module, module.training) for module in self.model.inner.modules()]
        self.model.inner.eval()
        try:
            with torch.no_grad():
                if not self._run_rounds(batches, num_batches, sums, counts):
                    return None
        finally:
            self.model.rest()
            for module, was_training in modes:
                module.training = was_training
        totals = self.mesh.sum([*sums.tolist(), *counts.tolist()])
        pairs = zip(names, totals[: len(names)], totals[len(names) :], strict=True)
        return {name: total / count if count else float("nan") for name, total, count in pairs}

    def _run_rounds(
        self, batches: Iterator[MicroBatch], num_batches: int, sums: torch.Tensor, counts: torch.Tensor
    ) -> bool:
        """Whether it came to the end. The first round is one batch, to see how long one takes."""
        num_done, num_in_round = 0, 1
        while num_done < num_batches:
            begun_at = time.perf_counter()
            for _ in range(min(num_in_round, num_batches - num_done)):
                is_skipped = self.is_stop_asked() and not self.model.is_forward_shared
                micro = None if is_skipped else next(batches, None)
                if micro is not None and (micro.num_samples or self.model.is_forward_shared):
                    self._add(micro, sums, counts)
                self.moved()
            num_done += num_in_round
            seconds = (time.perf_counter() - begun_at) / num_in_round
            slowest, num_stops = self.mesh.max([seconds, float(self.is_stop_asked())])
            if num_stops:
                return False
            num_in_round = max(1, min(MAX_ROUND_BATCHES, int(ROUND_SECONDS / max(slowest, 1e-6))))
        return True

    def _add(self, micro: MicroBatch, sums: torch.Tensor, counts: torch.Tensor) -> None:
        target = target_of(micro.batch)
        output = self.model.predict(micro.batch)
        if not self.model.speaks or not micro.num_samples:
            return
        with self.model.autocast():
            value, counted = checked_loss(self.task.loss(output, target))
            others = [metric(output, target) for metric in self.task.metrics.values()]
        num = micro.num_samples
        wide = value.to(torch.float64)
        sums[0] += wide if counted is not None else wide * num
        counts[0] += num if counted is None else counted
        for index, other in enumerate(others, start=1):
            sums[index] += torch.as_tensor(other).to(sums).reshape(()) * num
            counts[index] += num
