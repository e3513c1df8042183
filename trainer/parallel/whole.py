"""The engine of models that are called whole on every rank: alone, under DDP, sharded (FSDP2), or with split layers.

Not for: pipelines (`trainer.parallel.pipeline`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, Literal

from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.data.batches import MicroBatch
from trainer.mesh import Mesh
from trainer.parallel.batch_norm import without_samples
from trainer.parallel.model import Score, call_model
from trainer.parallel.precision import Autocast
from trainer.parallel.unused import refuse_unused, unused_parameters
from trainer.task import TrainTask


class WholeEngine:
    """Micro-batches one after another, each forward and backward."""

    def __init__(
        self,
        task: TrainTask,
        module: nn.Module,
        inner: nn.Module,
        mesh: Mesh,
        *,
        autocast: Autocast,
        unused: Literal["refuse", "alike", "allow"],
    ) -> None:
        """`module` is what is called in training, `inner` in evaluation. `unused`: what is done about parameters that
        get no gradient in the first step: refused; only if it is so on every rank alike (FSDP mixes up the gradients
        of ranks that have different ones); allowed."""
        self._task, self._module, self._inner, self._mesh = task, module, inner, mesh
        self._autocast, self._unused = autocast, unused

    def accumulate(self, micro_batches: Sequence[MicroBatch], score: Score, moved: Callable[[], None]) -> None:
        """As `Engine.accumulate`. DDP exchanges at the last micro-batch, FSDP at each: that keeps gradients sharded."""
        last = len(micro_batches) - 1
        for index, micro in enumerate(micro_batches):
            with self._accumulating(index == last), without_samples(micro.num_samples == 0):
                with self._autocast():
                    output = call_model(self._task, self._module, micro.batch)
                value = score(output, micro)
                moved()
                if self._unused != "allow":
                    # Before the first backward: afterwards ranks would wait for gradients that never come.
                    unused = unused_parameters(value, self._inner)
                    refuse_unused(self._mesh, unused, is_alike_allowed=self._unused == "alike")
                    self._unused = "allow"
                value.backward()
            moved()

    def predict(self, batch: Any) -> Any:
        """As `Engine.predict`: every rank has it."""
        with self._autocast():
            return call_model(self._task, self._inner, batch)

    def _accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch."""
        if is_last or not isinstance(self._module, DistributedDataParallel):
            return contextlib.nullcontext()
        return self._module.no_sync()
