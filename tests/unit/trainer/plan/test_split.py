"""Layers go to stages so that the costliest stage is as cheap as it can be; stages go to ranks as torch has it."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining._utils import generate_rank_to_stage_mapping

from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.schedules import SCHEDULES
from trainer.plan.split import rank_of_stage, split_by_cost, stage_ids, stages_of


def best_by_trying_all(costs: list[int], num_stages: int) -> tuple[int, ...]:
    """The rule of `split_by_cost`, said once more over every split."""

    def judged(cuts: tuple[int, ...]) -> tuple[int, int, tuple[int, ...]]:
        sums = [sum(costs[index] for index in stage) for stage in stages_of(len(costs), cuts)]
        return max(sums), sum(one**2 for one in sums), tuple(-cut for cut in cuts)

    return min(itertools.combinations(range(1, len(costs)), num_stages - 1), key=judged)


@settings(max_examples=300, deadline=None)
@given(costs=st.lists(st.integers(0, 9), min_size=1, max_size=9), data=st.data())
def test_no_other_split_has_a_cheaper_costliest_stage(costs: list[int], data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))

    assert split_by_cost(costs, num_stages) == best_by_trying_all(costs, num_stages)


@settings(max_examples=100, deadline=None)
@given(costs=st.lists(st.floats(0, 1e30), min_size=2, max_size=8), factor=st.integers(-40, 40), data=st.data())
def test_the_unit_of_costs_decides_nothing(costs: list[float], factor: int, data: st.DataObject) -> None:
    num_stages = data.draw(st.integers(1, len(costs)))
    scaled = [cost * 2.0**factor for cost in costs]
    if all(one / 2.0**factor == cost for one, cost in zip(scaled, costs, strict=True)):
        assert split_by_cost(scaled, num_stages) == split_by_cost(costs, num_stages)


@pytest.mark.parametrize(
    ("costs", "num_stages", "cuts"),
    [
        ([1, 1, 1, 1], 2, (2,)),
        ([1, 1, 1, 1, 1], 2, (3,)),  # earlier stages are not the smaller ones
        ([1] * 7, 3, (3, 5)),
        ([5, 1, 1, 1], 2, (1,)),
        ([1, 1, 1, 5], 2, (3,)),
        ([0.1, 0.2, 0.3], 2, (2,)),  # 0.1 + 0.2 is over 0.3 in floating point, exactly it is just so
        ([1, 1, 1, 1, 10], 3, (2, 4)),  # the most even one below what the last layer costs anyway
        ([0, 0, 0], 3, (1, 2)),
        ([3], 1, ()),
    ],
)
def test_splits_that_can_be_checked_by_hand(costs: list[float], num_stages: int, cuts: tuple[int, ...]) -> None:
    assert split_by_cost(costs, num_stages) == cuts


def test_hundreds_of_layers_are_split_at_once() -> None:
    cuts = split_by_cost([float(1 + index % 7) for index in range(400)], 32)

    sizes = [len(stage) for stage in stages_of(400, cuts)]
    assert (len(sizes), min(sizes) >= 10) == (32, True)


@pytest.mark.parametrize(
    ("costs", "num_stages", "message"),
    [
        ([1.0], 2, "1 layers cannot make 2 stages"),
        ([], 1, "0 layers cannot make 1 stages"),
        ([1.0, -1.0], 2, "a finite number from 0"),
        ([1.0, float("nan")], 1, "a finite number from 0"),
    ],
)
def test_what_cannot_be_split_is_refused(costs: list[float], num_stages: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        split_by_cost(costs, num_stages)


def test_stages_are_the_layers_between_cuts() -> None:
    assert stages_of(6, (2, 5)) == (range(2), range(2, 5), range(5, 6))
    for cuts in [(0,), (6,), (3, 3), (4, 2)]:
        with pytest.raises(ValueError, match="leave a stage of 6 layers empty"):
            stages_of(6, cuts)


@pytest.mark.parametrize("pp", [2, 3, 4, 8])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_each_rank_has_the_stages_that_torch_expects_of_it(schedule: str, pp: int) -> None:
    facts = SCHEDULES[schedule]
    plan = ParallelPlan(pp=pp, schedule=schedule, stages_per_rank=facts.least_stages)
    expected = generate_rank_to_stage_mapping(pp, plan.num_stages, "v" if facts.is_v else "loop")

    assert {rank: list(stage_ids(plan, rank)) for rank in range(pp)} == expected
    assert all(rank_of_stage(plan, stage) == rank for rank in range(pp) for stage in stage_ids(plan, rank))


def test_without_a_pipeline_the_one_stage_is_everybodys() -> None:
    assert stage_ids(ParallelPlan(dp_replicate=4), 0) == (0,)
    assert rank_of_stage(ParallelPlan(dp_replicate=4), 0) == 0
