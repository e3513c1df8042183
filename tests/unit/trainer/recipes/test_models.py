"""The recipes' models: sizes, shapes, and the properties that a reader relies on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import nn

from trainer.data.rows import Rows
from trainer.plan.recipe_catalog import RECIPES, complete_args
from trainer.recipes.mlp import Statistics, TableModel
from trainer.recipes.registry import BUILDERS, build_recipe
from trainer.recipes.resnet import ResNet, ResNetConfig, flops_per_sample
from trainer.recipes.transformer import Transformer, TransformerConfig, config_of

GPT2_VOCABULARY = 50_257


def num_parameters(model: nn.Module) -> int:
    return sum(one.numel() for one in model.parameters())


def built(name: str, **args: Any) -> nn.Module:
    """The recipe's model."""
    model = build_recipe(name, args).model
    assert not isinstance(model, nn.Module), "a recipe gives a function, so that the loop can seed before it builds"
    return model()


def test_catalog_and_builders_know_the_same_recipes() -> None:
    assert set(BUILDERS) == set(RECIPES)


@pytest.mark.parametrize("name", RECIPES)
def test_a_builder_uses_every_parameter_of_the_catalog_and_no_other(
    name: str, files: dict[str, dict[str, Any]]
) -> None:
    class Watched(dict[str, Any]):
        def __getitem__(self, key: str) -> Any:
            used.add(key)
            return super().__getitem__(key)

    used: set[str] = set()
    for args in ({}, files[name]):
        task = BUILDERS[name](Watched(complete_args(name, args)))
        assert len(task.data) > 0
        assert len(task.eval_data) > 0

    assert used == {one.name for one in RECIPES[name].parameters}


@pytest.mark.parametrize("name", RECIPES)
def test_a_users_own_files_are_trained_on(name: str, files: dict[str, dict[str, Any]]) -> None:
    task = build_recipe(name, files[name])
    assert task.collate is not None

    inputs, target = task.collate([task.data[index] for index in range(2)])
    loss = torch.as_tensor(task.loss(built(name, **files[name])(inputs), target))
    loss.backward()

    assert loss.isfinite()


@pytest.fixture
def files(tmp_path: Path) -> dict[str, dict[str, Any]]:
    """Arguments of each recipe for data in files."""
    np.arange(100, dtype=np.uint16).tofile(tmp_path / "tokens.bin")
    np.arange(50, dtype=np.uint16).tofile(tmp_path / "more.bin")
    (tmp_path / "table.csv").write_text("a,b\n" + "".join(f"{row},{2 * row}\n" for row in range(10)))
    for number, name in enumerate(["train/cat/1.png", "train/cat/2.png", "train/dog/1.png", "test/dog/1.png"]):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        Image.new("RGB", (20, 30), (number * 50, 0, 0)).save(tmp_path / name)
    return {
        "transformer": {
            "data": str(tmp_path / "tokens.bin"),
            "eval_data": str(tmp_path / "more.bin"),
            "vocab_size": 100,
            "tokens_per_sample": 8,
        },
        "mlp": {"data": str(tmp_path / "table.csv"), "task": "regression", "target": "b"},
        "resnet": {
            "data": str(tmp_path / "train"),
            "eval_data": str(tmp_path / "test"),
            "image_size": 16,
            "width": 8,
        },
    }


# --- Transformer -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "bytes_as_tokens", "tied_gpt2_tokens"),
    [
        ("tiny", 246_336, 3_430_016),
        ("small", 10_818_432, 29_920_512),
        ("125m", 85_347_072, 123_551_232),
        ("350m", 304_137_216, 355_076_096),
        ("1b", 908_273_664, 1_010_151_424),
    ],
)
def test_exact_numbers_of_parameters_of_the_sizes(size: str, bytes_as_tokens: int, tied_gpt2_tokens: int) -> None:
    large = {"vocab_size": GPT2_VOCABULARY, "tied_embeddings": True}
    configs = [config_of(complete_args("transformer", {"size": size, **args})) for args in ({}, large)]
    with torch.device("meta"):
        counts = [num_parameters(Transformer(config)) for config in configs]

    assert counts == [bytes_as_tokens, tied_gpt2_tokens]


@pytest.mark.parametrize("positions", ["rotary", "learned"])
@pytest.mark.parametrize("mlp", ["swiglu", "gelu"])
def test_no_token_sees_those_after_it_and_each_sees_those_before(positions: str, mlp: str) -> None:
    torch.manual_seed(0)
    model = built("transformer", positions=positions, mlp=mlp, dtype="float64").eval()
    tokens = torch.randint(256, (1, 16))
    changed = tokens.clone()
    changed[0, 8] = (changed[0, 8] + 1) % 256

    difference = (model(tokens) - model(changed)).abs().amax(dim=(0, 2))

    assert difference[:8].max() == 0
    assert difference[8:].min() > 0


def test_the_order_of_earlier_tokens_matters() -> None:
    torch.manual_seed(0)
    model = built("transformer", dtype="float64").eval()
    tokens = torch.tensor([[1, 2, 3, 4], [2, 1, 3, 4]])

    scores = model(tokens)

    assert (scores[0, 3] - scores[1, 3]).abs().max() > 1e-6


def test_rotary_attention_depends_on_distances_alone() -> None:
    from trainer.recipes.transformer import rotary_table, turned

    torch.manual_seed(0)
    query, key = torch.randn(2, 1, 1, 1, 8, dtype=torch.float64).expand(2, 1, 1, 10, 8)
    table = rotary_table(10, 8, query)

    products = (turned(query, table) @ turned(key, table).transpose(-1, -2))[0, 0]

    for distance in range(-3, 4):
        along = products.diagonal(distance)
        assert torch.allclose(along, along[:1].expand_as(along), rtol=0, atol=1e-12)


def test_rotary_tables_are_made_once_and_are_no_state() -> None:
    from trainer.recipes.transformer import rotary_table

    model = built("transformer")
    assert not list(model.buffers())
    assert not [name for name in model.state_dict() if "rotary" in name]
    query = torch.zeros(1, 1, 10, 8)

    assert rotary_table(10, 8, query) is rotary_table(10, 8, query.half())
    assert rotary_table(10, 8, query.double()).dtype == torch.float64
    assert rotary_table(11, 8, query).shape == (2, 11, 4)
    assert rotary_table(10, 8, query.to("meta")).is_meta


def test_a_rotary_table_that_was_made_for_nothing_but_shapes_or_inference_is_not_trained_with() -> None:
    from torch._subclasses.fake_tensor import FakeTensorMode

    from trainer.recipes.transformer import _kept_rotary_table

    model = built("transformer", tokens_per_sample=23)
    tokens = torch.zeros(1, 23, dtype=torch.int64)
    _kept_rotary_table.cache_clear()
    with FakeTensorMode(allow_non_fake_inputs=True):
        model(torch.zeros(1, 23, dtype=torch.int64))
    with torch.inference_mode():
        model(tokens)

    model(tokens).sum().backward()

    assert {type(one.grad) for one in model.parameters()} == {torch.Tensor}


def test_attention_with_a_part_of_the_heads_is_that_part_of_the_whole() -> None:
    """As tensor-parallel ranks have it: rows of query, key and value, columns of output, and the sum of the results."""
    from trainer.recipes.transformer import Attention

    torch.manual_seed(0)
    config = config_of(complete_args("transformer", {"width": 32, "num_heads": 4}))
    whole = Attention(config).double()
    values = torch.randn(2, 6, 32, dtype=torch.float64)
    parts = []
    for rows in torch.arange(32).split((8, 24)):
        part = Attention(config).double()
        for name in ("query", "key", "value"):
            setattr(part, name, nn.Linear(32, len(rows), bias=False))
            part.get_submodule(name).weight = nn.Parameter(whole.get_parameter(f"{name}.weight")[rows])
        part.output = nn.Linear(len(rows), 32, bias=False)
        part.output.weight = nn.Parameter(whole.output.weight[:, rows])
        parts.append(part(values))

    assert torch.allclose(parts[0] + parts[1], whole(values), rtol=0, atol=1e-12)


@pytest.mark.parametrize("hands_on_plain_tensors", [True, False])
def test_attention_takes_what_torch_splits_by_columns_plain_or_as_dtensor(hands_on_plain_tensors: bool) -> None:
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

    from trainer.recipes.transformer import TENSOR_PARALLEL_PLAN

    torch.manual_seed(0)
    model = built("transformer", dtype="float64", num_layers=1)
    tokens = torch.randint(256, (2, 16))
    model(tokens).square().mean().backward()
    expected = {name: one.grad for name, one in model.named_parameters()}
    expected["outputs"] = model(tokens).detach()
    model.zero_grad()
    styles: dict[str, ParallelStyle] = {
        name: ColwiseParallel(use_local_output=hands_on_plain_tensors) if how == "colwise" else RowwiseParallel()
        for name, how in TENSOR_PARALLEL_PLAN.items()
    }
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        parallelize_module(model, init_device_mesh("cpu", (1,)), styles)
        found = model(tokens)
        found.square().mean().backward()
    finally:
        dist.destroy_process_group()

    gradients: dict[str, Any] = {name: one.grad for name, one in model.named_parameters()}
    for name, one in {**gradients, "outputs": found.detach()}.items():
        own = one.to_local() if isinstance(one, DTensor) else one
        torch.testing.assert_close(own, expected[name], rtol=0, atol=1e-12)


def test_tied_embeddings_are_one_parameter() -> None:
    tied, apart = built("transformer", tied_embeddings=True), built("transformer")

    assert num_parameters(apart) - num_parameters(tied) == 256 * 64
    assert isinstance(tied, Transformer)
    assert tied.head.weight is tied.embedding.tokens.weight


def test_the_floating_point_operations_are_those_that_torch_counts() -> None:
    from torch.utils.flop_counter import FlopCounterMode

    config = config_of(complete_args("transformer", {"size": "125m"}))
    with torch.device("meta"), FlopCounterMode(display=False) as counter:
        Transformer(config)(torch.zeros(1, config.tokens_per_sample, dtype=torch.int64)).sum().backward()

    assert counter.get_total_flops() == pytest.approx(config.flops_per_sample, rel=0.1)


def test_every_module_of_the_tensor_parallel_plan_exists() -> None:
    from trainer.recipes.transformer import TENSOR_PARALLEL_PLAN

    names = {name for name, _ in built("transformer").named_modules()}

    assert {name.replace("*", "0") for name in TENSOR_PARALLEL_PLAN} <= names
    assert set(TENSOR_PARALLEL_PLAN.values()) == {"colwise", "rowwise"}


# --- ResNet ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("depth", "count"), [(18, 11_689_512), (34, 21_797_672), (50, 25_557_032)])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_resnets_have_the_customary_numbers_of_parameters(depth: int, count: int, norm: str) -> None:
    with torch.device("meta"):
        assert num_parameters(ResNet(ResNetConfig(depth=depth, norm=norm))) == count


def test_a_resnet_18_on_224_pixels_takes_the_customary_operations() -> None:
    assert flops_per_sample(ResNetConfig(depth=18), 224) == pytest.approx(3 * 2 * 1.814e9, rel=0.01)


@pytest.mark.parametrize("depth", [18, 50])
@pytest.mark.parametrize(("stem", "size"), [("small", 8), ("large", 64)])
def test_images_of_any_size_get_a_score_per_class(depth: int, stem: str, size: int) -> None:
    model = ResNet(ResNetConfig(depth=depth, width=8, channels=1, num_classes=5, stem=stem, norm="group"))

    assert model(torch.zeros(2, 1, size, size)).shape == (2, 5)


def test_with_group_norm_a_sample_does_not_see_its_batch() -> None:
    torch.manual_seed(0)
    model = built("resnet", width=8, norm="group", dtype="float64")
    images = torch.randn(3, 1, 8, 8, dtype=torch.float64)

    assert torch.allclose(model(images)[:1], model(images[:1]), rtol=0, atol=1e-12)


# --- MLP -------------------------------------------------------------------------------------------------------------


def test_features_are_standardised_with_the_statistics_of_training_rows_alone() -> None:
    task = build_recipe("mlp", {"data": "wine", "dtype": "float64"})
    model = built("mlp", data="wine", dtype="float64")
    assert isinstance(model, TableModel)

    values = model.standardise(task.data.inputs)

    assert values.mean(dim=0).abs().max() < 1e-12
    assert (values.square().mean(dim=0) - 1).abs().max() < 1e-12
    assert model.standardise(task.eval_data.inputs).mean(dim=0).abs().max() > 1e-3


def test_a_regression_answers_in_the_targets_unit() -> None:
    torch.manual_seed(0)
    task = build_recipe("mlp", {"data": "diabetes", "dtype": "float64"})
    output = built("mlp", data="diabetes", dtype="float64")(task.data.inputs).detach()

    assert output.shape == task.data.targets.shape
    assert output.mean().item() == pytest.approx(task.data.targets.mean().item(), rel=0.2)
    mean = torch.full_like(task.data.targets, task.data.targets.mean().item())
    assert torch.as_tensor(task.loss(mean, task.data.targets)) == pytest.approx(1)
    variance = task.data.targets.var(correction=0).item()
    assert task.metrics["mean_squared_error"](mean, task.data.targets) == pytest.approx(variance)


def test_a_column_that_never_changes_does_no_harm() -> None:
    statistics = Statistics.of(Rows(torch.tensor([[1.0, 5.0], [3.0, 5.0]]), torch.tensor([0, 1])))

    assert statistics.deviation.tolist() == [1, 1]
    assert statistics.mean.tolist() == [2, 5]


def test_without_hidden_layers_it_is_a_linear_model() -> None:
    assert num_parameters(built("mlp", hidden=[])) == 64 * 10 + 10


# --- All -------------------------------------------------------------------------------------------------------------

SMALL: dict[str, dict[str, Any]] = {"transformer": {}, "mlp": {}, "resnet": {"width": 8, "norm": "group"}}


@pytest.mark.parametrize("name", SMALL)
def test_in_float64_everything_is_float64(name: str) -> None:
    task = build_recipe(name, {**SMALL[name], "dtype": "float64"})
    model = built(name, **SMALL[name], dtype="float64")
    assert task.collate is not None
    inputs, target = task.collate([task.data[index] for index in range(3)])

    loss = torch.as_tensor(task.loss(model(inputs), target))
    loss.backward()

    assert loss.dtype == torch.float64
    assert {one.dtype for one in model.parameters()} == {torch.float64}
    assert all(one.grad is not None and one.grad.dtype == torch.float64 for one in model.parameters())


@pytest.mark.parametrize("name", SMALL)
def test_the_same_seed_builds_the_same_model_in_either_type(name: str) -> None:
    torch.manual_seed(7)
    single = built(name, **SMALL[name])
    torch.manual_seed(7)
    double = built(name, **SMALL[name], dtype="float64")

    for one, other in zip(single.parameters(), double.parameters(), strict=True):
        assert torch.equal(one, other.float())


@pytest.mark.parametrize(
    ("name", "args", "expected"),
    [
        ("transformer", {}, 6.9961723940879565),
        (
            "transformer",
            {"positions": "learned", "mlp": "gelu", "tied_embeddings": True, "dropout": 0.1},
            -2.2118001806879914,
        ),
        ("resnet", {"width": 8}, -11.897271930105187),
        ("resnet", {"width": 8, "depth": 50, "norm": "group"}, 1.70233830625358),
        ("mlp", {}, 0.06845063907254101),
        ("mlp", {"data": "diabetes", "activation": "gelu", "hidden": [16, 8]}, -2.0090655729547837),
    ],
)
def test_a_seed_means_the_same_initial_weights_in_every_version(
    name: str, args: dict[str, Any], expected: float
) -> None:
    """The figures were taken before the models became lists of layers. Each weight counts with a factor of its own, so
    that other draws, or the same in another order, give another sum; the last bits, which depend on the processor, do
    not matter."""
    torch.manual_seed(7)
    weights = torch.cat([one.detach().double().flatten() for one in built(name, **args).parameters()])
    factors = torch.arange(1, len(weights) + 1, dtype=torch.float64).sqrt().mul(997).cos()

    assert float(weights @ factors) == pytest.approx(expected, abs=1e-4)


@pytest.mark.parametrize("name", SMALL)
def test_building_a_task_draws_no_random_numbers(name: str) -> None:
    torch.manual_seed(7)
    expected = torch.rand(3)

    torch.manual_seed(7)
    build_recipe(name, {**SMALL[name]})

    assert torch.equal(torch.rand(3), expected)


@pytest.mark.parametrize("name", SMALL)
def test_the_gradient_of_a_batch_is_the_mean_of_those_of_its_samples(name: str) -> None:
    torch.manual_seed(0)
    task = build_recipe(name, {**SMALL[name], "dtype": "float64"})
    model = built(name, **SMALL[name], dtype="float64")
    assert task.collate is not None
    samples = [task.data[index] for index in range(4)]

    whole = gradient(task, model, [samples])
    parts = gradient(task, model, [[one] for one in samples])

    assert (whole - parts).norm() <= 1e-10 * whole.norm()


def gradient(task: Any, model: nn.Module, batches: list[Any]) -> torch.Tensor:
    """Of the mean of the batches' losses."""
    model.zero_grad()
    for batch in batches:
        inputs, target = task.collate(batch)
        (task.loss(model(inputs), target) / len(batches)).backward()
    return torch.cat([one.grad.flatten() for one in model.parameters() if one.grad is not None])


@pytest.mark.parametrize("name", SMALL)
def test_bf16_autocast_runs_and_the_loss_stays_in_float32(name: str) -> None:
    task = build_recipe(name, SMALL[name])
    assert task.collate is not None
    inputs, target = task.collate([task.data[index] for index in range(2)])

    with torch.autocast("cpu", torch.bfloat16):
        loss = torch.as_tensor(task.loss(built(name, **SMALL[name])(inputs), target))

    assert loss.dtype == torch.float32
    assert loss.isfinite()


@pytest.mark.parametrize(
    ("name", "args"),
    [
        ("mlp", {"data": "synthetic"}),
        ("resnet", {"data": "synthetic", "width": 8}),
        ("transformer", {"data": "synthetic", "vocab_size": 100}),
        ("mlp", {"dropout": 0.5}),
        ("transformer", {"dropout": 0.5}),
        ("resnet", {"dropout": 0.5, "random_flip": True, "width": 8}),
    ],
)
def test_made_up_data_and_dropout_run(name: str, args: dict[str, Any]) -> None:
    task = build_recipe(name, args)
    model = built(name, **args)
    assert task.collate is not None
    inputs, target = task.collate([task.data[index] for index in range(4)])

    first, second = (torch.as_tensor(task.loss(model(inputs), target)) for _ in range(2))

    assert first.isfinite()
    assert (first != second) == ("dropout" in args)


def test_config_of_learned_positions_has_a_row_per_place() -> None:
    model = Transformer(
        TransformerConfig(vocab_size=9, num_layers=1, width=8, num_heads=2, tokens_per_sample=5, positions="learned")
    )

    assert model(torch.zeros(1, 5, dtype=torch.int64)).shape == (1, 5, 9)
    with pytest.raises(IndexError):
        model(torch.zeros(1, 6, dtype=torch.int64))
