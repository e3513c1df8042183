"""`TrainTask`: what a user's entry function returns, and what every recipe is made of: model, loss, data.

A plain `nn.Module`, a loss and a dataset are enough; everything else has a default. Not for: how it is trained (that is
the job file's `train`, `parallel` and `checkpoint`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

Loss = torch.Tensor | tuple[torch.Tensor, torch.Tensor | float]
"""A mean over the samples of a batch, or (sum, count) where what is counted is not samples: unmasked tokens, say."""


@dataclass(frozen=True, kw_only=True)
class TrainTask:
    """What is trained.

    A batch that is a pair is (inputs, target): the model gets the inputs, the loss (output, target). With any other
    batch the model gets all of it, and the loss (output, batch).
    """

    model: nn.Module | Callable[[], nn.Module]
    """The model, or a function that builds it. It is built on every rank under the same seed."""
    loss: Callable[[Any, Any], Loss]
    """loss(output, target)."""
    data: Any
    """Training data: map-style (`__len__` and `__getitem__`), or an iterable dataset."""
    eval_data: Any = None
    """Held-out data, map-style. None: no evaluation."""
    metrics: Mapping[str, Callable[[Any, Any], torch.Tensor | float]] = field(default_factory=dict)
    """Further values of the evaluation by name, metric(output, target): each a mean over the samples of a batch."""
    forward: Callable[[nn.Module, Any], Any] | None = None
    """forward(model, batch) instead of `model(inputs)`. Call the model itself: only `model(…)`, not a method of it,
    exchanges gradients between ranks."""
    collate: Callable[[list[Any]], Any] | None = None
    """Makes a batch of samples. None: as torch's DataLoader does."""
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None
    """optimizer(model) instead of the job file's."""
    schedule: Callable[[int], float] | None = None
    """Factor on the learning rate at a step (0 is the first) instead of the job file's."""
    tokens_per_sample: int | None = None
    """For tokens/s. None: only samples/s is reported."""
    flops_per_sample: float | None = None
    """Of forward and backward, for MFU. None: 6 × parameters × tokens (or samples)."""
    layers: Callable[[nn.Module], Sequence[nn.Module]] | None = None
    """layers(model): all of the model as modules in order, so that it can be split over ranks. Each is a submodule of
    the model and takes the one tensor that the one before returned, samples in dimension 0; calling them in turn is
    `model(inputs)`. None: an `nn.Sequential` is its own list; any other model has none, so that it cannot be split
    into stages, and is sharded as one."""
    tensor_parallel_plan: Mapping[str, str] | None = None
    """How tensor parallelism splits the `nn.Linear`s that have these names, wildcards as in `layers.*.mlp.up`:
    "colwise" (each rank computes some of the outputs) or "rowwise" (each takes some of the inputs, and the results are
    summed), in turns, so that the one takes what the other left. What is not named stays whole on every rank. None:
    the model has no such split."""
    tensor_parallel_sizes: Sequence[int] = ()
    """Numbers that a tensor-parallel group must divide beside the split sides of those layers: attention heads, say."""


def inputs_of(batch: Any) -> Any:
    """What of a batch the model gets."""
    return batch[0] if _is_pair(batch) else batch


def target_of(batch: Any) -> Any:
    """What of a batch the loss gets."""
    return batch[1] if _is_pair(batch) else batch


def _is_pair(batch: Any) -> bool:
    return isinstance(batch, tuple | list) and len(batch) == 2
