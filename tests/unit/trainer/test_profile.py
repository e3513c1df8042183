"""A profile counts what a real forward saves: checked against the autograd graph of one, walked node by node."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from trainer.failure import ConfigError
from trainer.parallel import activation_checkpointing
from trainer.plan.model_profile import ModelProfile, read_profile, write_profile
from trainer.plan.recipe_profiles import recipe_profile
from trainer.profile import profile_task
from trainer.profile.kernels import KEPT_BY_SELECTIVE
from trainer.recipes.registry import build_recipe
from trainer.task import TrainTask

SIZES: tuple[tuple[str, dict[str, Any], int], ...] = (
    ("transformer", {"size": "tiny"}, 4),
    ("transformer", {"num_layers": 2, "width": 256, "num_heads": 4, "tokens_per_sample": 192, "mlp": "gelu"}, 3),
    (
        "transformer",
        {
            "num_layers": 3,
            "width": 192,
            "num_heads": 6,
            "tokens_per_sample": 320,
            "vocab_size": 5000,
            "data": "synthetic",
            "positions": "learned",
            "tied_embeddings": True,
        },
        2,
    ),
    ("mlp", {}, 32),
    ("mlp", {"hidden": [512, 512, 256], "activation": "gelu", "data": "synthetic"}, 64),
    ("mlp", {"hidden": [64, 64, 64, 64], "activation": "tanh", "data": "diabetes", "dropout": 0.2}, 128),
    ("resnet", {"width": 16}, 8),
    ("resnet", {"depth": 34, "width": 8, "data": "synthetic", "norm": "group"}, 4),
    ("resnet", {"depth": 50, "width": 8, "data": "synthetic", "image_size": 64, "stem": "large"}, 4),
)
"""Recipe, arguments, samples of a batch: three sizes of each."""


def ids(size: tuple[str, dict[str, Any], int]) -> str:
    return f"{size[0]}-{'-'.join(str(value) for value in size[1].values()) or 'default'}"


# --- The independent count -------------------------------------------------------------------------------------------


def saved_bytes(task: TrainTask, num_samples: int, precision: str) -> tuple[int, int]:
    """(bytes that a real forward and loss on the CPU keep alive for backward, parameters) without parameters and
    buffers: what the nodes of the graph hold, found by walking it from the loss."""
    assert not isinstance(task.model, nn.Module)
    assert task.collate is not None
    model = task.model()
    inputs, target = task.collate([task.data[index] for index in range(num_samples)])
    with torch.autocast("cpu", dtype=torch.bfloat16, enabled=precision == "bf16"):
        loss = task.loss(model(inputs), target)
    assert isinstance(loss, torch.Tensor)
    own = {one.untyped_storage().data_ptr() for one in (*model.parameters(), *model.buffers())}
    kept = {one.untyped_storage().data_ptr(): one.untyped_storage().nbytes() for one in saved_by(loss.grad_fn)}
    return sum(size for pointer, size in kept.items() if pointer not in own), sum(
        one.numel() for one in model.parameters()
    )


def saved_by(root: Any) -> Iterator[torch.Tensor]:
    """Every tensor that a node of the graph below `root` holds."""
    pending, seen = [root], set()
    while pending:
        node = pending.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        pending += [function for function, _ in node.next_functions]
        for name in dir(node):
            if name.startswith("_saved_"):
                value = getattr(node, name)
                yield from (one for one in (value if isinstance(value, tuple) else (value,)) if torch.is_tensor(one))


def counted(profile: ModelProfile, num_samples: int, precision: str) -> int:
    """What a profile says of as many samples."""
    kept = [layer.activations(precision) for layer in profile.layers]
    return sum(num_samples * one.saved + one.saved_fixed for one in kept) + num_samples * profile.loss(precision)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("size", SIZES, ids=ids)
def test_it_counts_what_a_real_forward_keeps(size: tuple[str, dict[str, Any], int], precision: str) -> None:
    recipe, args, num_samples = size
    task = build_recipe(recipe, args)
    expected, num_parameters = saved_bytes(task, num_samples, precision)
    profile = profile_task(task, kernels="cpu")
    assert profile.num_parameters == num_parameters
    assert profile.can_split
    assert counted(profile, num_samples, precision) == pytest.approx(expected, rel=0.1)


@pytest.mark.parametrize("size", SIZES, ids=ids)
def test_the_closed_form_of_a_recipe_says_the_same(size: tuple[str, dict[str, Any], int]) -> None:
    recipe, args, num_samples = size
    profile, computed = profile_task(build_recipe(recipe, args)), recipe_profile(recipe, args)
    assert computed is not None
    assert [layer.parameters for layer in computed.layers] == [layer.parameters for layer in profile.layers]
    assert [layer.name for layer in computed.layers] == [layer.name for layer in profile.layers]
    for name in ("tensor_parallel_sizes", "has_tensor_parallel_plan", "has_batch_norm", "can_split", "name"):
        assert getattr(computed, name) == getattr(profile, name), name
    assert computed.flops_per_sample == pytest.approx(profile.flops_per_sample, rel=1e-6)
    for precision in ("fp32", "bf16"):
        assert counted(computed, num_samples, precision) == pytest.approx(
            counted(profile, num_samples, precision), rel=0.1
        )
        for one, other in zip(computed.layers, profile.layers, strict=True):
            assert one.buffer_bytes == other.buffer_bytes
            said, seen = one.activations(precision), other.activations(precision)
            for key in ("saved", "saved_split", "selective", "input", "output"):
                assert getattr(said, key) == pytest.approx(getattr(seen, key), rel=0.1), (one.name, precision, key)


def test_an_images_folder_and_a_csv_file_are_known_to_the_nodes_alone() -> None:
    assert recipe_profile("mlp", {"data": "./x.csv", "task": "regression"}) is None
    assert recipe_profile("resnet", {"data": "./images"}) is None


# --- Kernels ---------------------------------------------------------------------------------------------------------


class Attention(nn.Module):
    """Attention of its input with itself."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16))

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        heads = (values * self.weight).view(len(values), 512, 2, 16).transpose(1, 2)
        result: torch.Tensor = nn.functional.scaled_dot_product_attention(heads, heads, heads)
        return result


def made(model: nn.Module | Callable[[], nn.Module], *sample: Any, **others: Any) -> TrainTask:
    data = [sample if len(sample) > 1 else (sample[0], torch.tensor(0.0))]
    return TrainTask(model=model, loss=lambda output, target: output.float().mean(), data=data, **others)


@pytest.mark.parametrize("kernels", ["cuda", "cpu"])
@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_attention_does_not_keep_its_scores(kernels: str, precision: str) -> None:
    profile = profile_task(made(Attention, torch.zeros(512, 2, 16)), kernels=kernels)
    scores = 2 * 512 * 512 * 2  # of both heads, in bf16
    assert 0 < profile.layers[0].activations(precision).saved < scores / 2


def test_selective_checkpointing_is_counted_as_it_is_done() -> None:
    known = {operation for operation in activation_checkpointing._KEPT if operation in KEPT_BY_SELECTIVE}
    only_on_other_devices = {"_scaled_dot_product_cudnn_attention", "_scaled_dot_product_fused_attention_overrideable"}
    others = {operation.__name__ for operation in activation_checkpointing._KEPT - known}
    assert others == only_on_other_devices
    assert known == KEPT_BY_SELECTIVE


# --- Any model -------------------------------------------------------------------------------------------------------


def test_billions_of_parameters_take_no_memory_and_about_a_second() -> None:
    args = {"num_layers": 32, "width": 4096, "num_heads": 32, "tokens_per_sample": 2048, "data": "synthetic"}
    task = build_recipe("transformer", {**args, "vocab_size": 32_000})
    profile_task(build_recipe("transformer", {}))  # what torch loads at the first use
    began = time.thread_time()
    profile = profile_task(task)
    assert profile.num_parameters == 6_713_249_792
    # A second on an idle machine; other work on the same cores slows down even the processor's own time. To compute
    # what it counts takes minutes.
    assert time.thread_time() - began < 20.0


def test_a_model_that_is_built_already_stays_as_it_was() -> None:
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4)).eval()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    profile = profile_task(made(model, torch.zeros(8)))
    assert profile.num_parameters == sum(one.numel() for one in model.parameters())
    assert profile.has_batch_norm
    assert not model.training
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert not any(one.is_meta for one in model.parameters())


def test_a_shared_weight_is_counted_with_the_first_layer_that_has_it() -> None:
    def build() -> nn.Module:
        first, second = nn.Linear(8, 8, bias=False), nn.Linear(8, 8, bias=False)
        second.weight = first.weight
        return nn.Sequential(first, nn.ReLU(), second)

    profile = profile_task(made(build, torch.zeros(8)))
    assert profile.num_parameters == 64
    assert [layer.num_parameters for layer in profile.layers] == [64, 0, 0]
    shared = profile.layers[2].parameters[0]
    assert (shared.name, shared.is_shared) == ("0.weight", True)


def test_frozen_parameters_are_told_apart() -> None:
    model = nn.Sequential(nn.Linear(8, 8).requires_grad_(False), nn.Linear(8, 4))
    profile = profile_task(made(model, torch.zeros(8)))
    assert profile.num_parameters == 108
    assert profile.num_trainable_parameters == 36


class Branching(nn.Module):
    """A forward that adds something around its layers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8), nn.Linear(8, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.second(self.first(values)) + values
        return result


def test_a_model_without_a_list_of_layers_is_one_layer() -> None:
    profile = profile_task(made(Branching, torch.zeros(8)))
    assert [layer.name for layer in profile.layers] == ["model"]
    assert not profile.can_split
    assert profile.num_parameters == 144


def test_layers_that_leave_something_out_make_one_layer_and_a_note() -> None:
    profile = profile_task(made(Branching, torch.zeros(8), layers=lambda model: [model.first]))
    assert not profile.can_split
    assert profile.num_parameters == 144
    assert any("second.weight" in note for note in profile.notes)


class Looking(nn.Module):
    """A forward that looks at values."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.linear(values)
        return output if output.sum().item() > 0 else -output


def test_a_model_that_looks_at_values_is_refused_with_a_way_out() -> None:
    with pytest.raises(ConfigError, match=r"from shapes alone.*\.item\(\).*parallel\.strategy instead of auto"):
        profile_task(made(Looking, torch.zeros(8)))


def test_a_model_that_cannot_be_built_without_memory_is_built() -> None:
    def build() -> nn.Module:
        width = int(torch.tensor([8.0]).item())
        return nn.Sequential(nn.Linear(width, 4))

    profile = profile_task(made(build, torch.zeros(8)))
    assert profile.num_parameters == 36
    assert any("had to be built" in note for note in profile.notes)


def test_equal_layers_that_differ_in_a_setting_are_counted_each() -> None:
    class Wide(nn.Module):
        def __init__(self, times: int) -> None:
            super().__init__()
            self.linear, self.times = nn.Linear(8, 8), times

        def forward(self, values: torch.Tensor) -> torch.Tensor:
            for _ in range(self.times):
                values = torch.sigmoid(self.linear(values))
            return values

    profile = profile_task(made(lambda: nn.Sequential(Wide(1), Wide(1), Wide(5)), torch.zeros(8)))
    first, second, third = (layer.fp32.saved for layer in profile.layers)
    assert third == 5 * second
    assert first == second + 8 * 4  # the input, which nobody saved before


def test_a_profile_survives_being_written_and_read() -> None:
    profile = profile_task(build_recipe("transformer", {}))
    assert read_profile(write_profile(profile)) == profile
    assert read_profile(write_profile(replace(profile, notes=("a",)))).notes == ("a",)
