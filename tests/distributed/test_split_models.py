"""Every way to split a model computes what one process computes: gradients and weights in float64, against a loop by
hand; every proven combination, and what would go wrong silently, planted.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import pytest

from tests.distributed.reference import all_differences, by_hand
from tests.distributed.tasks import TASKS
from tests.distributed.training_cases import (
    Trace,
    plan_for,
    train_and_trace,
    train_with_fault,
)
from tests.support.ranks import TEST_SECONDS, RankFailed, Ranks
from trainer.plan.parallel_plan import ParallelRequest, RankLayout
from trainer.plan.problem import PlanError
from trainer.plan.schedules import PROVEN, SCHEDULES, Combination
from trainer.plan.training_plan import RunTarget, TrainingSpec, TrainSettings, plan_training

pytestmark = pytest.mark.timeout(TEST_SECONDS)

NUM_TRACED, NUM_STEPS = 5, 20
SETTINGS = {
    "sgd": TrainSettings(steps=NUM_STEPS, batch_size=24, optimizer="sgd", lr=0.05, momentum=0.9),
    "adamw": TrainSettings(steps=NUM_STEPS, batch_size=24, optimizer="adamw", lr=1e-3, weight_decay=0.1),
}
TASK = "split_transformer"
FULL = pytest.mark.full


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[dict[int, Ranks]]:
    with Ranks(2) as two, Ranks(4) as four, Ranks(8) as eight:
        yield {2: two, 4: four, 8: eight}


_EXPECTED: dict[tuple[str, str], Trace] = {}


def expected_of(task: str, optimizer: str) -> Trace:
    """What one process computes; the same for every layout."""
    key = task, optimizer
    if key not in _EXPECTED:
        _EXPECTED[key] = by_hand(TASKS[task](), SETTINGS[optimizer], NUM_TRACED)
    return _EXPECTED[key]


def check(ranks_of: dict[int, Ranks], task: str, optimizer: str, world_size: int, **parallel: Any) -> list[Trace]:
    """Train on ranks and compare; the ranks' traces."""
    plan = plan_for(task, world_size, SETTINGS[optimizer], **parallel)
    traces: list[Trace] = ranks_of[world_size].run(train_and_trace, task, plan, NUM_TRACED)
    expected = expected_of(task, optimizer)
    assert all_differences(traces, expected) == []
    assert traces[0].losses == pytest.approx(expected.losses, rel=1e-10)
    return traces


# --- Presets ---------------------------------------------------------------------------------------------------------

PRESETS = {
    "fsdp": (2, 4),
    "hsdp": (4,),
    "model": (2, 4),
    "pipeline": (2, 4),
    "tensor": (2, 4),
}
QUICK_ADAMW = {(4, "fsdp"), (4, "pipeline"), (2, "tensor")}
QUICK_SGD = {(2, "fsdp"), (4, "hsdp"), (2, "model"), (4, "model"), (2, "pipeline"), (4, "tensor")}
PRESET_CASES = [
    pytest.param(
        strategy,
        world_size,
        optimizer,
        id=f"{strategy}-{world_size}-{optimizer}",
        marks=[] if (world_size, strategy) in (QUICK_ADAMW if optimizer == "adamw" else QUICK_SGD) else [FULL],
    )
    for strategy, sizes in PRESETS.items()
    for world_size in sizes
    for optimizer in SETTINGS
]


@pytest.mark.parametrize(("strategy", "world_size", "optimizer"), PRESET_CASES)
def test_a_preset_computes_what_one_process_computes(
    ranks_of: dict[int, Ranks], strategy: str, world_size: int, optimizer: str
) -> None:
    check(ranks_of, TASK, optimizer, world_size, strategy=strategy)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("hsdp", marks=FULL), "model", "pipeline", "tensor"])
def test_accumulated_gradients_are_those_of_the_whole_batch(ranks_of: dict[int, Ranks], strategy: str) -> None:
    check(ranks_of, TASK, "sgd", 4 if strategy == "hsdp" else 2, strategy=strategy, grad_accum_steps=3)


QUICK_OTHERS = {("recipe_mlp", "pipeline"), ("recipe_resnet", "fsdp"), ("recipe_resnet", "model")}
OTHER_TASKS = [
    pytest.param(
        task, strategy, world_size, marks=[] if (task, strategy) in QUICK_OTHERS and world_size == 2 else [FULL]
    )
    for task in ("recipe_mlp", "recipe_resnet")
    for strategy, world_size in (("fsdp", 2), ("fsdp", 4), ("model", 2), ("pipeline", 2), ("hsdp", 4))
]


@pytest.mark.parametrize(("task", "strategy", "world_size"), OTHER_TASKS)
def test_other_models_split_as_well(ranks_of: dict[int, Ranks], task: str, strategy: str, world_size: int) -> None:
    check(ranks_of, task, "sgd", world_size, strategy=strategy)


@pytest.mark.parametrize(
    ("world_size", "optimizer"),
    [(2, "adamw"), pytest.param(2, "sgd", marks=FULL), (4, "sgd"), pytest.param(4, "adamw", marks=FULL)],
)
def test_model_parallelism_computes_the_same_bits(ranks_of: dict[int, Ranks], world_size: int, optimizer: str) -> None:
    traces = check(ranks_of, TASK, optimizer, world_size, strategy="model")

    expected = expected_of(TASK, optimizer)
    for trace in traces:
        for name, weight in trace.weights.items():
            assert weight.equal(expected.weights[name]), name
    assert traces[0].losses == expected.losses


def test_model_parallelism_computes_the_same_bits_when_gradients_are_clipped(ranks_of: dict[int, Ranks]) -> None:
    """In single precision, where the last bits of the norm would show."""
    settings = TrainSettings(steps=NUM_STEPS, batch_size=24, optimizer="adamw", lr=3e-3, clip_norm=0.5)
    task = "recipe_transformer_fp32"
    with Ranks(1) as one:
        (expected,) = one.run(train_and_trace, task, plan_for(task, 1, settings), NUM_TRACED)

    traces = ranks_of[2].run(train_and_trace, task, plan_for(task, 2, settings, strategy="model"), NUM_TRACED)

    assert traces[0].losses == expected.losses
    for trace in traces:
        assert all(weight.equal(expected.weights[name]) for name, weight in trace.weights.items())


# --- Combinations ----------------------------------------------------------------------------------------------------

_AXES: dict[str, dict[str, int]] = {
    "none": {},
    "replicate": {"dp_replicate": 2},
    "shard": {"dp_shard": 2},
    "hybrid": {"dp_replicate": 2, "dp_shard": 2},
}


def parallel_of(one: Combination) -> tuple[int, dict[str, Any]]:
    """World size and request of the smallest layout of a combination."""
    axes = {**_AXES[one.data], **({"tp": 2} if one.tensor else {})}
    others: dict[str, Any] = {}
    if one.schedule is not None:
        axes["pp"] = 2
        others = {"schedule": one.schedule, "stages_per_rank": SCHEDULES[one.schedule].least_stages}
        others |= {"micro_batches": 4, "strategy": "pipeline"}
    world_size = 1
    for size in axes.values():
        world_size *= size
    return world_size, {"strategy": None, **axes, **others}


def _id(one: Combination) -> str:
    return "-".join((one.schedule or "whole", one.data, *(["tensor"] if one.tensor else [])))


QUICK_COMBINATIONS = {
    "whole-shard-tensor",
    "GPipe-none-tensor",
    "GPipe-replicate",
    "1F1B-shard",
    "1F1B-replicate-tensor",  # three axes on eight ranks
    "Interleaved1F1B-replicate",
    "InterleavedZeroBubble-shard",
    "ZBVZeroBubble-shard",
    "DualPipeV-replicate",
}
COMBINATIONS = [
    pytest.param(one, id=_id(one), marks=[] if _id(one) in QUICK_COMBINATIONS else [FULL])
    for one in PROVEN
    if parallel_of(one)[0] > 1
]


def test_every_schedule_and_every_kind_of_data_parallelism_is_among_the_quick_combinations() -> None:
    quick = [one for one in PROVEN if _id(one) in QUICK_COMBINATIONS]
    assert len(quick) == len(QUICK_COMBINATIONS)
    assert {one.schedule for one in quick} == {one.schedule for one in PROVEN}
    assert {one.data for one in quick} >= {"none", "replicate", "shard"}


@pytest.mark.parametrize("one", COMBINATIONS)
def test_a_proven_combination_computes_what_one_process_computes(ranks_of: dict[int, Ranks], one: Combination) -> None:
    world_size, parallel = parallel_of(one)
    check(ranks_of, TASK, "sgd", world_size, **parallel)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=[] if name == "ZBVZeroBubble" else [FULL]) for name in sorted(SCHEDULES)],
)
def test_a_schedule_on_four_ranks(ranks_of: dict[int, Ranks], name: str) -> None:
    stages = SCHEDULES[name].least_stages
    check(ranks_of, TASK, "adamw", 4, strategy="pipeline", schedule=name, stages_per_rank=stages, micro_batches=8)


@pytest.mark.parametrize(("batch_size", "micro_batches"), [(8, 4), (8, 3), (7, 2)])
def test_o49_batches_that_do_not_divide_lose_and_repeat_nothing(
    ranks_of: dict[int, Ranks], batch_size: int, micro_batches: int
) -> None:
    """Parts of different sizes are filled up to one, and the filling weighs nothing. The last batch of the run is a
    smaller one: 97 samples divide by nothing."""
    settings = TrainSettings(epochs=1, batch_size=batch_size, optimizer="sgd", lr=0.05)
    with Ranks(1) as one:
        (expected,) = one.run(train_and_trace, "mlp", plan_for("mlp", 1, settings), NUM_TRACED)
    plan = plan_for("mlp", 2, settings, strategy="pipeline", micro_batches=micro_batches)

    traces = ranks_of[2].run(train_and_trace, "mlp", plan, NUM_TRACED)

    assert all_differences(traces, expected) == []
    assert traces[0].losses == pytest.approx(expected.losses, rel=1e-10)


def test_o49_a_batch_with_fewer_samples_than_micro_batches_is_refused_before_anything_starts() -> None:
    settings = TrainSettings(steps=3, batch_size=2)
    request = ParallelRequest(strategy="pipeline", micro_batches=4)
    spec = TrainingSpec(run=RunTarget(recipe="mlp"), train=settings, parallel=request)

    with pytest.raises(PlanError, match=r"train.batch_size is 2, but 4 micro_batches need at least one sample each"):
        plan_training(spec, RankLayout(num_nodes=1, ranks_per_node=2))


def test_a_loss_of_sum_and_count_in_a_pipeline(ranks_of: dict[int, Ranks]) -> None:
    expected = by_hand(TASKS["masked_mean"](), SETTINGS["sgd"], NUM_TRACED)
    for parallel in ({"strategy": "pipeline"}, {"strategy": "pipeline", "pp": 2}):
        plan = plan_for("masked", 4 if "pp" in parallel else 2, SETTINGS["sgd"], **parallel)
        traces = ranks_of[plan.parallel.world_size].run(train_and_trace, "masked", plan, NUM_TRACED)
        assert all_differences(traces, expected) == []


@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "pipeline"},
        {"strategy": "model"},
        {"strategy": "pipeline", "schedule": "ZBVZeroBubble", "stages_per_rank": 2},
        {"strategy": "pipeline", "pp": 2, "dp_shard": 2},
        {"strategy": "fsdp"},
        {"strategy": "tensor"},
    ],
    ids=lambda one: "-".join(map(str, one.values())),
)
def test_o50_a_weight_that_two_stages_share_stays_one_weight(
    ranks_of: dict[int, Ranks], parallel: dict[str, Any]
) -> None:
    traces = check(ranks_of, "tied_transformer", "adamw", 4 if "dp_shard" in parallel else 2, **parallel)
    name = "embedding.tokens.weight"
    assert all(trace.weights[name].equal(traces[0].weights[name]) for trace in traces if name in trace.weights)


@pytest.mark.parametrize("strategy", ["fsdp", pytest.param("model", marks=FULL), "pipeline", "tensor"])
def test_clipping_takes_the_norm_of_the_whole_gradient(ranks_of: dict[int, Ranks], strategy: str) -> None:
    settings = TrainSettings(steps=5, batch_size=24, optimizer="sgd", lr=0.05, clip_norm=0.1)
    single = plan_for("tied_transformer", 1, settings)
    with Ranks(1) as one:
        (expected,) = one.run(train_and_trace, "tied_transformer", single, NUM_TRACED)
    plan = plan_for("tied_transformer", 4, settings, strategy=strategy)

    traces = ranks_of[4].run(train_and_trace, "tied_transformer", plan, NUM_TRACED)

    assert all_differences(traces, expected) == []


@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "fsdp"},
        pytest.param({"strategy": "tensor"}, marks=FULL),
        pytest.param({"strategy": "model"}, marks=FULL),
        pytest.param({"strategy": "pipeline", "pp": 2}, marks=FULL),
        pytest.param({"strategy": "pipeline", "pp": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 2}, marks=FULL),
        {"strategy": "pipeline", "pp": 2, "schedule": "Interleaved1F1B", "stages_per_rank": 2, "dp_shard": 2},
    ],
    ids=lambda one: "-".join(map(str, one.values())),
)
def test_an_evaluation_counts_every_held_out_sample_once(ranks_of: dict[int, Ranks], parallel: dict[str, Any]) -> None:
    """13 samples divide by nothing; evaluations in the middle of training change nothing in it."""
    task = "evaluated_transformer"
    settings = TrainSettings(steps=6, batch_size=8, optimizer="sgd", lr=0.05, eval_every=2)
    with Ranks(1) as one:
        (expected,) = one.run(train_and_trace, task, plan_for(task, 1, settings), NUM_TRACED)

    traces = ranks_of[4].run(train_and_trace, task, plan_for(task, 4, settings, **parallel), NUM_TRACED)

    assert len(expected.val_losses) == 3
    assert traces[0].val_losses == pytest.approx(expected.val_losses, rel=1e-10)
    assert all_differences(traces, expected) == []


@pytest.mark.parametrize(
    ("strategy", "mode"),
    [
        ("ddp", "selective"),
        ("fsdp", "full"),
        ("pipeline", "selective"),
        *(
            pytest.param(*case, marks=FULL)
            for case in (
                ("ddp", "full"),
                ("fsdp", "selective"),
                ("pipeline", "full"),
                ("tensor", "full"),
                ("tensor", "selective"),
            )
        ),
    ],
)
def test_recomputed_activations_are_the_same(ranks_of: dict[int, Ranks], strategy: str, mode: str) -> None:
    check(ranks_of, TASK, "sgd", 2, strategy=strategy, activation_checkpointing=mode)


# --- What cannot be split so -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("task", "parallel", "text"),
    [
        ("shared_linears", {"strategy": "tensor"}, "share their weight with others (first and second)"),
        ("drawn_by_numpy", {"strategy": "fsdp"}, "built the model with different weights (0.weight"),
        ("layer_of_odd_ranks", {"strategy": "fsdp"}, "parameters got no gradient on rank 0 only: extra.bias"),
    ],
)
def test_what_would_train_wrong_silently_is_refused(
    ranks_of: dict[int, Ranks], task: str, parallel: dict[str, Any], text: str
) -> None:
    with pytest.raises(RankFailed, match=re.escape(text)):
        ranks_of[2].run(train_and_trace, task, plan_for(task, 2, SETTINGS["sgd"], **parallel), NUM_TRACED)


def test_a_parameter_that_is_never_used_is_never_moved(ranks_of: dict[int, Ranks]) -> None:
    """Weight decay would move it, if the exchange of gradients gave it one."""
    settings = TrainSettings(steps=5, batch_size=24, optimizer="adamw", lr=1e-2, weight_decay=0.5)
    with Ranks(1) as one:
        (expected,) = one.run(train_and_trace, "idle_part", plan_for("idle_part", 1, settings), NUM_TRACED)
    plan = plan_for("idle_part", 4, settings, strategy="pipeline", pp=2)

    traces = ranks_of[4].run(train_and_trace, "idle_part", plan, NUM_TRACED)

    assert all_differences(traces, expected) == []


def test_batch_norm_under_model_parallelism_sees_the_samples_that_are_there(ranks_of: dict[int, Ranks]) -> None:
    """The last batch of the run is smaller."""
    settings = TrainSettings(epochs=1, batch_size=24, optimizer="sgd", lr=0.05)
    with Ranks(1) as one:
        (expected,) = one.run(train_and_trace, "batch_norm", plan_for("batch_norm", 1, settings), NUM_TRACED)

    plan = plan_for("batch_norm", 2, settings, strategy="model")

    assert all_differences(ranks_of[2].run(train_and_trace, "batch_norm", plan, NUM_TRACED), expected) == []


# --- Planted faults --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("fault", "task", "parallel"),
    [
        ("scaled_by_micro_batches_twice", TASK, {"strategy": "pipeline", "pp": 2}),
        ("stage_gradients_not_reduced", TASK, {"strategy": "pipeline", "pp": 2}),
        (
            "default_reshard",
            TASK,
            {"strategy": "pipeline", "pp": 2, "dp_shard": 2, "schedule": "ZBVZeroBubble", "stages_per_rank": 2},
        ),
        ("tied_gradients_apart", "tied_transformer", {"strategy": "pipeline", "pp": 2}),
    ],
)
@pytest.mark.parametrize("optimizer", ["sgd", pytest.param("adamw", marks=FULL)])
def test_the_comparison_sees_a_planted(
    ranks_of: dict[int, Ranks], fault: str, task: str, parallel: dict[str, Any], optimizer: str
) -> None:
    plan = plan_for(task, 4, SETTINGS[optimizer], **parallel)

    traces = ranks_of[4].run(train_with_fault, task, plan, NUM_TRACED, fault)

    assert all_differences(traces, expected_of(task, optimizer)) != []
