"""Pipelines where runs of a schedule differ in size, and where a stage's result does not lie in one piece: against a
loop by hand, in float64.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.reference import all_differences, by_hand
from tests.distributed.tasks import table
from tests.distributed.training_cases import Trace, plan_for, trace_task
from tests.support.ranks import TEST_SECONDS, Ranks
from trainer.mesh import Mesh
from trainer.plan.training_plan import TrainingPlan, TrainSettings
from trainer.task import TrainTask

NUM_STEPS = 3
pytestmark = pytest.mark.timeout(TEST_SECONDS)


class Transposed(nn.Module):
    """A layer whose result lies in memory column by column, as that of a patch embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(16, 16)

    def forward(self, values: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.linear(values).t().contiguous().t()
        return result


def classifier(second: str = "transposed") -> TrainTask:
    """A classifier of a table, of four layers; `second`: what the second one is."""

    def build() -> nn.Module:
        made = Transposed() if second == "transposed" else nn.Sequential(nn.SiLU(inplace=True), nn.Linear(16, 16))
        return nn.Sequential(nn.Linear(12, 16), made, nn.Linear(16, 16), nn.Linear(16, 5)).double()

    return TrainTask(model=build, loss=nn.functional.cross_entropy, data=table())


def train(mesh: Mesh, plan: TrainingPlan, second: str = "transposed") -> Trace:
    """On a rank."""
    return trace_task(mesh, classifier(second), plan, NUM_STEPS)


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
    plan = plan_for("classifier", 4, settings, grad_accum_steps=2, **parallel)

    traces = ranks.run(train, plan)

    expected = by_hand(classifier(), settings, NUM_STEPS)
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
    plan = plan_for("classifier", 4, settings, micro_batches=4, **parallel)

    traces = ranks.run(train, plan)

    assert all_differences(traces, by_hand(classifier(), settings, NUM_STEPS)) == []


@pytest.mark.parametrize("schedule", ["1F1B", "ZBVZeroBubble"])
def test_a_stage_may_begin_with_a_layer_that_writes_over_its_input(ranks: Ranks, schedule: str) -> None:
    settings = TrainSettings(steps=NUM_STEPS, batch_size=16, optimizer="sgd", lr=0.05)
    cut_points = (1,) if schedule == "1F1B" else (1, 3, 4)
    parallel = {"strategy": "pipeline", "pp": 2, "micro_batches": 4, "schedule": schedule, "cut_points": cut_points}

    traces = ranks.run(train, plan_for("classifier", 4, settings, **parallel), "in_place")

    assert all_differences(traces, by_hand(classifier("in_place"), settings, NUM_STEPS)) == []


def logs_errors_of_schedules(mesh: Mesh) -> bool:
    """Whether a rank logs what torch's schedules have to say of an error."""
    return logging.getLogger(torch.distributed.pipelining.schedules.__name__).isEnabledFor(logging.ERROR)


def test_a_layers_error_is_told_without_torchs_table_of_the_schedule(ranks: Ranks) -> None:
    """It is a hundred lines for a pipeline of several stages a rank, above the error that counts."""
    settings = TrainSettings(steps=1, batch_size=16)
    ranks.run(train, plan_for("classifier", 4, settings, strategy="pipeline", pp=4, micro_batches=4))
    assert ranks.run(logs_errors_of_schedules) == [False] * 4
