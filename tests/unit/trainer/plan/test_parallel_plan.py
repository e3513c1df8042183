"""One word and a few numbers become one plan for the ranks there are, or every problem with its sum and its fix."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.plan.axes import ACTIVATION_CHECKPOINTING, STRATEGIES
from trainer.plan.parallel_plan import (
    ParallelPlan,
    ParallelRequest,
    RankLayout,
    check_parallel_plan,
    resolve_parallel,
)
from trainer.plan.problem import PlanError, PlanProblem
from trainer.plan.schedules import PROVEN, SCHEDULE_NAMES, Combination, combination_of


def layout(text: str) -> RankLayout:
    """`nodes × ranks of a node`, as "2x4"."""
    nodes, ranks = text.split("x")
    return RankLayout(num_nodes=int(nodes), ranks_per_node=int(ranks))


def problems_of(ranks: str, batch_size: int | None = None, **asked: Any) -> list[PlanProblem]:
    with pytest.raises(PlanError) as error:
        resolve_parallel(ParallelRequest(**asked), layout(ranks), batch_size=batch_size)
    return list(error.value.problems)


def the_problem_of(ranks: str, batch_size: int | None = None, **asked: Any) -> PlanProblem:
    (problem,) = problems_of(ranks, batch_size, **asked)
    return problem


# --- Axes ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "ranks", "strategy", "axes"),
    [
        # One word.
        ({}, "1x1", "single", (1, 1, 1, 1)),
        ({}, "2x4", "ddp", (1, 8, 1, 1)),
        ({"strategy": "single"}, "1x1", "single", (1, 1, 1, 1)),
        ({"strategy": "ddp"}, "1x4", "ddp", (1, 4, 1, 1)),
        ({"strategy": "dp"}, "2x2", "ddp", (1, 4, 1, 1)),
        ({"strategy": "fsdp"}, "2x4", "fsdp", (1, 1, 8, 1)),
        ({"strategy": "hsdp"}, "2x4", "hsdp", (1, 2, 4, 1)),
        ({"strategy": "hsdp"}, "1x4", "hsdp", (1, 2, 2, 1)),
        ({"strategy": "hsdp"}, "1x9", "hsdp", (1, 3, 3, 1)),
        ({"strategy": "hsdp"}, "8x1", "hsdp", (1, 2, 4, 1)),
        ({"strategy": "model"}, "1x3", "model", (3, 1, 1, 1)),
        ({"strategy": "pipeline"}, "2x2", "pipeline", (4, 1, 1, 1)),
        ({"strategy": "tensor"}, "1x4", "tensor", (1, 1, 1, 4)),
        ({"strategy": "tensor"}, "2x4", "tensor", (1, 2, 1, 4)),
        ({"strategy": "auto"}, "2x4", "auto", (1, 1, 1, 1)),
        # One word and numbers.
        ({"strategy": "fsdp", "dp_shard": 4}, "2x4", "fsdp", (1, 2, 4, 1)),
        ({"strategy": "hsdp", "dp_replicate": 4}, "2x4", "hsdp", (1, 4, 2, 1)),
        ({"strategy": "hsdp", "dp_shard": 2}, "2x4", "hsdp", (1, 4, 2, 1)),
        ({"strategy": "model", "pp": 2}, "1x4", "model", (2, 2, 1, 1)),
        ({"strategy": "pipeline", "pp": 2}, "2x4", "pipeline", (2, 4, 1, 1)),
        ({"strategy": "pipeline", "dp_replicate": 2}, "2x4", "pipeline", (4, 2, 1, 1)),
        ({"strategy": "pipeline", "dp_shard": 2}, "2x4", "pipeline", (4, 1, 2, 1)),
        ({"strategy": "pipeline", "pp": 2, "dp_shard": 4}, "2x4", "pipeline", (2, 1, 4, 1)),
        ({"strategy": "pipeline", "pp": 2, "tp": 2}, "2x4", "pipeline", (2, 2, 1, 2)),
        ({"strategy": "tensor", "tp": 2}, "2x4", "tensor", (1, 4, 1, 2)),
        ({"strategy": "tensor", "dp_shard": 2}, "1x4", "tensor", (1, 1, 2, 2)),
        ({"strategy": "tensor", "tp": 2, "dp_shard": 2}, "1x4", "tensor", (1, 1, 2, 2)),
        ({"strategy": "ddp", "pp": 2}, "1x4", "ddp", (2, 2, 1, 1)),
        # Numbers alone: named by the outermost axis in use.
        ({"pp": 2}, "1x4", "pipeline", (2, 2, 1, 1)),
        ({"pp": 2, "tp": 2}, "1x4", "pipeline", (2, 1, 1, 2)),
        ({"tp": 2}, "1x4", "tensor", (1, 2, 1, 2)),
        ({"dp_shard": 4}, "1x4", "fsdp", (1, 1, 4, 1)),
        ({"dp_shard": 2}, "1x4", "hsdp", (1, 2, 2, 1)),
        ({"dp_replicate": 4}, "1x4", "ddp", (1, 4, 1, 1)),
        ({"pp": 1, "tp": 1}, "1x1", "single", (1, 1, 1, 1)),
    ],
)  # fmt: skip
def test_a_word_and_a_few_numbers_give_every_axis_a_size(
    asked: dict[str, Any], ranks: str, strategy: str, axes: tuple[int, ...]
) -> None:
    plan = resolve_parallel(ParallelRequest(**asked), layout(ranks)).plan

    assert (plan.strategy, (plan.pp, plan.dp_replicate, plan.dp_shard, plan.tp)) == (strategy, axes)
    check_parallel_plan(plan, layout(ranks).world_size)


@pytest.mark.parametrize("strategy", [*STRATEGIES, "dp", None])
def test_every_strategy_runs_on_one_rank_and_says_that_it_is_single(strategy: str | None) -> None:
    resolved = resolve_parallel(ParallelRequest(strategy=strategy), layout("1x1"))

    assert resolved.plan.world_size == 1
    assert any("runs as single" in note for note in resolved.notes) == (strategy not in ("single", "auto", None))


def test_dp_is_taken_as_ddp_and_says_so() -> None:
    assert "taken as ddp" in resolve_parallel(ParallelRequest(strategy="dp"), layout("1x2")).notes[0]


@pytest.mark.parametrize(
    ("asked", "ranks", "key", "message", "fix"),
    [
        ({"pp": 3}, "1x4", "parallel.pp", "pp 3 × dp_shard 1 × tp 1 = 3 ranks, but the job's resources make 4",
         "Set pp: 4, or ask for 3 GPUs"),
        ({"pp": 3, "dp_shard": 2}, "1x4", "parallel", "pp 3 × dp_shard 2 × tp 1 = 6 ranks, but the job's resources "
         "make 4", "Set pp: 2, or ask for 6 GPUs"),
        ({"strategy": "ddp", "dp_replicate": 2}, "1x4", "parallel.dp_replicate",
         "pp 1 × dp_replicate 2 × dp_shard 1 × tp 1 = 2 ranks, but the job's resources make 4",
         "Set dp_replicate: 4, or ask for 2 GPUs"),
        ({"strategy": "pipeline", "pp": 4}, "1x6", "parallel.pp", "= 4 ranks, but the job's resources make 6, which 4 "
         "does not divide", "Set pp: 3, or ask for 8 GPUs"),
        ({"strategy": "pipeline", "pp": 2}, "1x1", "parallel.pp", "= 2 ranks, but the job's resources make 1",
         "Ask for 2 GPUs"),
        ({"strategy": "single"}, "1x2", "parallel.strategy", "single runs on one rank, but the job's resources make 2",
         "Ask for one GPU"),
        ({"strategy": "hsdp"}, "1x2", "parallel.strategy", "hsdp is dp_replicate of 2 or more", "strategy: fsdp"),
        ({"strategy": "tensor"}, "4x1", "parallel.strategy", "tensor is tp of 2 or more", "strategy: ddp"),
        ({"strategy": "pipeline", "pp": 1}, "1x4", "parallel.strategy", "pipeline is pp of 2 or more, but parallel.pp "
         "is 1", "Leave pp out"),
        ({"strategy": "auto", "pp": 2}, "1x4", "parallel.pp", "is 2, but auto chooses it", "Remove it"),
        ({"tp": 3}, "1x4", "parallel.tp", "is 3, but a node has 4 ranks", "Set it to 2 or 4"),
        ({"tp": 8}, "2x4", "parallel.tp", "is 8, but a node has 4 ranks", "Set it to 4, or ask for 8 GPUs on each"),
        ({"tp": 2}, "4x1", "parallel.tp", "is 2, but a node has 1 rank,", "Set it to 1"),
    ],
)  # fmt: skip
def test_numbers_that_do_not_make_the_ranks_are_refused_with_the_sum_and_the_nearest_that_do(
    asked: dict[str, Any], ranks: str, key: str, message: str, fix: str
) -> None:
    problem = the_problem_of(ranks, **asked)

    assert problem.key == key
    assert message in problem.message
    assert fix in problem.fix


# --- Pipelines -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "ranks", "batch_size", "filled"),
    [
        ({"strategy": "pipeline"}, "1x2", None, ("1F1B", 1, 8)),
        ({"strategy": "pipeline"}, "1x2", 32, ("1F1B", 1, 8)),
        ({"strategy": "pipeline"}, "1x2", 6, ("1F1B", 1, 6)),
        ({"strategy": "pipeline"}, "1x3", 32, ("1F1B", 1, 8)),  # of 4 × 3 = 12 the most that 32 divides by
        ({"strategy": "pipeline"}, "1x3", 31, ("1F1B", 1, 12)),  # no number divides it
        ({"strategy": "pipeline", "grad_accum_steps": 4}, "1x2", 16, ("1F1B", 1, 4)),
        ({"strategy": "pipeline", "pp": 2}, "1x4", 8, ("1F1B", 1, 4)),
        ({"strategy": "pipeline"}, "1x4", 3, ("GPipe", 1, 3)),  # 1F1B takes no fewer micro-batches than ranks
        ({"strategy": "pipeline", "micro_batches": 2}, "1x4", 8, ("GPipe", 1, 2)),
        ({"strategy": "pipeline", "micro_batches": 5}, "1x2", 8, ("1F1B", 1, 5)),
        ({"strategy": "pipeline", "stages_per_rank": 2}, "1x2", None, ("Interleaved1F1B", 2, 8)),
        ({"strategy": "pipeline", "stages_per_rank": 3}, "1x4", 13, ("Interleaved1F1B", 3, 12)),
        ({"strategy": "pipeline", "schedule": "GPipe"}, "1x2", None, ("GPipe", 1, 8)),
        ({"strategy": "pipeline", "schedule": "InterleavedZeroBubble"}, "1x2", None, ("InterleavedZeroBubble", 2, 8)),
        ({"strategy": "pipeline", "schedule": "ZBVZeroBubble"}, "1x2", 5, ("ZBVZeroBubble", 2, 5)),
        ({"strategy": "pipeline", "schedule": "DualPipeV"}, "1x2", 6, ("DualPipeV", 2, 6)),
        ({"strategy": "model"}, "1x4", 32, ("GPipe", 1, 1)),
        ({"strategy": "ddp"}, "1x4", 32, ("1F1B", 1, 1)),
        ({"strategy": "ddp", "pp": 2}, "1x4", 32, ("1F1B", 1, 8)),
    ],
)
def test_a_pipeline_is_filled_in_as_its_schedule_and_the_batch_allow(
    asked: dict[str, Any], ranks: str, batch_size: int | None, filled: tuple[str, int, int]
) -> None:
    plan = resolve_parallel(ParallelRequest(**asked), layout(ranks), batch_size=batch_size).plan

    assert (plan.schedule, plan.stages_per_rank, plan.micro_batches) == filled


@pytest.mark.parametrize(
    ("asked", "batch_size", "notes"),
    [
        ({"strategy": "pipeline"}, 64, []),
        ({"strategy": "pipeline", "micro_batches": 4}, 64, []),
        ({"strategy": "pipeline"}, 8, ["micro_batches is 8, not 4 × pp = 16, which train.batch_size 8"]),
        ({"strategy": "pipeline", "micro_batches": 2}, 64, ["schedule is GPipe: 1F1B takes", "wait 60% of each step"]),
        ({"strategy": "pipeline", "schedule": "GPipe", "micro_batches": 1}, 64, ["wait 75% of each step (bubble)"]),
        ({"strategy": "model"}, 64, ["one of 4 ranks works at a time, so ranks wait 75% of each step"]),
    ],
)
def test_what_was_lowered_and_how_long_ranks_wait_is_told(
    asked: dict[str, Any], batch_size: int, notes: list[str]
) -> None:
    told = resolve_parallel(ParallelRequest(**asked), layout("1x4"), batch_size=batch_size).notes

    assert len(told) == len(notes)
    assert all(note in text for note, text in zip(notes, told, strict=True)), told


def test_a_pipeline_that_finds_one_rank_keeps_its_micro_batches_as_parts_of_a_step() -> None:
    asked = ParallelRequest(strategy="pipeline", micro_batches=4, grad_accum_steps=2, cut_points=(3,))
    resolved = resolve_parallel(asked, layout("1x1"))

    assert (resolved.plan.grad_accum_steps, resolved.plan.micro_batches, resolved.plan.cut_points) == (8, 1, None)
    assert "in 8 parts" in resolved.notes[1]


@pytest.mark.parametrize(
    ("asked", "key", "message", "fix"),
    [
        # Of each schedule.
        ({"schedule": "1F1B", "micro_batches": 3}, "micro_batches", "is 3 over pp 4, but 1F1B takes",
         "Set it to 4, or use parallel.schedule: GPipe"),
        ({"schedule": "Interleaved1F1B", "micro_batches": 9}, "micro_batches", "a multiple of micro_batches // pp",
         "Set it to 8 or 10"),
        ({"schedule": "DualPipeV", "micro_batches": 4}, "micro_batches", "takes micro_batches of 2 × pp or more",
         "Set it to 8, or use parallel.schedule: Interleaved1F1B"),
        ({"schedule": "1F1B", "stages_per_rank": 2}, "stages_per_rank", "is 2, but 1F1B has 1 on each rank",
         "use parallel.schedule: Interleaved1F1B"),
        ({"schedule": "Interleaved1F1B", "stages_per_rank": 1}, "stages_per_rank", "has 2 or more on each rank",
         "Set it to 2, or use parallel.schedule: 1F1B"),
        ({"schedule": "ZBVZeroBubble", "stages_per_rank": 3}, "stages_per_rank", "has 2 on each rank", "Set it to 2"),
        ({"schedule": "ZBVZeroBubble", "activation_checkpointing": "full"}, "activation_checkpointing",
         "is full, but ZBVZeroBubble computes the gradients of inputs and of weights apart", "Interleaved1F1B"),
        ({"schedule": "DualPipeV", "compile": True}, "compile", "which torch.compile cannot", "Interleaved1F1B"),
        # Of cuts.
        ({"cut_points": (3, 4)}, "cut_points", "pp 4 × stages_per_rank 1 = 4 stages are cut at 3", "Write 3"),
        ({"cut_points": (3, 3, 4)}, "cut_points", "above the one before", "Write rising numbers from 1"),
        ({"cut_points": (0, 1, 2)}, "cut_points", "above the one before", "Write rising numbers from 1"),
        ({"cut_points": ()}, "cut_points", "has 0 of []", "Write 3"),
        # Of DDP.
        ({"find_unused_parameters": True}, "find_unused_parameters", "pipeline runs without DDP", "strategy: ddp"),
    ],
)  # fmt: skip
def test_what_a_schedule_does_not_take_is_refused_by_name(
    asked: dict[str, Any], key: str, message: str, fix: str
) -> None:
    problem = the_problem_of("1x4", **{"strategy": "pipeline", **asked})

    assert problem.key == f"parallel.{key}"
    assert message in problem.message
    assert fix in problem.fix


@pytest.mark.parametrize("strategy", [None, "single", "ddp", "fsdp", "hsdp", "tensor"])
@pytest.mark.parametrize(
    "asked", [{"schedule": "GPipe"}, {"stages_per_rank": 2}, {"micro_batches": 4}, {"cut_points": (1, 2, 3)}]
)
def test_what_means_something_in_a_pipeline_only_is_refused_elsewhere(
    strategy: str | None, asked: dict[str, Any]
) -> None:
    problem = the_problem_of("1x1" if strategy == "single" else "1x4", strategy=strategy, **asked)

    assert problem.key == f"parallel.{next(iter(asked))}"
    assert "in a pipeline only" in problem.message


@pytest.mark.parametrize("asked", [{"schedule": "1F1B"}, {"stages_per_rank": 2}, {"micro_batches": 4}])
def test_model_parallelism_has_one_part_and_no_schedule(asked: dict[str, Any]) -> None:
    problem = the_problem_of("1x4", strategy="model", **asked)

    assert "passes the whole batch through the layers once" in problem.message
    assert "strategy: pipeline" in problem.fix


@pytest.mark.parametrize(
    "asked",
    [{"strategy": name} for name in ("fsdp", "hsdp", "model", "tensor")] + [{"pp": 2}, {"dp_shard": 2}, {"tp": 2}],
)
def test_what_only_ddp_can_do_is_refused_where_ddp_does_not_run(asked: dict[str, Any]) -> None:
    problem = the_problem_of("1x4", find_unused_parameters=True, **asked)

    assert problem.key == "parallel.find_unused_parameters"


def test_all_problems_are_told_at_once_and_each_once() -> None:
    problems = problems_of("1x4", strategy="pipeline", precision="fp8", pp=3, tp=8, schedule="ZBVZeroBubble",
                           stages_per_rank=1, compile=True, grad_accum_steps=0)  # fmt: skip

    assert [problem.key for problem in problems] == [
        "parallel.precision",
        "parallel.grad_accum_steps",
        "parallel.stages_per_rank",
        "parallel.compile",
        "parallel.tp",
        "parallel",
    ]


def test_an_unknown_strategy_is_not_guessed_at() -> None:
    assert [one.key for one in problems_of("1x4", strategy="zero3", micro_batches=2)] == ["parallel.strategy"]


# --- What is proven --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("asked", "ranks", "message", "fix"),
    [
        ({"pp": 2, "dp_replicate": 2, "dp_shard": 2}, "2x4", "1F1B and copies of shards (dp_replicate 2 × dp_shard 2)",
         "parallel.dp_replicate: 1, parallel.dp_shard: 4."),
        ({"pp": 2, "dp_shard": 2, "tp": 2}, "2x4", "1F1B and shards (dp_shard 2) and tp 2",
         "parallel.dp_shard: 4, parallel.tp: 1."),
        ({"pp": 2, "dp_replicate": 2, "tp": 2, "schedule": "ZBVZeroBubble"}, "2x4",
         "ZBVZeroBubble and copies (dp_replicate 2) and tp 2", "parallel.schedule: Interleaved1F1B."),
        ({"strategy": "hsdp", "tp": 2}, "2x4", "copies of shards (dp_replicate 2 × dp_shard 2) and tp 2",
         "parallel.dp_replicate: 1, parallel.dp_shard: 4."),
    ],
)  # fmt: skip
def test_what_is_not_proven_is_refused_with_the_nearest_that_is(
    asked: dict[str, Any], ranks: str, message: str, fix: str
) -> None:
    problem = the_problem_of(ranks, **asked)

    assert (problem.key, message in problem.message) == ("parallel", True)
    assert problem.fix.endswith(fix)


def test_of_every_combination_exactly_the_proven_ones_run() -> None:
    ran = set()
    for schedule, replicas, shards, tp in itertools.product((None, *SCHEDULE_NAMES), (1, 2), (1, 2), (1, 2)):
        pipeline = {} if schedule is None else {"pp": 2, "schedule": schedule}
        request = ParallelRequest(dp_replicate=replicas, dp_shard=shards, tp=tp, **pipeline)  # type: ignore[arg-type]
        size = replicas * shards * tp * (1 if schedule is None else 2)
        try:
            ran.add(combination_of(resolve_parallel(request, RankLayout(ranks_per_node=size)).plan))
        except PlanError as error:
            assert "no test has shown" in str(error)

    assert ran == set(PROVEN)
    assert len(ran) == len(PROVEN)
    assert Combination(schedule="1F1B", data="hybrid", tensor=False) not in ran


# --- Plan files ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("plan", "world_size", "message"),
    [
        ({"strategy": "ddp", "dp_replicate": 4}, 3,
         "pp 1 × dp_replicate 4 × dp_shard 1 × tp 1 = 4 ranks, but 3 were started"),
        ({"strategy": "fsdp", "dp_replicate": 2}, 2, "fsdp is dp_shard of 2 or more"),
        ({"strategy": "single"}, 2, "single runs on one rank"),
        ({"strategy": "zero"}, 1, "strategy cannot be 'zero'"),
        ({"strategy": "auto", "pp": 2}, 2, "is auto, but says pp 2"),
        ({"strategy": "pipeline", "pp": 2}, 2, "micro_batches is 1 over pp 2, but 1F1B takes"),
        ({"strategy": "pipeline", "pp": 2, "schedule": "Loop"}, 2, "schedule cannot be 'Loop'"),
        ({"strategy": "ddp", "dp_replicate": 2, "micro_batches": 2}, 2, "with pp 1 there is no pipeline"),
        ({"strategy": "model", "pp": 2, "schedule": "GPipe", "micro_batches": 2}, 2, "passes the whole batch"),
        ({"strategy": "fsdp", "dp_shard": 2, "find_unused_parameters": True}, 2, "dp_shard 2 runs without DDP"),
        ({"strategy": "ddp", "dp_replicate": 0}, 2, "dp_replicate is 0"),
        ({"strategy": "hsdp", "dp_replicate": 2, "dp_shard": 2, "tp": 2}, 8, "no test has shown"),
    ],
)  # fmt: skip
def test_a_plan_that_was_written_by_hand_is_judged_by_the_same_rules(
    plan: dict[str, Any], world_size: int, message: str
) -> None:
    with pytest.raises(PlanError) as error:
        check_parallel_plan(ParallelPlan(**plan), world_size)
    assert message in str(error.value)


@pytest.mark.parametrize("world_size", [1, 3, 64])
def test_auto_goes_with_any_number_of_ranks(world_size: int) -> None:
    check_parallel_plan(ParallelPlan(strategy="auto"), world_size)


# --- Laws ------------------------------------------------------------------------------------------------------------

SIZES = st.none() | st.sampled_from([1, 2, 3, 4, 6, 8])
REQUESTS = st.builds(
    ParallelRequest,
    strategy=st.none() | st.sampled_from([*STRATEGIES, "dp"]),
    pp=SIZES,
    dp_replicate=SIZES,
    dp_shard=SIZES,
    tp=SIZES,
    schedule=st.none() | st.sampled_from(SCHEDULE_NAMES),
    stages_per_rank=st.none() | st.integers(1, 3),
    micro_batches=st.none() | st.integers(1, 20),
    activation_checkpointing=st.sampled_from(ACTIVATION_CHECKPOINTING),
    grad_accum_steps=st.integers(1, 3),
)
FEW = st.builds(
    lambda strategy, axes: ParallelRequest(strategy=strategy, **axes),
    st.none() | st.sampled_from(STRATEGIES),
    st.dictionaries(st.sampled_from(["pp", "dp_shard", "tp", "micro_batches"]), st.sampled_from([2, 4]), max_size=2),
)


@settings(max_examples=400, deadline=None)
@given(
    request=REQUESTS | FEW,
    ranks=st.builds(RankLayout, num_nodes=st.integers(1, 4), ranks_per_node=st.sampled_from([1, 2, 3, 4, 8])),
    batch_size=st.none() | st.integers(1, 64),
)
def test_every_plan_fits_its_ranks_keeps_what_was_given_and_can_run(
    request: ParallelRequest, ranks: RankLayout, batch_size: int | None
) -> None:
    try:
        plan = resolve_parallel(request, ranks, batch_size=batch_size).plan
    except PlanError as error:
        assert error.problems
        assert all(problem.key.startswith("parallel") and problem.fix for problem in error.problems)
        return

    check_parallel_plan(plan, ranks.world_size)
    assert plan.strategy == "auto" or plan.world_size == ranks.world_size
    assert ranks.ranks_per_node % plan.tp == 0
    for name, value in dataclasses.asdict(request).items():
        is_kept = value is None or ranks.world_size == 1 or name == "strategy"
        assert is_kept or getattr(plan, name) == value, name


@given(
    strategy=st.sampled_from([name for name in STRATEGIES if name not in ("single", "hsdp", "tensor")]),
    nodes=st.integers(1, 16),
    share=st.integers(1, 8),
    batch_size=st.integers(128, 4096),
)
def test_a_word_alone_runs_on_any_number_of_ranks(strategy: str, nodes: int, share: int, batch_size: int) -> None:
    ranks = RankLayout(num_nodes=nodes, ranks_per_node=share)

    plan = resolve_parallel(ParallelRequest(strategy=strategy), ranks, batch_size=batch_size).plan

    assert plan.data_parallel_size * plan.micro_batches <= batch_size
