"""Parameters that got no gradient: found from the graph of the loss and refused by name, since DDP would wait for them.

Not for: models that use some at times, which say so (`parallel.find_unused_parameters`).
"""

from __future__ import annotations

from typing import Final

import torch
from torch import nn

from trainer.mesh import Mesh

MAX_NAMES_TOLD: Final = 20
_OPAQUE_NODES: Final = ("CheckpointFunctionBackward",)
"""Reentrant activation checkpointing: what is inside exists only in backward, so nothing can be said before."""


class UnusedParametersError(RuntimeError):
    """Parameters got no gradient, which DDP does not take without being told."""


def unused_parameters(loss: torch.Tensor, model: nn.Module) -> list[str]:
    """Names of the trainable parameters that `loss` does not depend on, from its graph: nothing is computed. None are
    named where the graph cannot be followed."""
    used: set[int] = set()
    seen: set[object] = set()
    pending = [loss.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if node.name() in _OPAQUE_NODES:
            return []
        variable = getattr(node, "variable", None)
        if variable is not None:
            used.add(id(variable))
        pending.extend(function for function, _ in node.next_functions)
    return [name for name, one in model.named_parameters() if one.requires_grad and id(one) not in used]


def refuse_unused(mesh: Mesh, unused: list[str], *, is_alike_allowed: bool = False) -> None:
    """All ranks tell what they found unused; if any did, every rank raises UnusedParametersError with the names.

    `is_alike_allowed`: not if all ranks found the same.
    """
    by_rank = mesh.gather(unused)
    if is_alike_allowed and all(found == by_rank[0] for found in by_rank):
        return
    names = sorted({name for found in by_rank for name in found})
    if not names:
        return
    ranks = [rank for rank, found in enumerate(by_rank) if found]
    where = "on every rank" if len(ranks) == len(by_rank) else f"on rank {', '.join(map(str, ranks))} only"
    told = ", ".join(names[:MAX_NAMES_TOLD]) + (f" and {len(names) - MAX_NAMES_TOLD} more" if names[20:] else "")
    raise UnusedParametersError(
        f"{len(names)} parameter{'s' if len(names) > 1 else ''} got no gradient {where}: {told}. Remove them, or use "
        "parallel.strategy: ddp with find_unused_parameters: true if the model uses them only at times."
    )
