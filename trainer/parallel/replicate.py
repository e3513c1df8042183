"""Data parallelism: every rank holds the whole model, gets other samples, and averages gradients (DDP). Also `single`.

Not for: which samples a rank gets (`trainer.data`) or how losses are weighted (`trainer.step`).
"""

from __future__ import annotations

import contextlib
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Final

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from trainer.mesh import Mesh
from trainer.parallel.batch_norm import has_batch_norm, synchronise_batch_norm
from trainer.plan.parallel_plan import ParallelPlan

MAX_NAMES_TOLD: Final = 20
_OPAQUE_NODES: Final = ("CheckpointFunctionBackward",)
"""Reentrant activation checkpointing: what is inside exists only in backward, so nothing can be said before."""


class UnusedParametersError(RuntimeError):
    """Parameters got no gradient, which DDP does not take without being told."""


@dataclass(frozen=True, kw_only=True)
class ParallelModel:
    """A model as a plan made it."""

    module: nn.Module
    """What is called: forward and backward through it exchange what has to be exchanged."""
    inner: nn.Module
    """The user's model with its own parameter names: for evaluation, checkpoints and the optimizer."""
    checks_unused: bool
    """Whether parameters without gradient are an error."""

    def accumulating(self, is_last: bool) -> AbstractContextManager[None]:
        """Around forward and backward of a micro-batch: gradients are exchanged at the last one of a step only."""
        if is_last or not isinstance(self.module, DistributedDataParallel):
            return contextlib.nullcontext()
        return self.module.no_sync()

    def share_buffers(self, mesh: Mesh) -> None:
        """Give every rank rank 0's buffers (BatchNorm statistics, say), before they are evaluated with or saved."""
        if mesh.world_size == 1:
            return
        for buffer in self.inner.buffers():
            if buffer.numel():
                # NCCL takes contiguous tensors only.
                shared = buffer.contiguous()
                dist.broadcast(shared, src=0)
                if shared is not buffer:
                    buffer.copy_(shared)


def replicate(model: nn.Module, plan: ParallelPlan, mesh: Mesh) -> ParallelModel:
    """`model`, which lies on the mesh's device, as data parallelism (or one rank alone) runs it."""
    if mesh.world_size > 1 and plan.sync_batch_norm and has_batch_norm(model):
        model = synchronise_batch_norm(model, mesh.device)
    called: nn.Module = model
    if plan.compile:
        called = torch.compile(model)  # type: ignore[assignment]  # compile of a module is a module
    if mesh.world_size == 1:
        return ParallelModel(module=called, inner=model, checks_unused=False)
    wrapped = DistributedDataParallel(
        called,
        device_ids=[mesh.device.index] if mesh.device.type == "cuda" else None,
        # Buffers are shared before they matter, not at each step.
        forward_sync_buffers=False,
        gradient_as_bucket_view=True,
        find_unused_parameters=plan.find_unused_parameters,
    )
    return ParallelModel(module=wrapped, inner=model, checks_unused=not plan.find_unused_parameters)


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


def refuse_unused(mesh: Mesh, unused: list[str]) -> None:
    """All ranks tell what they found unused; if any did, every rank raises UnusedParametersError with the names."""
    by_rank = mesh.gather(unused)
    names = sorted({name for found in by_rank for name in found})
    if not names:
        return
    ranks = [rank for rank, found in enumerate(by_rank) if found]
    where = "on every rank" if len(ranks) == len(by_rank) else f"on rank {', '.join(map(str, ranks))} only"
    told = ", ".join(names[:MAX_NAMES_TOLD]) + (f" and {len(names) - MAX_NAMES_TOLD} more" if names[20:] else "")
    raise UnusedParametersError(
        f"{len(names)} parameter{'s' if len(names) > 1 else ''} got no gradient {where}: {told}. Remove them, or set "
        "parallel.find_unused_parameters: true if the model uses them only at times."
    )
