"""Activation checkpointing changes what is kept for backward, and nothing else: not a bit, a name or a buffer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import CheckpointPolicy

from trainer.parallel.activation_checkpointing import _policy, checkpoint_activations
from trainer.recipes.common import layers_in_order
from trainer.recipes.registry import build_recipe

MODES = ("none", "selective", "full")
WIDE = torch.float64


def recipe(name: str, **args: Any) -> tuple[nn.Module, torch.Tensor]:
    """(a model in float64, a batch of 4 inputs)."""
    task = build_recipe(name, {"dtype": "float64", **args})
    assert not isinstance(task.model, nn.Module)
    assert task.collate is not None
    torch.manual_seed(0)
    return task.model(), task.collate([task.data[index] for index in range(4)])[0]


def trained(model: nn.Module, layers: list[nn.Module], inputs: torch.Tensor, mode: str) -> list[torch.Tensor]:
    """Outputs, gradients and buffers of two forwards before their backwards, as gradient accumulation has them."""
    checkpoint_activations(layers, mode)
    torch.manual_seed(1)
    outputs = [model(inputs), model(inputs.flip(0))]
    for output in outputs:
        output.square().mean().backward()
    gradients = [one.grad for one in model.parameters() if one.grad is not None]
    assert len(gradients) == len(list(model.parameters()))
    return [*outputs, *gradients, *model.buffers()]


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("transformer", {"num_layers": 2}),
    "transformer with dropout": ("transformer", {"num_layers": 2, "dropout": 0.3, "positions": "learned"}),
    "transformer, tied": ("transformer", {"num_layers": 1, "tied_embeddings": True, "mlp": "gelu"}),
    "mlp with dropout": ("mlp", {"dropout": 0.3}),
    "resnet with BatchNorm and dropout": ("resnet", {"width": 4, "dropout": 0.3}),
}


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", MODELS)
def test_outputs_gradients_and_buffers_are_the_same_bits(name: str, mode: str) -> None:
    model, inputs = recipe(MODELS[name][0], **MODELS[name][1])
    other = copy.deepcopy(model)

    expected = trained(model, layers_in_order(model), inputs, "none")
    found = trained(other, layers_in_order(other), inputs, mode)

    for one, same in zip(found, expected, strict=True):
        assert torch.equal(one, same)


class Remembering(nn.Module):
    """Its output depends on a buffer that each forward in training changes, as spectral norm's does."""

    memory: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4, dtype=WIDE)
        self.register_buffer("memory", torch.ones(4, dtype=WIDE))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = torch.tanh(self.linear(values) * self.memory.clone())
        with torch.no_grad():
            self.memory.mul_(0.5).add_(values.mean(0))
        return result


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize(
    "make",
    [
        Remembering,
        lambda: nn.Sequential(nn.Linear(4, 4, dtype=WIDE), nn.BatchNorm1d(4, dtype=WIDE), nn.Tanh()),
        lambda: nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4, dtype=WIDE)),
    ],
)
def test_what_the_forward_changes_is_changed_once(make: Callable[[], nn.Module], mode: str) -> None:
    torch.manual_seed(0)
    layer = make()
    other = copy.deepcopy(layer)
    inputs = torch.randn(6, 4, dtype=WIDE)

    expected = trained(layer, [layer], inputs, "none")
    found = trained(other, [other], inputs, mode)

    for one, same in zip(found, expected, strict=True):
        assert torch.equal(one, same)


class WritingIntoParts(nn.Module):
    """It writes into parts of a product that share no version with it, as torch's GRU does on CPUs."""

    def __init__(self) -> None:
        super().__init__()
        self.both, self.last = nn.Linear(4, 8, dtype=WIDE), nn.Linear(4, 4, dtype=WIDE)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        first, second = self.both(values).unsafe_chunk(2, -1)
        result: torch.Tensor = self.last(first.sigmoid_() * second.tanh_())
        return result


class Recurrent(nn.Module):
    """The output of a recurrent network over a sequence of one."""

    def __init__(self, kind: type[nn.RNNBase]) -> None:
        super().__init__()
        self.network = kind(4, 4, dtype=WIDE)  # type: ignore[arg-type, call-arg]  # each kind gives its own mode

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.network(values.unsqueeze(0))[0].squeeze(0)
        return result


def _linear() -> nn.Linear:
    return nn.Linear(4, 4, dtype=WIDE)


class Doubling(nn.Module):
    """It writes into the product that it returns."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = _linear()

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(torch.tanh(values))
        result += values
        return result.mul_(2)


WRITING: dict[str, Callable[[], list[nn.Module]]] = {
    "parts": lambda: [WritingIntoParts()],
    "GRU": lambda: [Recurrent(nn.GRU)],
    "LSTM": lambda: [Recurrent(nn.LSTM)],
    "RNN": lambda: [Recurrent(nn.RNN)],
    "in the middle of a layer": lambda: [nn.Sequential(_linear(), nn.ReLU(inplace=True), _linear())],
    "at the end of a layer": lambda: [nn.Sequential(_linear(), nn.SiLU(inplace=True)), _linear()],
    "in a layer of its own": lambda: [_linear(), nn.SiLU(inplace=True), _linear(), nn.ReLU(inplace=True), _linear()],
    "at the beginning of a layer": lambda: [_linear(), nn.Sequential(nn.SiLU(inplace=True), _linear(), nn.Tanh())],
    "into what is returned": lambda: [Doubling(), Doubling()],
}


@pytest.mark.parametrize("mode", ["selective", "full"])
@pytest.mark.parametrize("name", WRITING)
def test_layers_that_write_into_results_have_the_same_gradients(name: str, mode: str) -> None:
    """torch's own selective checkpointing raises an error for most, and trains GRUs and parts silently wrong."""
    torch.manual_seed(0)
    layers = WRITING[name]()
    model, other = nn.Sequential(*layers), nn.Sequential(*copy.deepcopy(layers))
    inputs = torch.randn(6, 4, dtype=WIDE)

    expected = trained(model, list(model), inputs, "none")
    found = trained(other, list(other), inputs, mode)

    for one, same in zip(found, expected, strict=True):
        assert torch.equal(one, same)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_a_second_backward_through_the_same_graph_or_a_plain_error(mode: str) -> None:
    layer = Remembering()
    checkpoint_activations([layer], mode)
    inputs = torch.randn(6, 4, dtype=WIDE, requires_grad=True)
    output = layer(inputs).sum()

    (first,) = torch.autograd.grad(output, inputs, retain_graph=True)
    if mode == "full":
        (second,) = torch.autograd.grad(output, inputs)
        assert torch.equal(first, second)
    else:
        with pytest.raises(RuntimeError, match="only allowed to backward once"):
            torch.autograd.grad(output, inputs)


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_under_autocast_it_is_computed_again_in_the_same_type(mode: str) -> None:
    model, inputs = recipe("transformer", num_layers=1, dtype="float32", dropout=0.2)
    other = copy.deepcopy(model)

    with torch.autocast("cpu", torch.bfloat16):
        expected = trained(model, layers_in_order(model), inputs, "none")
        found = trained(other, layers_in_order(other), inputs, mode)

    for one, same in zip(found, expected, strict=True):
        assert torch.equal(one, same)


class Made(TorchDispatchMode):
    """Counts the bytes that operations made and somebody still holds."""

    def __init__(self) -> None:
        super().__init__()
        self._found: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for one in output if isinstance(output, tuple | list) else (output,):
            if isinstance(one, torch.Tensor):
                storage = one.untyped_storage()
                self._found[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        return output

    @property
    def live_bytes(self) -> int:
        return sum(size for reference, size in self._found.values() if not reference.expired())


@pytest.mark.parametrize("name", ["transformer", "resnet with BatchNorm and dropout"])
def test_less_is_kept_the_more_is_computed_again(name: str) -> None:
    kept, hooked = {}, {}
    for mode in MODES:
        model, inputs = recipe(MODELS[name][0], **MODELS[name][1])
        checkpoint_activations(layers_in_order(model), mode)
        saved: dict[int, int] = {}

        def note(one: torch.Tensor, saved: dict[int, int] = saved) -> torch.Tensor:
            saved[one.untyped_storage().data_ptr()] = one.untyped_storage().nbytes()
            return one

        with Made() as made, torch.autograd.graph.saved_tensors_hooks(note, lambda one: one):
            output = model(inputs)
        kept[mode], hooked[mode] = made.live_bytes, sum(saved.values())
        del output

    assert kept["full"] < 0.7 * kept["selective"] < 0.7 * 0.9 * kept["none"], kept
    assert hooked["full"] < 0.5 * hooked["none"], hooked


def test_names_and_classes_stay_and_without_gradients_nothing_is_recomputed() -> None:
    model, inputs = recipe("transformer", num_layers=1)
    names, classes = list(model.state_dict()), [type(module) for module in model.modules()]
    calls = 0

    def count(*_: Any) -> None:
        nonlocal calls
        calls += 1

    model.get_submodule("layers.0.attention").register_forward_hook(count)
    checkpoint_activations(layers_in_order(model), "full")

    with torch.no_grad():
        model(inputs)
    assert calls == 1
    model(inputs).sum().backward()
    assert calls == 3
    assert list(model.state_dict()) == names
    assert [type(module) for module in model.modules()] == classes


def test_a_copy_of_a_checkpointed_model_is_a_model_of_its_own() -> None:
    model, inputs = recipe("mlp")
    checkpoint_activations(layers_in_order(model), "full")
    other = copy.deepcopy(model)

    other(inputs).sum().backward()

    assert all(one.grad is None for one in model.parameters())
    assert all(one.grad is not None for one in other.parameters())


@pytest.mark.parametrize("mode", ["selective", "full"])
def test_checkpointed_layers_can_be_sharded(mode: str) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model, inputs = recipe("transformer", num_layers=2, dropout=0.2)
    other = copy.deepcopy(model)
    expected = trained(model, layers_in_order(model), inputs, "none")
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        checkpoint_activations(layers_in_order(other), mode)
        for layer in layers_in_order(other):
            fully_shard(layer, mesh=init_device_mesh("cpu", (1,)))
        fully_shard(other, mesh=init_device_mesh("cpu", (1,)))
        found = trained(other, [], inputs, "none")
    finally:
        dist.destroy_process_group()

    for one, same in zip(found, expected, strict=True):
        assert torch.equal(one.to_local() if isinstance(one, DTensor) else one, same)


def test_attention_that_draws_random_numbers_is_computed_again() -> None:
    """Kept, it would leave the generator where it was, and the dropouts after it would not be those of the forward."""
    attention = torch.ops.aten._scaled_dot_product_flash_attention.default
    tensor = torch.zeros(1)

    assert _policy(None, attention, tensor, tensor, tensor) == CheckpointPolicy.MUST_SAVE
    assert _policy(None, attention, tensor, tensor, tensor, 0.0, True) == CheckpointPolicy.MUST_SAVE
    assert _policy(None, attention, tensor, tensor, tensor, 0.1, True) == CheckpointPolicy.PREFER_RECOMPUTE
    efficient = torch.ops.aten._scaled_dot_product_efficient_attention.default
    assert _policy(None, efficient, *[tensor] * 4, True, 0.1) == CheckpointPolicy.PREFER_RECOMPUTE
    assert _policy(None, efficient, *[tensor] * 4, True, dropout_p=0.1) == CheckpointPolicy.PREFER_RECOMPUTE


def test_another_mode_is_refused() -> None:
    with pytest.raises(ValueError, match="'partial': one of none, selective, full"):
        checkpoint_activations([nn.Linear(1, 1)], "partial")
