"""BatchNorm over all ranks: the statistics that one process would take over the whole micro-batch.

torch's SyncBatchNorm refuses CPUs, so ranks on gloo use `GlobalBatchNorm` from here; on GPUs torch's own is used. Both
keep the same running statistics on every rank, so evaluation does not depend on the rank (pytorch/pytorch#13711).
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.autograd.function import once_differentiable
from torch.nn.modules.batchnorm import _BatchNorm

_is_idle = False


@contextlib.contextmanager
def without_samples(is_idle: bool) -> Iterator[None]:
    """Inside it this rank's batch is a stand-in, which no statistics count."""
    global _is_idle
    before, _is_idle = _is_idle, is_idle
    try:
        yield
    finally:
        _is_idle = before


def synchronise_batch_norm(model: nn.Module, device: torch.device, group: dist.ProcessGroup | None = None) -> nn.Module:
    """`model` with every BatchNorm replaced by one over all ranks of `group`; parameters and buffers stay."""
    if device.type == "cuda":
        return nn.SyncBatchNorm.convert_sync_batchnorm(model, group)
    return _convert(model, group)


def has_batch_norm(model: nn.Module) -> bool:
    """Whether `model` takes statistics over a batch."""
    return any(isinstance(module, _BatchNorm) for module in model.modules())


def _convert(module: nn.Module, group: dist.ProcessGroup | None) -> nn.Module:
    if isinstance(module, _BatchNorm) and not isinstance(module, GlobalBatchNorm):
        return GlobalBatchNorm(module, group)
    for name, child in module.named_children():
        converted = _convert(child, group)
        if converted is not child:
            setattr(module, name, converted)
    return module


class GlobalBatchNorm(_BatchNorm):
    """A BatchNorm (any number of dimensions) whose training statistics come from all ranks."""

    def __init__(self, original: _BatchNorm, group: dist.ProcessGroup | None = None) -> None:
        super().__init__(
            original.num_features, original.eps, original.momentum, original.affine, original.track_running_stats
        )
        self.weight, self.bias = original.weight, original.bias
        for name, buffer in original.named_buffers(recurse=False):
            self._buffers[name] = buffer
        self.training = original.training
        self._group = group

    def _check_input_dim(self, input: torch.Tensor) -> None:
        if input.dim() < 2:
            raise ValueError(f"BatchNorm expects at least 2 dimensions (samples, features, …), got {input.dim()}")

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Normalise (N, C, …) over N and … of all ranks."""
        if not self.training:
            # Nothing is exchanged, with running statistics or without: ranks evaluate different numbers of batches.
            return super().forward(input)
        self._check_input_dim(input)
        output, mean, variance, count = _GlobalNorm.apply(
            input, self.weight, self.bias, self.eps, self._group, 0.0 if _is_idle else 1.0
        )
        if self.running_mean is not None and self.running_var is not None:
            self._update_running(mean, variance, float(count))
        return output

    @torch.no_grad()
    def _update_running(self, mean: torch.Tensor, variance: torch.Tensor, count: float) -> None:
        assert self.running_mean is not None and self.running_var is not None and self.num_batches_tracked is not None
        self.num_batches_tracked.add_(1)
        factor = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        unbiased = variance * (count / max(count - 1.0, 1.0))
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), factor)
        self.running_var.lerp_(unbiased.to(self.running_var.dtype), factor)


class _GlobalNorm(torch.autograd.Function):
    """Forward and backward of batch normalisation over ranks.

    Each rank's count, mean and sum of squared deviations are gathered and combined by the parallel formula of Chan,
    Golub and LeVeque (1979), which does not cancel as E[x²] − E[x]² does. The gradient of the input needs the means of
    dy and dy·x̂ over all ranks (Ioffe and Szegedy 2015, section 3), so backward has one all-reduce.
    """

    @staticmethod
    def forward(
        ctx: Any,
        input: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        eps: float,
        group: dist.ProcessGroup | None,
        share: float,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        dims = [dim for dim in range(input.dim()) if dim != 1]
        wide = input if input.dtype == torch.float64 else input.float()
        local_mean = wide.mean(dims)
        deviations = (wide - _per_channel(local_mean, wide)).square().sum(dims)
        num = share * (wide.numel() / wide.shape[1])
        local = torch.cat([local_mean, deviations, local_mean.new_tensor([num])])
        gathered = [torch.empty_like(local) for _ in range(dist.get_world_size(group))]
        dist.all_gather(gathered, local, group=group)
        stacked = torch.stack(gathered)
        channels = local_mean.numel()
        counts = stacked[:, -1:]
        count = counts.sum()
        means, squares = stacked[:, :channels], stacked[:, channels : 2 * channels]
        mean = (means * counts).sum(0) / count
        # A stand-in has count 0, but deviations of its own, which must not count either.
        own_squares = torch.where(counts > 0, squares, torch.zeros_like(squares))
        variance = (own_squares.sum(0) + ((means - mean).square() * counts).sum(0)) / count
        inverse_std = (variance + eps).rsqrt()
        normalised = (wide - _per_channel(mean, wide)) * _per_channel(inverse_std, wide)
        output = normalised if weight is None else normalised * _per_channel(weight, wide)
        output = output if bias is None else output + _per_channel(bias, wide)
        ctx.save_for_backward(normalised, weight, inverse_std, count)
        ctx.group, ctx.share, ctx.has_bias = group, share, bias is not None
        ctx.mark_non_differentiable(mean, variance, count)
        return output.to(input.dtype), mean, variance, count

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        normalised, weight, inverse_std, count = ctx.saved_tensors
        dims = [dim for dim in range(normalised.dim()) if dim != 1]
        gradient = gradients[0].to(normalised.dtype)
        bias_gradient = gradient.sum(dims)
        weight_gradient = (gradient * normalised).sum(dims)
        scale = inverse_std if weight is None else inverse_std * weight
        sums = torch.cat([bias_gradient, weight_gradient])
        dist.all_reduce(sums, group=ctx.group)
        mean_gradient, mean_product = (sums / count).chunk(2)
        # The statistics that the others normalised with came from this rank's samples, unless it was idle.
        through_statistics = _per_channel(mean_gradient, normalised) + normalised * _per_channel(
            mean_product, normalised
        )
        input_gradient = (gradient - ctx.share * through_statistics) * _per_channel(scale, normalised)
        return (
            input_gradient.to(gradients[0].dtype),
            None if weight is None else weight_gradient,
            bias_gradient if ctx.has_bias else None,
            None,
            None,
            None,
        )


def _per_channel(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """(C,) shaped so that it broadcasts over (N, C, …)."""
    return values.view(1, -1, *([1] * (like.dim() - 2)))
