"""The estimate's exact parts to the byte, and how each axis and setting changes the others."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from tests.unit.trainer.plan.models_of_many_sizes import model
from trainer.plan.axes import ParallelPlan
from trainer.plan.estimate import (
    BUCKET_BYTES,
    MemoryEstimate,
    OptimizerKind,
    alive_micro_batches,
    estimate,
    stage_layers,
    states_of,
)
from trainer.plan.estimate_text import bytes_text, estimate_lines, traffic_of
from trainer.plan.model_profile import ActivationProfile, LayerProfile, ModelProfile, ParameterProfile
from trainer.plan.recipe_profiles import recipe_profile

ADAMW = OptimizerKind()


def layer(name: str, *shapes: tuple[int, ...], saved: int = 0, boundary: int = 0, **parameter: Any) -> LayerProfile:
    """A layer with parameters of these shapes, which all have the settings `parameter`."""
    kept = ActivationProfile(saved=saved, selective=saved // 2, input=boundary, output=boundary)
    parameters = tuple(
        ParameterProfile(name=f"{name}.{number}", shape=shape, **parameter) for number, shape in enumerate(shapes)
    )
    return LayerProfile(name=name, parameters=parameters, buffer_bytes=0, fp32=kept, bf16=kept, flops_per_sample=100.0)


def of(*layers: LayerProfile) -> ModelProfile:
    return ModelProfile(name="model", layers=layers, can_split=True)


def needs(profile: ModelProfile, batch_size: int = 8, **plan: Any) -> MemoryEstimate:
    return estimate(profile, ParallelPlan(**plan), batch_size=batch_size)


# --- Exact -----------------------------------------------------------------------------------------------------------

UNEVEN = of(layer("one", (5, 3), (5,)), layer("two", (2, 5)))


@pytest.mark.parametrize(
    ("shard", "numbers"),
    # Of 5 rows over 4 ranks torch.chunk makes 2, 2, 1, 0; of 2 rows 1, 1, 0, 0.
    [(0, 2 * 3 + 2 + 5), (1, 2 * 3 + 2 + 5), (2, 1 * 3 + 1), (3, 0)],
)
def test_rows_that_do_not_divide_are_padded_in_parameters_and_gradients_but_not_in_the_optimizer(
    shard: int, numbers: int
) -> None:
    plan = ParallelPlan(dp_shard=4)
    padded = (2 * 3 + 2 + 1 * 5) * 4
    assert states_of(UNEVEN.layers, plan, ADAMW, shard=shard) == (padded, padded, 2 * numbers * 4 + 3 * 4)


@pytest.mark.parametrize(
    ("optimizer", "bytes_per_number", "bytes_per_parameter"),
    [
        (OptimizerKind(), 8, 4),
        (OptimizerKind(name="sgd", momentum=0.9), 4, 0),
        (OptimizerKind(name="sgd", momentum=0.0), 0, 0),
        (OptimizerKind(name="other"), 8, 4),
    ],
)
def test_an_optimizer_keeps_its_moments(
    optimizer: OptimizerKind, bytes_per_number: int, bytes_per_parameter: int
) -> None:
    parameters, gradients, states = states_of(UNEVEN.layers, ParallelPlan(), optimizer)
    assert (parameters, gradients) == (30 * 4, 30 * 4)
    assert states == 30 * bytes_per_number + 3 * bytes_per_parameter


def test_what_is_frozen_has_neither_gradient_nor_moments() -> None:
    profile = of(layer("frozen", (4, 4), is_trainable=False), layer("head", (4, 4)))
    assert states_of(profile.layers, ParallelPlan(), ADAMW) == (2 * 64, 64, 2 * 64 + 4)


def test_tensor_parallelism_splits_what_is_named_and_copies_the_rest() -> None:
    profile = of(layer("split", (8, 4), split_dim=0), layer("across", (4, 8), split_dim=1), layer("whole", (4,)))
    parameters, _, _ = states_of(profile.layers, ParallelPlan(tp=2), ADAMW)
    assert parameters == (16 + 16 + 4) * 4


def test_shards_of_what_is_split_are_cut_from_the_part() -> None:
    profile = of(layer("split", (8, 4), split_dim=0), layer("across", (4, 8), split_dim=1))
    parameters, _, _ = states_of(profile.layers, ParallelPlan(tp=2, dp_shard=3), ADAMW)
    assert parameters == (2 * 4 + 2 * 4) * 4  # 4 rows of 4, and 4 rows of 4: two each on the first of three


def test_each_rank_of_a_pipeline_has_its_own_layers() -> None:
    profile = of(*(layer(f"layer {number}", (number, 10)) for number in range(1, 5)))
    by_rank = needs(profile, pp=2, micro_batches=4).by_pp_rank
    assert [one.parameters for one in by_rank] == [(10 + 20) * 4, (30 + 40) * 4]
    v_shaped = needs(profile, pp=2, micro_batches=4, stages_per_rank=2, schedule="ZBVZeroBubble").by_pp_rank
    assert [one.parameters for one in v_shaped] == [(10 + 40) * 4, (20 + 30) * 4]


def test_cut_points_decide_where_they_are_given() -> None:
    profile = of(*(layer(f"layer {number}", (1, 10)) for number in range(4)))
    plan = ParallelPlan(pp=2, micro_batches=4, cut_points=(1,))
    assert stage_layers(profile, plan) == (range(1), range(1, 4))
    assert [one.parameters for one in estimate(profile, plan, batch_size=4).by_pp_rank] == [40, 120]


def test_a_shared_weight_counts_once_on_a_rank_and_on_every_rank_that_has_a_copy() -> None:
    first, middle, last = layer("first", (8, 8)), layer("middle", (8, 8)), layer("last", (8, 8))
    tied = replace(last, parameters=(replace(first.parameters[0], is_shared=True),))
    profile = of(first, middle, tied)
    assert needs(profile).worst.parameters == 2 * 64 * 4
    by_rank = needs(profile, pp=2, micro_batches=2, cut_points=(2,)).by_pp_rank
    assert [one.parameters for one in by_rank] == [2 * 64 * 4, 64 * 4]


# --- Activations -----------------------------------------------------------------------------------------------------

DEEP = of(*(layer(f"layer {number}", (4, 4), saved=1000, boundary=10) for number in range(8)))


def test_activations_follow_the_samples_that_run_at_once() -> None:
    assert needs(DEEP, 8).worst.activations == 8 * 8000
    assert needs(DEEP, 8, dp_replicate=4).worst.activations == 2 * 8000
    assert needs(DEEP, 8, grad_accum_steps=4).worst.activations == 2 * 8000
    assert needs(DEEP, 9, dp_shard=4).samples_per_micro_batch == 3  # what does not divide counts in full


def test_checkpointing_keeps_inputs_and_one_layer_at_a_time() -> None:
    assert needs(DEEP, 1, activation_checkpointing="full").worst.activations == 8 * 10 + 1000
    assert needs(DEEP, 1, activation_checkpointing="selective").worst.activations == 8 * 500 + 1000


@pytest.mark.parametrize(
    ("schedule", "stages_per_rank", "alive"),
    [
        ("GPipe", 1, [6, 6, 6, 6]),
        ("1F1B", 1, [4, 3, 2, 1]),
        ("Interleaved1F1B", 2, [11, 9, 7, 5]),
    ],
)
def test_a_schedule_keeps_as_many_micro_batches_as_wait_for_their_backward(
    schedule: str, stages_per_rank: int, alive: list[int]
) -> None:
    plan = ParallelPlan(pp=4, micro_batches=6, schedule=schedule, stages_per_rank=stages_per_rank)
    assert [alive_micro_batches(plan, rank) for rank in range(4)] == alive
    by_rank = estimate(DEEP, plan, batch_size=6).by_pp_rank
    assert [one.activations for one in by_rank] == [count * 2000 // stages_per_rank for count in alive]
    assert max(by_rank, key=lambda one: one.activations).pp_rank == 0


def test_tensor_parallelism_divides_what_is_inside_the_split_layers() -> None:
    whole, half = (
        estimate(model("7B"), ParallelPlan(tp=tp, precision="bf16"), batch_size=1).worst.activations for tp in (1, 2)
    )
    kept = model("7B").layers[1].bf16
    difference = 32 * (kept.saved_split / 2 + 201_588_736)  # and half of the copies of its weights in bf16
    assert whole - half == pytest.approx(difference, rel=0.01)


def test_copies_of_weights_in_bf16_are_kept_unless_shards_are_gathered_in_it() -> None:
    profile = model("1B")
    plain, low = (needs(profile, 1, precision=precision).worst for precision in ("fp32", "bf16"))
    copies = sum(one.bf16.saved_fixed for one in profile.layers)
    assert copies > 2 * 900e6
    assert low.activations > copies
    assert needs(profile, 2, precision="bf16", dp_shard=2).worst.activations < low.activations - 0.9 * copies
    assert plain.states == low.states  # parameters and moments stay in fp32


# --- Communication ---------------------------------------------------------------------------------------------------


def test_ddp_needs_room_for_one_gradient_beside_its_buckets() -> None:
    assert needs(UNEVEN, dp_replicate=2).worst.communication == 15 * 4


def test_gradients_outside_ddp_are_copied_a_bucket_at_a_time() -> None:
    large = of(*(layer(f"layer {number}", (1024, 4096)) for number in range(8)))
    plan = {"pp": 2, "dp_replicate": 2, "micro_batches": 2}
    assert needs(large, **plan).worst.communication == BUCKET_BYTES + 16 * 2**20
    assert needs(of(layer("a", (4, 4)), layer("b", (4, 4))), **plan).worst.communication == 64


def test_fsdp_gathers_two_layers_and_in_a_pipeline_all_of_the_ranks() -> None:
    profile = of(layer("small", (4, 4)), layer("large", (16, 4)), layer("other", (4, 4)))
    assert needs(profile, dp_shard=2).worst.communication == (3 + 1) * 64 * 4
    by_rank = needs(profile, pp=2, dp_shard=2, micro_batches=2, cut_points=(2,)).by_pp_rank
    assert by_rank[0].communication == 2 * (16 + 64) * 4 + 64 * 4


def test_a_model_that_lists_no_layers_is_gathered_whole() -> None:
    profile = model("3B that lists no layers")
    gathered = needs(profile, dp_shard=8).worst.communication
    assert gathered == 3 * profile.parameter_bytes


def test_what_is_received_has_room_for_every_micro_batch() -> None:
    by_rank = needs(DEEP, 8, pp=4, micro_batches=4).by_pp_rank
    assert [one.communication for one in by_rank] == [4 * 2 * 10, 4 * 2 * 20, 4 * 2 * 20, 4 * 2 * 10]


def test_traffic_is_counted_by_axis() -> None:
    profile = recipe_profile("transformer", {})
    assert profile is not None

    def sent(**plan: Any) -> dict[tuple[str, str], int]:
        found = traffic_of(profile, ParallelPlan(**plan), batch_size=8)
        return {(one.axis, one.kind): one.num_bytes for one in found}

    size = profile.parameter_bytes
    assert sent() == {}
    assert sent(dp_replicate=2) == {("dp_replicate", "all-reduce"): size}
    assert sent(dp_shard=2) == {("dp_shard", "all-gather"): 2 * size, ("dp_shard", "reduce-scatter"): size}
    assert sent(dp_replicate=2, dp_shard=2)["dp_replicate", "all-reduce"] == size // 2
    boundary = 8 * 64 * 64 * 4  # samples, tokens, width, bytes
    assert sent(tp=2) == {("tp", "all-reduce"): 2 * boundary * 2 * 4}  # forward and backward of 2 pairs in 4 layers
    assert sent(pp=3, micro_batches=4) == {("pp", "send"): 2 * boundary}


# --- Words -----------------------------------------------------------------------------------------------------------


def test_the_lines_have_bytes_by_kind_of_the_fullest_rank() -> None:
    plan = ParallelPlan(dp_shard=8, precision="bf16")
    found = estimate(model("7B"), plan, batch_size=8)
    lines = estimate_lines(model("7B"), plan, found, batch_size=8, gpu_memory_bytes=80 * 10**9)
    text = "\n".join(lines)
    for words in ("parameters       3.36 GB", "optimizer        6.71 GB", "of 80 GB (37%)", "reduce-scatter"):
        assert words in text


@pytest.mark.parametrize(
    ("size", "text"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (107_411_997_696, "107 GB"), (1.04e12, "1.04 TB")]
)
def test_sizes_are_written_for_people(size: float, text: str) -> None:
    assert bytes_text(size) == text
