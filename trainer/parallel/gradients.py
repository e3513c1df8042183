"""What happens to gradients between backward and the optimizer, where neither DDP nor FSDP does it: averaging over data
parallel ranks, summing those of tied weights, the norm over all parts of the model, clipping.

Not for: DDP's and FSDP's own exchange, which goes along with backward.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from trainer.parallel.axes import Axes

BUCKET_BYTES = 25 * 2**20
"""Gradients are exchanged together up to about this size, so that small ones cost no round trip each."""


@dataclass(frozen=True, kw_only=True, eq=False)
class TiedWeight:
    """A parameter that several stages hold a copy of."""

    parameter: torch.nn.Parameter
    group: dist.ProcessGroup
    """The ranks that hold a copy of the same part."""
    is_first: bool
    """Whether this rank's copy is the one that is counted, of all copies."""


def local_of(value: torch.Tensor) -> torch.Tensor:
    """What of a tensor lies on this rank."""
    return value.to_local() if isinstance(value, DTensor) else value


def average(parameters: Iterable[torch.nn.Parameter], group: dist.ProcessGroup | None, size: int) -> None:
    """Replace each gradient by its mean over the `size` ranks of `group`; a missing one counts as zero, unless no rank
    has it: then there is none, and no optimizer moves the parameter. Blocks.

    Every rank must hold the same parameters in the same order. Contiguous buckets, one all-reduce each.
    """
    gradients = [local_of(gradient) for gradient in _of_any(list(parameters), group)]
    for bucket in buckets(gradients, BUCKET_BYTES):
        flat = torch.cat([one.reshape(-1) for one in bucket])
        dist.all_reduce(flat, group=group)
        flat /= size
        pieces = flat.split([one.numel() for one in bucket])
        torch._foreach_copy_(bucket, [piece.view_as(one) for piece, one in zip(pieces, bucket, strict=True)])


def _of_any(parameters: Sequence[torch.nn.Parameter], group: dist.ProcessGroup | None) -> list[torch.Tensor]:
    """The gradients of the parameters that have one on any rank of `group`, zeros where this rank has none. Blocks."""
    trained = [one for one in parameters if one.requires_grad]
    if not trained:
        return []
    has_gradient = torch.tensor([one.grad is not None for one in trained], dtype=torch.int32, device=trained[0].device)
    dist.all_reduce(has_gradient, op=dist.ReduceOp.MAX, group=group)
    found = []
    for parameter, is_there in zip(trained, has_gradient.tolist(), strict=True):
        if is_there:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            found.append(parameter.grad)
    return found


def buckets(tensors: Sequence[torch.Tensor], most_bytes: int) -> list[list[torch.Tensor]]:
    """`tensors` in their order, cut into lists of one type and about `most_bytes`. Pure."""
    found: list[list[torch.Tensor]] = []
    size = 0
    for tensor in tensors:
        if not found or size >= most_bytes or found[-1][-1].dtype != tensor.dtype:
            found.append([])
            size = 0
        found[-1].append(tensor)
        size += tensor.numel() * tensor.element_size()
    return found


def sum_tied(tied: Sequence[TiedWeight]) -> None:
    """Give every copy of a tied weight the sum of the copies' gradients, so that they stay the same weight. Blocks."""
    for one in tied:
        found = _of_any([one.parameter], one.group)
        if not found:
            continue
        gradient = local_of(found[0])
        shared = gradient.contiguous()
        dist.all_reduce(shared, group=one.group)
        if shared is not gradient:
            gradient.copy_(shared)


def total_norm(parameters: Sequence[torch.nn.Parameter], tied: Sequence[TiedWeight], axes: Axes) -> torch.Tensor:
    """2-norm of the whole model's gradient, the same on all ranks; () on the gradients' device. Blocks.

    Each rank adds the squares of what it holds, divided by the number of ranks that hold the same: a copy of a shard
    under HSDP, a layer that tensor parallelism does not split. The later copies of a tied weight add nothing.
    """
    repeated = {id(one.parameter) for one in tied if not one.is_first}
    counted = [one for one in parameters if one.grad is not None and id(one) not in repeated]
    gradients = [local_of(one.grad) for one in counted if one.grad is not None]
    device = gradients[0].device if gradients else parameters[0].device
    # In double precision whatever the layout: else the order of additions would show in the bits of a clipped step.
    total = torch.zeros((), dtype=torch.float64, device=device)
    for bucket in buckets(gradients, 2**62):
        norms = torch.stack(torch._foreach_norm(bucket)).double()
        copies = [1 if axes.device_mesh is None else _num_copies(one, axes) for one in counted[: len(bucket)]]
        counted = counted[len(bucket) :]
        total += (norms.square() / torch.tensor(copies, dtype=torch.float64, device=device)).sum()
    if axes.device_mesh is not None:
        dist.all_reduce(total)
    return total.sqrt()


def clip(parameters: Sequence[torch.nn.Parameter], max_norm: float, norm: torch.Tensor) -> None:
    """Scale the gradients so that their norm, which is `norm`, is at most `max_norm`. No communication.

    As `torch.nn.utils.clip_grads_with_norm_`, on what of each gradient lies here.
    """
    gradients = [local_of(one.grad) for one in parameters if one.grad is not None]
    factor = (max_norm / (norm + 1e-6)).clamp(max=1.0)
    for bucket in buckets(gradients, 2**62):
        torch._foreach_mul_(bucket, factor.to(bucket[0].dtype))


def _num_copies(parameter: torch.nn.Parameter, axes: Axes) -> int:
    """Ranks of the world that hold the same numbers of this parameter."""
    sharded: set[str] = set()
    if isinstance(parameter, DTensor):
        names = parameter.device_mesh.mesh_dim_names or ()
        sharded = {
            name for name, placement in zip(names, parameter.placements, strict=True) if not placement.is_replicate()
        }
    copies = axes.dp_replicate
    copies *= 1 if "dp_shard" in sharded else axes.dp_shard
    copies *= 1 if "tp" in sharded else axes.tp
    return copies
