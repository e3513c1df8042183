"""What the recipes share: models that are lists of layers, types by name, loss and metrics of classification, dropout.

Not for: models of users, which need not be built so (`TrainTask.layers` lists theirs).
"""

from __future__ import annotations

import math
from typing import Final

import torch
from torch import nn
from torch.nn import functional

DTYPES: Final = {"float32": torch.float32, "float64": torch.float64}


class LayeredModel(nn.Module):
    """A model that is its layers called in turn, so whoever has some of them computes what the whole model would.

    A subclass only makes its children, in order; those in a ModuleList are a layer each.
    """

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        """The inputs through every layer."""
        values = inputs
        for layer in layers_in_order(self):
            values = layer(values)
        return values


def layers_in_order(model: nn.Module) -> list[nn.Module]:
    """The layers of a LayeredModel: each takes the one tensor that the one before returned."""
    return [
        layer
        for child in model.children()
        for layer in (child.children() if isinstance(child, nn.ModuleList) else (child,))
    ]


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
