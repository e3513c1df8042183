"""What the recipes share: types by name, the loss and the metrics of classification, dropout only where wanted."""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn
from torch.nn import functional

DTYPES: Final = {"float32": torch.float32, "float64": torch.float64}


def cross_entropy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Mean over all that is classified. `output`: [..., classes], of any type; `target`: [...] class numbers."""
    return functional.cross_entropy(_at_least_float32(output).flatten(0, -2), target.flatten())


def accuracy(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """The part that is classified right."""
    return (output.argmax(dim=-1) == target).double().mean()


def bits_per_byte(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    """Cross entropy in bits, where tokens are bytes."""
    return cross_entropy(output, target).double() / math.log(2)


def dropout(probability: float) -> nn.Module:
    """Dropout, or nothing at all: with probability 0 no random number is drawn."""
    return nn.Dropout(probability) if probability > 0 else nn.Identity()


def _at_least_float32(values: torch.Tensor) -> torch.Tensor:
    return values.to(torch.promote_types(values.dtype, torch.float32))
