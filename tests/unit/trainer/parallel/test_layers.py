"""A model as its layers: which lists are taken, that they make the model, what they cost, and stages made of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import nn

from trainer.failure import ConfigError
from trainer.parallel.layers import (
    ListedLayer,
    boundary_shapes,
    check_composition,
    listed_layers,
    stage_module,
)
from trainer.recipes.registry import build_recipe
from trainer.task import TrainTask, inputs_of

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "transformer": ("transformer", {}),
    "transformer, tied, learned positions": ("transformer", {"tied_embeddings": True, "positions": "learned"}),
    "mlp": ("mlp", {}),
    "mlp, regression": ("mlp", {"data": "diabetes"}),
    "resnet": ("resnet", {"width": 8}),
    "resnet, large stem, dropout": ("resnet", {"width": 8, "data": "synthetic", "stem": "large", "dropout": 0.5}),
}


def task_of(model: nn.Module, layers: Callable[[Any], Sequence[Any]] | None = None) -> TrainTask:
    return TrainTask(model=model, loss=nn.functional.mse_loss, data=[], layers=layers)


def recipe(name: str) -> tuple[TrainTask, nn.Module, Any]:
    """(task, model, a batch of 4)."""
    task = build_recipe(*RECIPES[name])
    assert not isinstance(task.model, nn.Module)
    assert task.collate is not None
    torch.manual_seed(0)
    return task, task.model(), task.collate([task.data[index] for index in range(4)])


def layers_of(task: TrainTask, model: nn.Module) -> tuple[ListedLayer, ...]:
    layers = listed_layers(task, model)
    assert layers is not None
    return layers


class Pair(nn.Module):
    """Two linear layers, of which `forward` makes what a test wants."""

    def __init__(self, forward: Callable[[Any, torch.Tensor], Any] | None = None) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        self._forward = forward

    def forward(self, values: torch.Tensor) -> Any:
        return self._forward(self, values) if self._forward else self.second(self.first(values))


def pair_layers(model: Pair) -> list[nn.Module]:
    return [model.first, model.second]


# --- Which layers there are ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_the_recipes_are_lists_of_layers_that_compose_to_the_model(name: str) -> None:
    task, model, batch = recipe(name)

    layers = layers_of(task, model)
    check_composition(task, model, layers, batch)

    assert all(model.get_submodule(layer.name) is layer.module for layer in layers)
    assert len(layers) >= 3
    # In training too, with the same random numbers.
    torch.manual_seed(1)
    values = inputs_of(batch)
    for layer in layers:
        values = layer.module(values)
    torch.manual_seed(1)
    assert torch.equal(values, model(inputs_of(batch)))


def test_names_are_those_in_the_model() -> None:
    task, model, _ = recipe("transformer")

    names = [layer.name for layer in layers_of(task, model)]

    assert names == ["embedding", "layers.0", "layers.1", "layers.2", "layers.3", "norm", "head"]


def test_a_sequential_is_its_own_list_with_those_inside_flattened() -> None:
    class Twice(nn.Sequential):
        def forward(self, input: Any) -> Any:
            return super().forward(super().forward(input))

    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU())), Twice(nn.Linear(4, 4)))

    layers = layers_of(task_of(model), model)

    assert [layer.name for layer in layers] == ["0.0", "0.1.0", "1"]
    check_composition(task_of(model), model, layers, torch.zeros(1, 4))


def test_other_models_list_no_layers() -> None:
    assert listed_layers(task_of(Pair()), Pair()) is None


def test_all_that_is_wrong_with_a_list_is_told_at_once() -> None:
    parts = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model = nn.ModuleDict({"a": parts, "b": nn.BatchNorm1d(4)})
    model.register_buffer("scale", torch.ones(4))
    listed = [parts, parts, parts[0], nn.ReLU(), "b", model]

    with pytest.raises(ConfigError) as told:
        listed_layers(task_of(model, lambda _: listed), model)

    for part in (
        r"number 3 (ReLU) is not a part of the model",
        r"number 4 is a str, not a module",
        r"number 5 is an ModuleDict, which cannot be called: list its members",
        r"a is listed twice (numbers 0 and 1)",
        r"a.0 is listed, and so is a, which it is a part of",
        r"scale, b.weight, b.bias, b.running_mean, b.running_var, b.num_batches_tracked are in no layer of the list",
        r"List every part of the model once",
    ):
        assert part in str(told.value)


@pytest.mark.parametrize(
    ("listed", "problem"),
    [
        (lambda model: [], "it is empty"),
        (lambda model: (one for one in (model.first,)), "it is a generator, not a list of modules"),
        (lambda model: None, "it is a NoneType, not a list"),
        (lambda model: [model], r"number 0 \(Pair\) is the model itself"),
        (lambda model: [model.first], "second.weight, second.bias are in no layer"),
    ],
)
def test_what_is_no_list_of_the_model_is_refused(listed: Callable[[Any], Any], problem: str) -> None:
    model = Pair()

    with pytest.raises(ConfigError, match=problem):
        listed_layers(task_of(model, listed), model)


def test_a_sequential_that_does_more_than_call_its_members_is_refused() -> None:
    class Residual(nn.Sequential):
        def forward(self, input: Any) -> Any:
            return input + super().forward(input)

    model = Residual(nn.Linear(4, 4), nn.Linear(4, 4))
    model.register_forward_hook(lambda module, args, output: output)

    with pytest.raises(ConfigError, match=r"it has a forward of its own; it has forward hooks"):
        listed_layers(task_of(model), model)


# --- Whether they are the model --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("forward", "problem"),
    [
        (lambda model, values: model.first(model.second(values)), r"the results are up to \S+ apart"),
        (lambda model, values: model.second(model.first(values)) + values, r"the results are up to \S+ apart"),
        (lambda model, values: model.second(model.first(values)).sum(0), r"shape \(4,\), the layers .*shape \(2, 4\)"),
        (lambda model, values: (model.second(model.first(values)),), r"the model returns a tuple"),
    ],
)
def test_layers_that_are_not_the_model_are_refused(forward: Callable[[Any, Any], Any], problem: str) -> None:
    model = Pair(forward)
    task = task_of(model, pair_layers)

    with pytest.raises(ConfigError, match=rf"calling the layers in turn is not model\(inputs\): .*{problem}"):
        check_composition(task, model, layers_of(task, model), torch.randn(1, 4))


class Odd(nn.Module):
    """A layer that returns what a test wants."""

    def __init__(self, make: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self.make = make

    def forward(self, values: torch.Tensor) -> Any:
        return self.make(values)


ODD = [
    (lambda values: (values, None), r"layer 1 \(Odd\) returned a tuple"),
    (lambda values: values.argmax(-1), r"layer 1 \(Odd\) returned a int64 tensor of shape \(2,\)"),
    (lambda values: values.sum(), r"layer 1 \(Odd\) made a float32 tensor of shape \(\) of"),
    (lambda values: values.flatten(), r"layer 1 \(Odd\) made a float32 tensor of shape \(8,\) of a .* \(2, 4\)"),
    (lambda values: values @ torch.ones(3, 3), r"layer 1 \(Odd\), called .*, raised RuntimeError: "),
]


@pytest.mark.parametrize(("make", "problem"), ODD)
def test_the_first_layer_that_cannot_hand_on_its_output_is_named(make: Callable[[Any], Any], problem: str) -> None:
    model = nn.Sequential(nn.Linear(4, 4), Odd(make), Odd(lambda values: values))
    task = TrainTask(model=model, loss=nn.functional.mse_loss, data=[], forward=None)
    layers = layers_of(task, model)

    class Free(nn.Module):
        def forward(self, values: torch.Tensor) -> torch.Tensor:
            return values

    with pytest.raises(ConfigError, match=problem):
        check_composition(task, Free(), layers, torch.randn(2, 4))
    with pytest.raises(ConfigError, match=problem):
        boundary_shapes(layers, torch.randn(2, 4))


def test_trying_out_leaves_modes_statistics_and_random_numbers_alone() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.BatchNorm1d(4), nn.Dropout(0.5))
    model[1].eval()
    task = task_of(model)
    before, random = {name: one.clone() for name, one in model.state_dict().items()}, torch.get_rng_state()

    check_composition(task, model, layers_of(task, model), torch.randn(3, 4, generator=torch.Generator()))
    boundary_shapes(layers_of(task, model), torch.zeros(3, 4))

    assert torch.equal(torch.get_rng_state(), random)
    assert [module.training for module in model] == [True, False, True, True]
    assert all(torch.equal(one, before[name]) for name, one in model.state_dict().items())


def test_a_layer_that_always_draws_random_numbers_draws_the_same_in_both() -> None:
    model = nn.Sequential(nn.Linear(4, 4), Odd(lambda values: nn.functional.dropout(values, 0.5)))

    check_composition(task_of(model), model, layers_of(task_of(model), model), torch.randn(2, 4))


def test_the_input_of_a_split_model_is_one_tensor() -> None:
    model = Pair()
    task = task_of(model, pair_layers)

    with pytest.raises(ConfigError, match="the input of the model is a dict"):
        check_composition(task, model, layers_of(task, model), {"text": torch.zeros(1, 4)})


# --- What they cost --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_shapes_are_those_of_the_real_outputs(name: str) -> None:
    task, model, batch = recipe(name)
    layers = layers_of(task, model)

    costs = boundary_shapes(layers, inputs_of(batch))

    values = inputs_of(batch)
    for layer, cost in zip(layers, costs, strict=True):
        values = layer.module(values)
        assert (cost.shape, cost.dtype) == (values.shape, values.dtype)


def test_operations_are_counted_layer_by_layer_with_attention() -> None:
    task = build_recipe("transformer", {"size": "small"})
    assert not isinstance(task.model, nn.Module)
    with torch.device("meta"):
        model = task.model()

    costs = boundary_shapes(layers_of(task, model), torch.zeros(2, 256, dtype=torch.int64))

    assert sum(cost.flops for cost in costs) * 3 == pytest.approx(2 * (task.flops_per_sample or 0), rel=0.05)
    assert costs[0].flops == 0
    assert len({cost.flops for cost in costs[1:-2]}) == 1


def test_operations_are_the_same_wherever_the_layers_lie() -> None:
    task, model, batch = recipe("transformer")

    here = boundary_shapes(layers_of(task, model), inputs_of(batch))
    without_memory = model.to("meta")

    assert boundary_shapes(layers_of(task, without_memory), inputs_of(batch)) == here


def test_under_autocast_outputs_have_its_type() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))

    costs = boundary_shapes(list(model), torch.zeros(3, 4), torch.bfloat16)

    assert [(tuple(cost.shape), cost.dtype) for cost in costs] == [((3, 4), torch.bfloat16), ((3, 2), torch.bfloat16)]


def test_a_layer_larger_than_any_memory_is_measured() -> None:
    with torch.device("meta"):
        layer = nn.Linear(10**6, 10**7, bias=False)

    (cost,) = boundary_shapes([layer], torch.empty(2, 10**6, device="meta"))

    assert cost.flops == 2 * 2 * 10**13


# --- Some of them alone ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", RECIPES)
def test_stages_hold_their_layers_alone_under_the_models_names(name: str) -> None:
    task, model, batch = recipe(name)
    layers = layers_of(task, model)
    whole = model.state_dict()

    stages = [stage_module(layers[:2]), stage_module(layers[2:])]

    for stage, own in zip(stages, (layers[:2], layers[2:]), strict=True):
        prefixes = tuple(f"{layer.name}." for layer in own)
        assert list(stage.state_dict()) == [name for name in whole if name.startswith(prefixes)]
        assert all(one is model.get_parameter(name) for name, one in stage.named_parameters(remove_duplicate=False))
    model.eval()
    for stage in stages:
        stage.eval()
    assert torch.equal(stages[1](stages[0](inputs_of(batch))), model(inputs_of(batch)))


def test_layers_of_other_stages_are_freed() -> None:
    import gc
    import weakref

    task, model, _ = recipe("transformer")
    layers = layers_of(task, model)
    foreign = weakref.ref(layers[3].module)
    stage = stage_module(layers[:2])

    del model, layers
    gc.collect()

    assert foreign() is None
    assert [name for name, _ in stage.named_children()] == ["embedding", "layers"]


def test_a_stage_has_modes_and_calls_what_replaced_a_layer() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
    stage = stage_module(layers_of(task_of(model), model))

    stage.eval()
    assert not model[1].training
    stage.train()
    assert model[1].training
    stage.add_module("1", nn.Identity())
    assert torch.equal(stage(torch.ones(2, 4)), model[0](torch.ones(2, 4)))
