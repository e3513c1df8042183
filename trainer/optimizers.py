"""Optimizers and learning-rate schedules by name. A schedule is a pure function of the step, so it needs no state.

Not for: when the optimizer steps (`trainer.loop`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from trainer.plan.training_plan import TrainSettings


def build_optimizer(model: nn.Module, train: TrainSettings) -> torch.optim.Optimizer:
    """The optimizer of the settings. Weight decay goes to parameters of two and more dimensions, not to biases and
    norms."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    groups: list[dict[str, Any]] = [
        {"params": [one for one in parameters if one.ndim >= 2], "weight_decay": train.weight_decay},
        {"params": [one for one in parameters if one.ndim < 2], "weight_decay": 0.0},
    ]
    return _OPTIMIZERS[train.optimizer]([group for group in groups if group["params"]], train)


def _adamw(groups: list[dict[str, Any]], train: TrainSettings) -> torch.optim.Optimizer:
    is_fused = all(parameter.is_cuda for group in groups for parameter in group["params"])
    return torch.optim.AdamW(groups, lr=train.lr, fused=is_fused or None)


def _sgd(groups: list[dict[str, Any]], train: TrainSettings) -> torch.optim.Optimizer:
    return torch.optim.SGD(groups, lr=train.lr, momentum=train.momentum)


_OPTIMIZERS: Final[dict[str, Callable[[list[dict[str, Any]], TrainSettings], torch.optim.Optimizer]]] = {
    "adamw": _adamw,
    "sgd": _sgd,
}


def separate_kinds(optimizer: torch.optim.Optimizer) -> None:
    """Cut each group into groups of one kind of parameter: plain tensors, and those sharded over one mesh each.

    torch's fused and multi-tensor updates take no mixture (half of a model sharded twice, say). Settings stay the same,
    so it changes nothing but how many parameters are updated together. To be called before the first step.
    """
    groups: list[dict[str, Any]] = []
    for group in optimizer.param_groups:
        kinds: dict[Any, list[torch.Tensor]] = {}
        for parameter in group["params"]:
            kinds.setdefault(parameter.device_mesh if isinstance(parameter, DTensor) else None, []).append(parameter)
        groups.extend({**group, "params": parameters} for parameters in kinds.values())
    if len(groups) > len(optimizer.param_groups):
        optimizer.param_groups[:] = groups


def lr_factor(step: int, total_steps: int, train: TrainSettings) -> float:
    """Factor on the learning rate at `step` (0 is the first) of `total_steps`. Pure.

    Linear warm-up to 1, then constant, linear or a half cosine down to `final_lr_ratio`, which the step after the last
    one would have: a last step at 0 would change nothing.
    """
    if step < train.warmup_steps:
        return (step + 1) / train.warmup_steps
    if train.schedule == "constant":
        return 1.0
    done = min(1.0, (step - train.warmup_steps) / max(1, total_steps - train.warmup_steps))
    falling = 1.0 - done if train.schedule == "linear" else 0.5 * (1.0 + math.cos(math.pi * done))
    return train.final_lr_ratio + (1.0 - train.final_lr_ratio) * falling


def set_lr(optimizer: torch.optim.Optimizer, base_lrs: Sequence[float], factor: float) -> float:
    """Set each group's rate to its base × `factor`; returns the first group's."""
    for group, base in zip(optimizer.param_groups, base_lrs, strict=True):
        group["lr"] = base * factor
    return float(optimizer.param_groups[0]["lr"])
