"""Compiling a model layer by layer (torch.compile): layers of a kind are compiled once, and can be sharded one by one.

Not for: models that stay whole on a rank; those are compiled at once (`trainer.parallel.apply`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Final

import torch
import torch._dynamo
from torch import nn

_VERSIONS_PER_LAYER: Final = 4
"""In training, in evaluation, and with a last batch that is smaller."""


def compile_layers(layers: Sequence[nn.Module], backend: str = "inductor") -> None:
    """Compile `layers` in place, each at its first call; names stay. To be applied after activation checkpointing.

    Raises the number of versions that torch allows per function: it counts all layers of a class as one function, and
    would silently run those beyond 8 uncompiled, as a network's whose layers all have other widths.
    """
    config = torch._dynamo.config
    config.recompile_limit = max(config.recompile_limit, _VERSIONS_PER_LAYER * len(layers))
    config.accumulated_recompile_limit = max(config.accumulated_recompile_limit, config.recompile_limit)
    for layer in layers:
        # As `layer.compile()`, which leaves modules of torch's own (nn.Sequential, nn.Linear) uncompiled: it does not
        # look into a function of torch unless one of somebody else's calls it.
        layer._compiled_call_impl = torch.compile(_through(layer._call_impl), backend=backend)


def _through(call: Callable[..., Any]) -> Callable[..., Any]:
    def called(*args: Any, **kwargs: Any) -> Any:
        return call(*args, **kwargs)

    return called
