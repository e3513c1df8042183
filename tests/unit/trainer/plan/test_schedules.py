"""What is known of schedules is what torch's own do: how many micro-batches they take, and how long ranks wait."""

from __future__ import annotations

import itertools
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

from trainer.plan.parallel_plan import ParallelPlan, check_parallel_plan
from trainer.plan.schedules import (
    PROVEN,
    SCHEDULES,
    Combination,
    bubble_of,
    combination_of,
    nearest_micro_batches,
    nearest_proven,
    nearest_proven_plan,
)
from trainer.plan.split import stage_ids

SECONDS = {"FORWARD": 1, "BACKWARD_INPUT": 1, "BACKWARD_WEIGHT": 1, "FULL_BACKWARD": 2}


def torch_schedule(plan: ParallelPlan) -> Any:
    """Torch's schedule for the first rank of a pipeline, with stages that are never run. Raises ValueError."""
    made: Any = get_schedule_class(plan.schedule)
    stages = [
        SimpleNamespace(
            group_size=plan.pp, group_rank=0, num_stages=plan.num_stages, stage_index=number, is_first=number == 0,
            is_last=number == plan.num_stages - 1, submod=torch.nn.Identity(), group=None, has_backward=False,
        )
        for number in stage_ids(plan, 0)
    ]  # fmt: skip
    return made(stages if issubclass(made, PipelineScheduleMulti) else stages[0], plan.micro_batches)


def plan_of(schedule: str, pp: int, micro_batches: int, stages: int | None = None) -> ParallelPlan:
    stages = SCHEDULES[schedule].least_stages if stages is None else stages
    return ParallelPlan(
        strategy="pipeline", pp=pp, schedule=schedule, stages_per_rank=stages, micro_batches=micro_batches
    )


def test_the_names_are_torchs() -> None:
    assert [get_schedule_class(name).__name__.removeprefix("Schedule") for name in SCHEDULES] == list(SCHEDULES)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_micro_batches_that_a_schedule_takes_are_those_that_torch_takes(schedule: str) -> None:
    for pp, micro_batches in itertools.product((2, 3, 4), range(1, 18)):
        try:
            torch_schedule(plan_of(schedule, pp, micro_batches))
        except ValueError:
            is_taken = False
        else:
            is_taken = True
        assert SCHEDULES[schedule].takes(micro_batches, pp) == is_taken, (pp, micro_batches)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_nearest_numbers_of_micro_batches_are_taken(schedule: str) -> None:
    for pp, wanted in itertools.product((2, 3, 8), range(1, 40)):
        nearest = nearest_micro_batches(schedule, wanted, pp)
        assert nearest
        assert all(SCHEDULES[schedule].takes(number, pp) for number in nearest)
        assert nearest == (wanted,) or wanted not in nearest


# --- Bubble ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("schedule", "pp", "micro_batches", "stages", "bubble"),
    [
        ("GPipe", 4, 4, 1, 3 / 7),
        ("GPipe", 4, 1, 1, 3 / 4),
        ("1F1B", 2, 8, 1, 1 / 9),
        ("Interleaved1F1B", 4, 8, 2, 3 / 19),
        ("InterleavedZeroBubble", 4, 8, 3, 3 / 75),
        ("ZBVZeroBubble", 4, 8, 2, 3 / 51),
        ("DualPipeV", 4, 8, 2, 3 / 51),
    ],
)
def test_the_bubble_is_that_of_theory(schedule: str, pp: int, micro_batches: int, stages: int, bubble: float) -> None:
    assert bubble_of(plan_of(schedule, pp, micro_batches, stages)) == pytest.approx(bubble, abs=1e-12)


def test_without_a_pipeline_nobody_waits() -> None:
    assert bubble_of(ParallelPlan(strategy="ddp", dp_replicate=8)) == 0.0


@pytest.mark.parametrize("schedule", [name for name, one in SCHEDULES.items() if one.least_stages > 1])
def test_the_bubble_is_that_of_torchs_order_where_all_three_parts_take_equally_long(schedule: str) -> None:
    stages = [2, 3] if SCHEDULES[schedule].most_stages > 2 else [2]
    for pp, micro_batches, num in itertools.product((2, 3, 4), (1, 2, 3, 4, 6, 8, 12, 16), stages):
        if not SCHEDULES[schedule].takes(micro_batches, pp):
            continue
        plan = plan_of(schedule, pp, micro_batches, num)
        # Few micro-batches in an interleaved zero-bubble order: about so.
        is_rough = schedule == "InterleavedZeroBubble" and micro_batches < pp
        assert bubble_of(plan) == pytest.approx(simulated_bubble(plan), abs=0.12 if is_rough else 1e-9), plan


def simulated_bubble(plan: ParallelPlan) -> float:
    """The part of the time in which the busiest rank waits when torch's order of actions is played through."""
    queues = {rank: _parts(order) for rank, order in torch_schedule(plan).pipeline_order.items()}
    clock, busy = dict.fromkeys(queues, 0), dict.fromkeys(queues, 0)
    ends: dict[tuple[str, int, int], int] = {}
    while any(queues.values()):
        ready = [rank for rank, queue in queues.items() if queue and _needs(queue[0], plan) <= ends.keys()]
        assert ready, "the order never ends"
        for rank in ready:
            action = queues[rank].pop(0)
            name, seconds = action.computation_type.name, SECONDS[action.computation_type.name]
            clock[rank] = max([clock[rank], *(ends[need] for need in _needs(action, plan))]) + seconds
            busy[rank] += seconds
            kind = "backward" if name in ("BACKWARD_INPUT", "FULL_BACKWARD") else name.lower()
            ends[kind, action.stage_index, action.microbatch_index] = clock[rank]
    return 1 - max(busy.values()) / max(clock.values())


def _parts(order: list[Any]) -> list[Any]:
    return [part for action in order if action is not None for part in (action.sub_actions or [action])]


def _needs(action: Any, plan: ParallelPlan) -> set[tuple[str, int, int]]:
    """What must have ended before."""
    stage, micro = action.stage_index, action.microbatch_index
    if action.computation_type.name == "FORWARD":
        return {("forward", stage - 1, micro)} if stage > 0 else set()
    if action.computation_type.name == "BACKWARD_WEIGHT":
        return {("backward", stage, micro)}
    last = stage == plan.num_stages - 1
    return {("forward", stage, micro)} if last else {("forward", stage, micro), ("backward", stage + 1, micro)}


# --- What is proven --------------------------------------------------------------------------------------------------


def test_what_trains_wrong_or_crashes_is_not_in_the_table() -> None:
    """A pipeline over copies of shards, and the zero-bubble family over split layers, have no equality test."""
    assert len(set(PROVEN)) == len(PROVEN)
    for one in PROVEN:
        assert one.schedule is None or one.data != "hybrid"
        assert one.schedule is None or not one.tensor or not SCHEDULES[one.schedule].splits_backward


@pytest.mark.parametrize(
    ("wanted", "nearest"),
    [
        (("1F1B", "hybrid", False), ("1F1B", "shard", False)),
        (("1F1B", "hybrid", True), ("1F1B", "shard", False)),
        (("1F1B", "shard", True), ("1F1B", "shard", False)),
        (("ZBVZeroBubble", "replicate", True), ("Interleaved1F1B", "replicate", True)),
        (("DualPipeV", "none", True), ("Interleaved1F1B", "none", True)),
        (("ZBVZeroBubble", "shard", True), ("ZBVZeroBubble", "shard", False)),
        ((None, "hybrid", True), (None, "shard", True)),
        (("GPipe", "none", False), ("GPipe", "none", False)),
    ],
)
def test_the_nearest_proven_combination_changes_least_and_needs_no_more_memory(
    wanted: tuple[Any, Any, bool], nearest: tuple[Any, Any, bool]
) -> None:
    found = nearest_proven(Combination(schedule=wanted[0], data=wanted[1], tensor=wanted[2]))

    assert (found.schedule, found.data, found.tensor) == nearest


def test_whatever_is_asked_the_nearest_plan_runs_on_as_many_ranks() -> None:
    for schedule, replicas, shards, tp in itertools.product((None, *SCHEDULES), (1, 2), (1, 4), (1, 2)):
        pipeline = ParallelPlan() if schedule is None else plan_of(schedule, 2, 8)
        plan = ParallelPlan(
            strategy="auto", pp=pipeline.pp, dp_replicate=replicas, dp_shard=shards, tp=tp,
            schedule=pipeline.schedule, stages_per_rank=pipeline.stages_per_rank, micro_batches=pipeline.micro_batches,
        )  # fmt: skip
        found = nearest_proven_plan(plan)

        assert combination_of(found) in PROVEN
        assert found.world_size == plan.world_size
        if combination_of(plan) in PROVEN:
            assert found == plan


@pytest.mark.parametrize("one", PROVEN, ids=str)
def test_every_row_of_the_table_can_be_planned(one: Combination) -> None:
    pipeline = ParallelPlan() if one.schedule is None else plan_of(one.schedule, 2, 8)
    replicas = 2 if one.data in ("replicate", "hybrid") else 1
    shards = 2 if one.data in ("shard", "hybrid") else 1
    plan = ParallelPlan(
        strategy="pipeline" if one.schedule else "tensor" if one.tensor else
        {"none": "single", "replicate": "ddp", "shard": "fsdp", "hybrid": "hsdp"}[one.data],
        pp=pipeline.pp, dp_replicate=replicas, dp_shard=shards, tp=2 if one.tensor else 1,
        schedule=pipeline.schedule, stages_per_rank=pipeline.stages_per_rank, micro_batches=pipeline.micro_batches,
    )  # fmt: skip

    check_parallel_plan(plan, plan.world_size)
    assert combination_of(plan) == one
