"""Which layers make a pipeline stage, and which rank runs it. Pure.

Not for: what a layer costs (`trainer.plan.model_profile`), building a stage (`trainer.parallel.stages`).
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from fractions import Fraction

from trainer.plan.axes import ParallelPlan
from trainer.plan.schedules import SCHEDULES


def split_by_cost(costs: Sequence[float], num_stages: int) -> tuple[int, ...]:
    """The first layer of each stage but the first, so that the costliest stage costs as little as it can.

    `costs`: of each layer, in order, in any unit. Each stage gets one layer or more, of neighbours. Of the splits whose
    costliest stage costs the same, the most even one is taken (the least sum of squared costs), and of those the one
    with the latest cuts: earlier stages are not the smaller ones. Exact: no rounding decides. Raises ValueError for
    costs that are no finite numbers from 0, and for fewer layers than stages.
    """
    if not 1 <= num_stages <= len(costs):
        raise ValueError(f"{len(costs)} layers cannot make {num_stages} stages of one layer or more")
    if not all(math.isfinite(cost) and cost >= 0 for cost in costs):
        raise ValueError(f"costs are {list(costs)}; a layer costs a finite number from 0")
    whole = _as_whole_numbers(costs)
    return _most_even(whole, num_stages, _least_bound(whole, num_stages))


def stages_of(num_layers: int, cut_points: Sequence[int]) -> tuple[range, ...]:
    """The layers of each stage. Raises ValueError for cut points that leave a stage without layers."""
    bounds = (0, *cut_points, num_layers)
    stages = tuple(range(first, last) for first, last in itertools.pairwise(bounds))
    if not all(stages):
        raise ValueError(f"cut points {list(cut_points)} leave a stage of {num_layers} layers empty")
    return stages


def stage_ids(plan: ParallelPlan, pp_rank: int) -> tuple[int, ...]:
    """The stages of a rank of the pipeline: every pp-th one, or one of each arm of a V."""
    if plan.pp > 1 and SCHEDULES[plan.schedule].is_v:
        return (pp_rank, 2 * plan.pp - 1 - pp_rank)
    return tuple(range(pp_rank, plan.num_stages, plan.pp))


def rank_of_stage(plan: ParallelPlan, stage: int) -> int:
    """The rank within the pipeline that runs a stage."""
    if plan.pp > 1 and SCHEDULES[plan.schedule].is_v:
        return min(stage, 2 * plan.pp - 1 - stage)
    return stage % plan.pp


def _as_whole_numbers(costs: Sequence[float]) -> list[int]:
    """The costs times a common factor: sums of floats would depend on their order."""
    exact = [Fraction(cost) for cost in costs]
    factor = math.lcm(*(cost.denominator for cost in exact))
    return [int(cost * factor) for cost in exact]


def _least_bound(costs: list[int], num_stages: int) -> int:
    """The cost of the costliest stage of the best split."""
    low, high = max(costs), sum(costs)
    while low < high:
        middle = (low + high) // 2
        if _num_stages_within(costs, middle) <= num_stages:
            high = middle
        else:
            low = middle + 1
    return low


def _num_stages_within(costs: list[int], bound: int) -> int:
    """The fewest stages of which none costs more than `bound`. More stages never cost more: any can be cut again."""
    stages, total = 1, 0
    for cost in costs:
        if total + cost > bound:
            stages, total = stages + 1, 0
        total += cost
    return stages


def _most_even(costs: list[int], num_stages: int, bound: int) -> tuple[int, ...]:
    """The cuts of the split with the least sum of squares of which no stage costs more than `bound`, latest first."""
    num_layers = len(costs)
    # Of the layers from each one to the last: the least sum of squares, and where the second stage then begins.
    best: list[int | None] = [None] * num_layers + [0]
    choices: list[list[int]] = []
    for left in range(num_stages):
        following: list[int | None] = [None] * (num_layers + 1)
        choice = [num_layers] * (num_layers + 1)
        for first in range(num_layers - left):
            total = 0
            for after in range(first + 1, num_layers + 1):
                total += costs[after - 1]
                if total > bound:
                    break
                rest = best[after]
                # `<=`: the latest cut of equal ones.
                if rest is not None and (following[first] is None or total**2 + rest <= following[first]):  # type: ignore[operator]
                    following[first], choice[first] = total**2 + rest, after
        best = following
        choices.append(choice)
    cuts, first = [], 0
    for choice in reversed(choices[1:]):
        first = choice[first]
        cuts.append(first)
    return tuple(cuts)
