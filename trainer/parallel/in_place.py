"""Whether a module writes over what it is given, as `ReLU(inplace=True)` does. Not for: what user code does by hand."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.utils._pytree import tree_map_only


def begins_in_place(module: nn.Module) -> bool:
    """Whether the first operation of a module, or of a sequence of modules, writes over its input."""
    first = next((one for one in module.modules() if not any(True for _ in one.children())), module)
    return getattr(first, "inplace", False) is True


def copied(values: Any) -> Any:
    """The same values in tensors that may be written over."""
    return tree_map_only(torch.Tensor, torch.clone, values)
