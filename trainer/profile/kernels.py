"""What a forward saves, as the kernels of a GPU or of the CPU would save it, counted on fake CPU tensors.

Fake tensors of a GPU need a torch built for one, so the calls in which a GPU differs are replaced by what it does:
attention takes a fused kernel (the mathematical one keeps the whole score matrix), RMSNorm is one kernel, and autocast
computes norms and softmax in fp32. Not for: which modules are run (`trainer.profile.profiling`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, Final

import torch
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import functional
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

_aten: Final = torch.ops.aten
_ATTENTION_ON_CPU: Final = _aten._scaled_dot_product_flash_attention_for_cpu
KEPT_BY_SELECTIVE: Final = frozenset(
    {
        _aten.mm,
        _aten.addmm,
        _aten.bmm,
        _aten.baddbmm,
        _aten._scaled_mm,
        _aten.convolution,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_efficient_attention,
        _ATTENTION_ON_CPU,
    }
)
"""What `trainer.parallel.activation_checkpointing` keeps the results of, attention without dropout only."""
_DROPOUT_PLACES: Final = {
    _aten._scaled_dot_product_flash_attention: 3,
    _aten._scaled_dot_product_efficient_attention: 5,
    _ATTENTION_ON_CPU: 3,
}


class Counter(TorchDispatchMode):
    """Counts, while it is entered: storages that autograd saves, results that are dear to compute, operations.

    A storage counts once, with whoever saves it first; those of `owned` tensors (parameters and buffers) never.
    """

    def __init__(self, owned: Iterable[torch.Tensor]) -> None:
        super().__init__()
        # Held, not only remembered: the address of a storage that is gone would be given to another.
        self._known = {_key(one): one.untyped_storage() for one in owned}
        self._dear: dict[int, Any] = {}
        self._saved_bytes, self._dear_bytes, self._flops = 0, 0, 0.0
        self._hooks = saved_tensors_hooks(self._save, lambda saved: saved)

    def __enter__(self) -> Counter:
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        super().__exit__(*error)
        self._hooks.__exit__(*error)

    def take(self) -> tuple[int, int, float]:
        """(bytes saved, bytes of dear results, operations of forward) since it was last asked."""
        counted = self._saved_bytes, self._dear_bytes, self._flops
        self._saved_bytes, self._dear_bytes, self._flops = 0, 0, 0.0
        return counted

    def has_saved(self, tensor: torch.Tensor) -> bool:
        """Whether the storage of `tensor` is counted already, or never will be."""
        return _key(tensor) in self._known

    def ignore(self, tensor: torch.Tensor) -> None:
        """Never count the storage of `tensor`."""
        self._known[_key(tensor)] = tensor.untyped_storage()

    def _save(self, tensor: torch.Tensor) -> torch.Tensor:
        key = _key(tensor)
        if key not in self._known:
            self._known[key] = tensor.untyped_storage()
            self._saved_bytes += tensor.untyped_storage().nbytes()
        return tensor

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        result = func(*args, **kwargs)
        packet = func._overloadpacket
        if packet is _ATTENTION_ON_CPU:
            self._flops += sdpa_flop_count(args[0].shape, args[1].shape, args[2].shape)
        elif packet in flop_registry:
            self._flops += flop_registry[packet](*args, **kwargs, out_val=result)
        place = _DROPOUT_PLACES.get(packet, len(args))
        is_random = place < len(args) and args[place] > 0
        if packet in KEPT_BY_SELECTIVE and not is_random:
            for tensor in result if isinstance(result, tuple) else (result,):
                if isinstance(tensor, torch.Tensor) and _key(tensor) not in self._dear:
                    self._dear[_key(tensor)] = tensor.untyped_storage()
                    self._dear_bytes += tensor.untyped_storage().nbytes()
        return result


class KernelsOf(TorchFunctionMode):
    """Inside it, functions whose GPU kernels save something else than the CPU's do what a GPU does."""

    def __init__(self, kernels: str) -> None:
        super().__init__()
        self._table = _GPU_FUNCTIONS if kernels == "cuda" else {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        replacement = self._table.get(func)
        if replacement is None:
            return func(*args, **(kwargs or {}))
        return replacement(func, *args, **(kwargs or {}))


def _key(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _attention(
    func: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> torch.Tensor:
    """The flash kernel for half precision without a mask, the memory-efficient one for anything else."""
    query, key, value = (_lowered(one) for one in (query, key, value))
    if query.dim() != 4 or query.dtype == torch.float64:
        result: torch.Tensor = func(
            query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
        )
        return result
    if query.dtype != torch.float32 and attn_mask is None:
        flash: torch.Tensor = _aten._scaled_dot_product_flash_attention(
            query, key, value, dropout_p, is_causal, scale=scale
        )[0]
        return flash
    if enable_gqa:
        groups = query.shape[1] // key.shape[1]
        key, value = (one.repeat_interleave(groups, 1) for one in (key, value))
    bias = None if attn_mask is None else attn_mask.expand(*query.shape[:3], key.shape[2]).to(query.dtype)
    efficient: torch.Tensor = _aten._scaled_dot_product_efficient_attention(
        query, key, value, bias, True, dropout_p, is_causal, scale=scale
    )[0]
    return efficient


class _FusedRMSNorm(torch.autograd.Function):
    """Saves its input and one number per row."""

    @staticmethod
    def forward(ctx: Any, values: torch.Tensor, weight: torch.Tensor | None, num_dims: int) -> torch.Tensor:
        rows = values.shape[: values.dim() - num_dims]
        scale = values.new_empty((*rows, *[1] * num_dims), dtype=torch.float32)
        ctx.save_for_backward(values, weight, scale)
        return torch.empty_like(values)


def _rms_norm(
    func: Any,
    values: torch.Tensor,
    normalized_shape: Sequence[int],
    weight: torch.Tensor | None = None,
    eps: float | None = None,
) -> torch.Tensor:
    values, weight = _raised(values), None if weight is None else _raised(weight)
    if weight is not None and weight.dtype != values.dtype:
        with torch._C.DisableTorchFunction():
            return functional.rms_norm(values, list(normalized_shape), weight, eps)
    result: torch.Tensor = _FusedRMSNorm.apply(values, weight, len(normalized_shape))
    return result


def _dropout(func: Any, values: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Any:
    """A GPU's mask has a byte for each number, the CPU's is as large as what it drops."""
    return (
        torch.native_dropout(values, p, training)[0] if training and not inplace else func(values, p, training, inplace)
    )


def _in_fp32(func: Any, values: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
    return func(_raised(values), *args, **kwargs)


def _raised(tensor: torch.Tensor) -> torch.Tensor:
    is_low = torch.is_autocast_enabled("cpu") and tensor.dtype in (torch.bfloat16, torch.float16)
    return tensor.float() if is_low else tensor


def _lowered(tensor: torch.Tensor) -> torch.Tensor:
    is_high = torch.is_autocast_enabled("cpu") and tensor.dtype == torch.float32
    return tensor.bfloat16() if is_high else tensor


_GPU_FUNCTIONS: Final[dict[Any, Callable[..., Any]]] = {
    functional.scaled_dot_product_attention: _attention,
    functional.rms_norm: _rms_norm,
    torch.rms_norm: _rms_norm,
    functional.dropout: _dropout,
    functional.layer_norm: _in_fp32,
    functional.group_norm: _in_fp32,
    functional.softmax: _in_fp32,
    functional.log_softmax: _in_fp32,
    functional.cross_entropy: _in_fp32,
    torch.softmax: _in_fp32,
    torch.log_softmax: _in_fp32,
}
