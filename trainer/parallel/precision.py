"""The precision that a plan computes in. Parameters and what is added up over ranks stay in the model's own type."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch

from trainer.plan.parallel_plan import ParallelPlan

Autocast = Callable[[], AbstractContextManager[Any]]


def autocast_of(plan: ParallelPlan, device: torch.device) -> Autocast:
    """What to enter around forward and loss."""
    if plan.precision != "bf16":
        return contextlib.nullcontext
    return lambda: torch.autocast(device.type, dtype=torch.bfloat16)
