"""Sharding parameters, gradients and optimizer state over ranks (FSDP2's `fully_shard`), layer by layer.

Inside a pipeline nothing is resharded after forward: resharding together with a backward in two parts trains silently
wrong (measured with torch 2.13: the loss is off by 0.2 after 20 steps), and each micro-batch would gather again.
Not for: which layers there are (`trainer.parallel.layers`).
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

from trainer.parallel.axes import Axes
from trainer.plan.parallel_plan import ParallelPlan


def shard(root: nn.Module, layers: Iterable[nn.Module], plan: ParallelPlan, axes: Axes, device: torch.device) -> None:
    """Shard `root` in place, each of its `layers` as a unit of its own, the rest with the root. Moves what it shards to
    the device, a layer at a time. A layer that shares a parameter with another goes with the root."""
    mesh = _mesh_of(axes)
    policy = (
        MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        if plan.precision == "bf16"
        else MixedPrecisionPolicy()
    )
    reshards = plan.pp == 1
    for layer in _without_shared(list(layers)):
        fully_shard(layer, mesh=mesh, mp_policy=policy, reshard_after_forward=reshards)
    fully_shard(root, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
    root.to(device)  # buffers, which are not sharded


def _mesh_of(axes: Axes) -> DeviceMesh:
    return axes.submesh("dp_replicate", "dp_shard") if axes.dp_replicate > 1 else axes.submesh("dp_shard")


def _without_shared(layers: list[nn.Module]) -> list[nn.Module]:
    """The layers that have parameters, none of them shared with another of `layers`."""
    owners: dict[nn.Parameter, int] = {}
    for layer in layers:
        for parameter in layer.parameters():
            owners[parameter] = owners.get(parameter, 0) + 1
    own = [list(layer.parameters()) for layer in layers]
    return [
        layer
        for layer, parameters in zip(layers, own, strict=True)
        if parameters and all(owners[parameter] == 1 for parameter in parameters)
    ]
