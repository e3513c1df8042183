"""Pipelines where runs of a schedule differ in size, and where a stage's result does not lie in one piece: against a
loop by hand, in float64.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.reference import all_differences, by_hand
from tests.distributed.tasks import table
from tests.distributed.training_cases import Trace, plan_for, trace_task
from tests.support.ranks import Ranks
from trainer.mesh import Mesh
from trainer.plan.training_plan import TrainingPlan, TrainSettings
from trainer.task import TrainTask

NUM_STEPS = 3


class Transposed(nn.Module):
    """A layer whose result lies in memory column by column, as that of a patch embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(values).t().contiguous().t()
        return result


def transposing() -> TrainTask:
    """A classifier of a table, of four layers."""

    def build() -> nn.Module:
        return nn.Sequential(nn.Linear(12, 16), Transposed(), nn.Linear(16, 16), nn.Linear(16, 5)).double()

    return TrainTask(model=build, loss=nn.functional.cross_entropy, data=table())


def train(mesh: Mesh, plan: TrainingPlan) -> Trace:
    """On a rank."""
    return trace_task(mesh, transposing(), plan, NUM_STEPS)


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(4) as four:
        yield four


@pytest.mark.parametrize(
    ("batch_size", "parallel"),
    [
        (14, {"strategy": "model", "pp": 2, "dp_shard": 2}),
        (18, {"strategy": "pipeline", "pp": 2, "dp_shard": 2, "micro_batches": 2}),
        (14, {"strategy": "model", "pp": 2, "dp_replicate": 2}),
    ],
    ids=lambda one: "-".join(map(str, one.values())) if isinstance(one, dict) else str(one),
)
def test_parts_of_different_sizes_add_up_to_the_whole_batch(
    ranks: Ranks, batch_size: int, parallel: dict[str, Any]
) -> None:
    """A rank runs the schedule twice in a step, with parts of other sizes, and so the second for the first time: torch
    then clears the gradients of sharded stages."""
    settings = TrainSettings(steps=NUM_STEPS, batch_size=batch_size, optimizer="sgd", lr=0.05)
    plan = plan_for("transposing", 4, settings, grad_accum_steps=2, **parallel)

    traces = ranks.run(train, plan)

    expected = by_hand(transposing(), settings, NUM_STEPS)
    assert all_differences(traces, expected) == []
    assert traces[0].losses == pytest.approx(expected.losses, rel=1e-10)


@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "pipeline", "pp": 2, "cut_points": (2,)},
        {"strategy": "pipeline", "pp": 2, "schedule": "ZBVZeroBubble", "cut_points": (1, 2, 3)},
    ],
    ids=["1F1B", "ZBVZeroBubble"],
)
def test_a_stage_hands_on_what_does_not_lie_in_one_piece(ranks: Ranks, parallel: dict[str, Any]) -> None:
    settings = TrainSettings(steps=NUM_STEPS, batch_size=16, optimizer="sgd", lr=0.05)
    plan = plan_for("transposing", 4, settings, micro_batches=4, **parallel)

    traces = ranks.run(train, plan)

    assert all_differences(traces, by_hand(transposing(), settings, NUM_STEPS)) == []
