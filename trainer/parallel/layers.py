"""A model as its layers in order: which there are, whether they are the model, what they cost, and some of them alone.

Names stay those that the layers have in the whole model, so that a checkpoint fits however the model was split.
Not for: which rank gets which layers (`trainer.plan.split`, `trainer.parallel.stages`).
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, Final

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.utils.flop_counter import FlopCounterMode, sdpa_flop_count

from trainer.failure import ConfigError, is_out_of_memory
from trainer.task import TrainTask, inputs_of

MAX_CHECKED_PARAMETERS: Final = 50_000_000
"""Of larger models it is not tried out whether the layers make the model: that would take too long."""
_MAX_NAMES_TOLD: Final = 10
_WHAT_IS_HANDED_ON: Final = (
    "A model that is split hands on one floating-point tensor from layer to layer, with the samples in dimension 0"
)
_UNKNOWN_FLOPS: Final = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: lambda query, key, value, *_, **__: sdpa_flop_count(
        query, key, value
    )
}
"""Operations that torch's counter does not know, by the shapes of their tensors."""


@dataclass(frozen=True, kw_only=True)
class ListedLayer:
    """One layer of a model."""

    name: str
    """Its name in the whole model: `layers.3`."""
    module: nn.Module


@dataclass(frozen=True, kw_only=True)
class LayerCost:
    """What a layer does with a micro-batch."""

    shape: torch.Size
    """Of its output."""
    dtype: torch.dtype
    """Of its output."""
    flops: int
    """Floating-point operations of its forward."""


# --- Which layers there are ------------------------------------------------------------------------------------------


def listed_layers(task: TrainTask, model: nn.Module) -> tuple[ListedLayer, ...] | None:
    """The layers of `model` in order: as the task lists them, else an `nn.Sequential`'s own; None: it lists none.

    Raises ConfigError with all that is wrong with the list.
    """
    if task.layers is not None:
        whose, listed = "the task's layers(model)", task.layers(model)
    elif isinstance(model, nn.Sequential):
        whose, listed = f"the model, an nn.Sequential ({type(model).__name__}),", list(_flattened(model))
    else:
        return None
    names = {module: name for name, module in model.named_modules()}
    layers, problems = _looked_up(listed, names)
    if task.layers is None and isinstance(model, nn.Sequential):
        problems += _own_behaviour(model)
    problems += _twice(layers)
    problems += _not_listed(model, layers)
    if problems:
        raise ConfigError(
            f"{whose} cannot be taken as the layers of the model: {'; '.join(problems)}. List every part of the model "
            "once, in order, so that calling the parts in turn is model(inputs)."
        )
    return tuple(layers)


def _looked_up(listed: Any, names: dict[nn.Module, str]) -> tuple[list[ListedLayer], list[str]]:
    """(the layers, what is wrong with the others)."""
    if not isinstance(listed, Sequence | nn.ModuleList | nn.Sequential):
        return [], [f"it is {_kind(listed)}, not a list of modules"]
    layers: list[ListedLayer] = []
    problems = [] if len(listed) else ["it is empty"]
    for index, module in enumerate(listed):
        if not isinstance(module, nn.Module):
            problems.append(f"number {index} is {_kind(module)}, not a module")
        elif isinstance(module, nn.ModuleList | nn.ModuleDict):
            problems.append(f"number {index} is an {type(module).__name__}, which cannot be called: list its members")
        elif not names.get(module):
            what = "the model itself" if module in names else "not a part of the model"
            problems.append(f"number {index} ({type(module).__name__}) is {what}")
        else:
            layers.append(ListedLayer(name=names[module], module=module))
    return layers, problems


def _twice(layers: Sequence[ListedLayer]) -> Iterator[str]:
    first: dict[nn.Module, int] = {}
    for index, layer in enumerate(layers):
        if layer.module in first:
            yield f"{layer.name} is listed twice (numbers {first[layer.module]} and {index})"
        first.setdefault(layer.module, index)
    names = {layer.name for layer in layers}
    for name in sorted(names):
        parts = name.split(".")
        for outer in (".".join(parts[:end]) for end in range(1, len(parts))):
            if outer in names:
                yield f"{name} is listed, and so is {outer}, which it is a part of"


def _not_listed(model: nn.Module, layers: Sequence[ListedLayer]) -> Iterator[str]:
    prefixes = tuple(f"{layer.name}." for layer in layers)
    missing = [name for name in model.state_dict(keep_vars=True) if not name.startswith(prefixes)]
    if missing and layers:
        more = f" and {len(missing) - _MAX_NAMES_TOLD} more" if len(missing) > _MAX_NAMES_TOLD else ""
        are = "are" if len(missing) > 1 else "is"
        yield f"{', '.join(missing[:_MAX_NAMES_TOLD])}{more} {are} in no layer of the list"


def _own_behaviour(sequential: nn.Sequential) -> Iterator[str]:
    """What a call of an `nn.Sequential` does beyond calling its members."""
    if type(sequential).forward is not nn.Sequential.forward:
        yield "it has a forward of its own"
    if sequential._forward_hooks or sequential._forward_pre_hooks:
        yield "it has forward hooks, which calling its members in turn would leave out"


def _flattened(sequential: nn.Sequential) -> Iterator[nn.Module]:
    for child in sequential:
        if isinstance(child, nn.Sequential) and not any(_own_behaviour(child)):
            yield from _flattened(child)
        else:
            yield child


# --- Whether they are the model --------------------------------------------------------------------------------------


def check_composition(task: TrainTask, model: nn.Module, layers: Sequence[ListedLayer], batch: Any) -> None:
    """Try on two samples of `batch` (the first one twice if it is the only one) whether the layers called in turn are
    the model, bit for bit. Larger models than `MAX_CHECKED_PARAMETERS`, and such without memory, are not tried.

    Leaves the model's modes and the random state as they were. Raises ConfigError that names the first layer whose
    output cannot be handed on, or tells how far the results are apart, and what the model itself raises.
    """
    parameters = list(model.parameters())
    if sum(one.numel() for one in parameters) > MAX_CHECKED_PARAMETERS or any(one.is_meta for one in parameters):
        return
    inputs = inputs_of(batch)
    if not isinstance(inputs, torch.Tensor) or inputs.dim() == 0:
        raise ConfigError(f"the input of the model is {_kind(inputs)}. {_WHAT_IS_HANDED_ON}; so must its input be one.")
    device = _device_of([layer.module for layer in layers], inputs)
    samples = torch.cat((inputs, inputs))[:2].to(device)
    with _evaluating(model), torch.no_grad():
        with _same_random_numbers(device):
            expected = model(samples)
        with _same_random_numbers(device):
            found = samples
            for layer in layers:
                found = _called(layer, found)
    _check_equal(found, expected)


def _called(
    layer: ListedLayer, values: torch.Tensor, call: Callable[[torch.Tensor], Any] | None = None
) -> torch.Tensor:
    """The layer's output; `call` instead of calling it. Raises ConfigError that names the layer if it raises, or if its
    output cannot be handed on."""
    try:
        output = (call or layer.module)(values)
    except Exception as error:
        if is_out_of_memory(error):
            raise
        raise ConfigError(
            f"layer {layer.name} ({type(layer.module).__name__}), called as one of the model's layers in turn with "
            f"{_kind(values)}, raised {type(error).__name__}: {error}. {_WHAT_IS_HANDED_ON}."
        ) from error
    problem = None
    if not isinstance(output, torch.Tensor) or not output.is_floating_point():
        problem = f"returned {_kind(output)}"
    elif output.dim() == 0 or len(output) != len(values):
        problem = f"made {_kind(output)} of {_kind(values)}"
    if problem:
        raise ConfigError(f"layer {layer.name} ({type(layer.module).__name__}) {problem}. {_WHAT_IS_HANDED_ON}.")
    return output


def _check_equal(found: torch.Tensor, expected: Any) -> None:
    what = None
    if not isinstance(expected, torch.Tensor) or expected.shape != found.shape:
        what = f"the model returns {_kind(expected)}, the layers {_kind(found)}"
    elif not torch.allclose(found, expected, rtol=0, atol=0, equal_nan=True):
        what = f"the results are up to {(found - expected).abs().max():.3g} apart"
    if what:
        raise ConfigError(
            f"calling the layers in turn is not model(inputs): {what}. The model's forward does more than call the "
            "listed layers in their order; put what it does into a layer."
        )


@contextlib.contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        yield
    finally:
        for module, was_training in modes:
            module.training = was_training


def _same_random_numbers(device: torch.device) -> contextlib.AbstractContextManager[None]:
    return torch.random.fork_rng(devices=[device] if device.type == "cuda" else [])


# --- What they cost --------------------------------------------------------------------------------------------------


def boundary_shapes(
    layers: Sequence[ListedLayer | nn.Module], inputs: torch.Tensor, dtype: torch.dtype | None = None
) -> list[LayerCost]:
    """What each layer makes of a micro-batch `inputs`, by shapes alone: nothing is computed, no memory needed, no
    buffer or random state changed, wherever the layers lie. To be asked before the layers are split or checkpointed.

    `dtype`: that of autocast; None: without. Raises ConfigError that names the first layer whose output cannot be
    handed on.
    """
    named = [
        layer if isinstance(layer, ListedLayer) else ListedLayer(name=f"number {index}", module=layer)
        for index, layer in enumerate(layers)
    ]
    device = _device_of([layer.module for layer in named], inputs)
    costs: list[LayerCost] = []
    autocast = torch.autocast("cuda" if device.type == "cuda" else "cpu", dtype or torch.bfloat16, enabled=bool(dtype))
    # With gradients, as in training: without, some modules of torch take a way that cannot be followed.
    with FakeTensorMode(allow_non_fake_inputs=True) as mode, torch.enable_grad(), autocast:
        values = torch.empty(inputs.shape, dtype=inputs.dtype, device=device)
        for layer in named:
            with FlopCounterMode(display=False, custom_mapping=_UNKNOWN_FLOPS) as counter:
                values = _called(layer, values, partial(_by_shapes, layer.module, mode))
            costs.append(LayerCost(shape=values.shape, dtype=values.dtype, flops=counter.get_total_flops()))
    return costs


def _by_shapes(module: nn.Module, mode: FakeTensorMode, values: torch.Tensor) -> Any:
    state: dict[str, torch.Tensor] = {
        name: mode.from_tensor(one) for name, one in chain(module.named_parameters(), module.named_buffers())
    }
    return functional_call(module, state, (values,))


def _device_of(layers: Sequence[nn.Module], otherwise: torch.Tensor) -> torch.device:
    return next((parameter.device for layer in layers for parameter in layer.parameters()), otherwise.device)


def _kind(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return f"a {str(value.dtype).removeprefix('torch.')} tensor of shape {tuple(value.shape)}"
    return f"a {type(value).__name__}"


# --- Some of them alone ----------------------------------------------------------------------------------------------


def stage_module(layers: Sequence[ListedLayer]) -> nn.Module:
    """A module that calls `layers` in turn and holds nothing else, under the names they have in the whole model: its
    parameters and its state are the model's own, as far as they belong to these layers."""
    return _Stage(layers)


class _Stage(nn.Module):
    def __init__(self, layers: Sequence[ListedLayer]) -> None:
        super().__init__()
        self._names = tuple(layer.name for layer in layers)
        for layer in layers:
            holder: nn.Module = self
            *outer, own = layer.name.split(".")
            for part in outer:
                if part not in holder._modules:
                    holder.add_module(part, nn.Module())
                holder = holder.get_submodule(part)
            holder.add_module(own, layer.module)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        """What the first layer takes to what the last one returns."""
        for name in self._names:
            values = self.get_submodule(name)(values)
        return values
