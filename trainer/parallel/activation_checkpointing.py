"""Activation checkpointing: layers that keep less for backward, and compute it again there. Less memory, more time.

`full` keeps a layer's input alone; `selective` also the results of matrix products, convolutions and attention, which
cost most to compute. Values and gradients are the same bits either way. Not for: choosing the mode (`trainer.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, Final

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts, noop_context_fn

from trainer.parallel.in_place import begins_in_place, copied
from trainer.parallel.kept_results import KeptResults

_aten = torch.ops.aten
_KEPT: Final = frozenset(
    {
        _aten.mm,
        _aten.addmm,
        _aten.bmm,
        _aten.baddbmm,
        _aten._scaled_mm,
        _aten.convolution,
        _aten._scaled_dot_product_flash_attention,
        _aten._scaled_dot_product_flash_attention_for_cpu,
        _aten._scaled_dot_product_efficient_attention,
        _aten._scaled_dot_product_cudnn_attention,
        _aten._scaled_dot_product_fused_attention_overrideable,
    }
)
"""Operations whose results `selective` keeps."""
_DROPOUT_ARGUMENT: Final = "dropout_p"

_Contexts = tuple[AbstractContextManager[Any], AbstractContextManager[Any]]


def checkpoint_activations(layers: Sequence[nn.Module], mode: str) -> None:
    """Let each of `layers`, in place, compute again in backward what it does not keep.

    `mode`: "none", "selective" or "full". Names and classes stay as they are. Random numbers of the second time are
    those of the first, and buffers (BatchNorm's statistics) are not changed by it. To be applied before the layers are
    compiled, sharded or wrapped, and only once. Raises ValueError for another mode.
    """
    if mode not in _CONTEXTS:
        raise ValueError(f"activation_checkpointing {mode!r}: one of {', '.join(_CONTEXTS)}")
    contexts = _CONTEXTS[mode]
    if contexts is None:
        return
    for layer in layers:
        if getattr(layer, "inplace", False) is True:
            continue  # it writes over its input, so there is no input to begin again from, and nothing to save
        forward = layer.forward
        if begins_in_place(layer):
            forward = partial(_on_a_copy, forward)
        # On the instance: a wrapper would change names, a subclass what others (fully_shard, say) make of the class.
        layer.forward = partial(_recomputed, layer, forward, contexts)


def _on_a_copy(forward: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """What is written over is not there any more when it is to be computed again."""
    return forward(*copied(args), **copied(kwargs))


def _recomputed(
    layer: nn.Module,
    forward: Callable[..., Any],
    contexts: Callable[[], _Contexts],
    *args: Any,
    **kwargs: Any,
) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    if torch.compiler.is_compiling():
        # What is compiled computes nothing twice that writes into buffers. And it has to see the function as it is.
        if contexts is noop_context_fn:
            return checkpoint(forward, *args, use_reentrant=False, **kwargs)
        return checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    kept = KeptResults(_is_kept)
    if contexts is not noop_context_fn:
        contexts = kept.contexts
    if next(layer.buffers(), None) is not None:
        contexts = partial(_and_buffers, contexts, layer)
    output = checkpoint(forward, *args, use_reentrant=False, context_fn=contexts, **kwargs)
    kept.let_go(output)
    return output


# --- What is kept ----------------------------------------------------------------------------------------------------


def _policy(context: Any, operation: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_kept = _is_kept(operation, args, kwargs)
    return CheckpointPolicy.MUST_SAVE if is_kept else CheckpointPolicy.PREFER_RECOMPUTE


def _is_kept(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    return getattr(operation, "overloadpacket", None) in _KEPT and not _draws(operation, args, kwargs)


def _draws(operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> bool:
    """Whether an attention kernel draws random numbers: kept, it would not draw them the second time, and whatever
    draws after it would get others than the first time, so that gradients were silently wrong."""
    for place, argument in enumerate(operation._schema.arguments):
        if argument.name == _DROPOUT_ARGUMENT:
            value = args[place] if place < len(args) else kwargs.get(_DROPOUT_ARGUMENT, argument.default_value)
            return bool(value)
    return False


def _selected() -> _Contexts:
    return create_selective_checkpoint_contexts(_policy)


_CONTEXTS: Final[dict[str, Callable[[], _Contexts] | None]] = {
    "none": None,
    "selective": _selected,
    "full": noop_context_fn,
}


# --- Buffers ---------------------------------------------------------------------------------------------------------


def _and_buffers(contexts: Callable[[], _Contexts], layer: nn.Module) -> _Contexts:
    """Contexts of one forward and of its repetition, which works on copies of the buffers as the forward found them:
    what the forward wrote into them stays, and is not written twice."""
    first, second = contexts()
    found = _FoundBuffers(layer)
    return _Both(found, first), _Both(_Replaced(layer, found), second)


class _FoundBuffers(AbstractContextManager[None]):
    """Around forward: keeps those buffers that it changes as they were."""

    def __init__(self, layer: nn.Module) -> None:
        self._layer = layer
        self.changed: dict[tuple[nn.Module, str], torch.Tensor] = {}

    def __enter__(self) -> None:
        self._before = [(place, one, one._version, one.detach().clone()) for place, one in _buffers(self._layer)]

    def __exit__(self, *error: object) -> None:
        # BatchNorm's kernel changes statistics without a new version, but does not read them in training.
        self.changed = {
            place: copy
            for place, one, version, copy in self._before
            if one._version != version or place[0]._buffers[place[1]] is not one
        }
        del self._before


class _Replaced(AbstractContextManager[None]):
    """Around the repetition, which may come more than once: the layer has copies of its buffers."""

    def __init__(self, layer: nn.Module, found: _FoundBuffers) -> None:
        self._layer, self._found = layer, found

    def __enter__(self) -> None:
        self._own = _buffers(self._layer)
        for place, one in self._own:
            place[0]._buffers[place[1]] = self._found.changed.get(place, one).detach().clone()

    def __exit__(self, *error: object) -> None:
        for (module, name), one in self._own:
            module._buffers[name] = one
        del self._own


class _Both(AbstractContextManager[None]):
    """One context inside the other, as often as wanted."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._outer, self._inner = outer, inner

    def __enter__(self) -> None:
        self._outer.__enter__()
        self._inner.__enter__()

    def __exit__(self, *error: Any) -> None:
        self._inner.__exit__(*error)
        self._outer.__exit__(*error)


def _buffers(layer: nn.Module) -> list[tuple[tuple[nn.Module, str], torch.Tensor]]:
    """((the module that has it, name), buffer) of every buffer in the layer."""
    return [
        ((module, name), buffer)
        for module in layer.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    ]
