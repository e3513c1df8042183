"""Data parallelism computes what one process computes: gradients and weights in float64, against a hand-written loop.

A loss curve would not tell: under AdamW it looks right with gradients summed instead of averaged. It is a smoke test.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

import pytest

from tests.distributed.reference import by_hand, differences
from tests.distributed.tasks import TASKS
from tests.distributed.training_cases import FAULTS, plan_for, train_and_trace, train_with_fault
from tests.support.ranks import TEST_SECONDS, Ranks
from trainer.plan.training_plan import TrainSettings

pytestmark = pytest.mark.timeout(TEST_SECONDS)

NUM_TRACED, NUM_STEPS = 5, 20
SETTINGS = {
    "sgd": TrainSettings(steps=NUM_STEPS, batch_size=24, optimizer="sgd", lr=0.05, momentum=0.9),
    "adamw": TrainSettings(steps=NUM_STEPS, batch_size=24, optimizer="adamw", lr=1e-3, weight_decay=0.1),
}


SLOW = "recipe_resnet"
QUICK_OF_SLOW = {("sgd", 1, 2), ("adamw", 4, 4)}
CASES = [
    pytest.param(task, *layout, marks=[pytest.mark.full] if task == SLOW and layout not in QUICK_OF_SLOW else [])
    for task in ("recipe_mlp", "recipe_transformer", SLOW)
    for layout in itertools.product(("sgd", "adamw"), (1, 4), (2, 4))
]


@pytest.fixture(scope="module")
def ranks_of() -> Iterator[dict[int, Ranks]]:
    with Ranks(2) as two, Ranks(4) as four:
        yield {2: two, 4: four}


@pytest.mark.parametrize(("task", "optimizer", "grad_accum_steps", "world_size"), CASES)
def test_ranks_compute_what_one_process_computes(
    ranks_of: dict[int, Ranks], task: str, optimizer: str, grad_accum_steps: int, world_size: int
) -> None:
    expected = by_hand(TASKS[task](), SETTINGS[optimizer], NUM_TRACED)
    plan = plan_for(task, world_size, SETTINGS[optimizer], grad_accum_steps=grad_accum_steps)

    traces = ranks_of[world_size].run(train_and_trace, task, plan, NUM_TRACED)

    for trace in traces:
        assert differences(trace, expected) == []
    assert traces[0].losses == pytest.approx(expected.losses, rel=1e-10)


def test_ranks_of_two_nodes_compute_what_one_process_computes() -> None:
    with Ranks(4, ranks_per_node=2) as two_nodes:
        for task, optimizer, grad_accum_steps in (("recipe_mlp", "sgd", 4), ("recipe_transformer", "adamw", 1)):
            expected = by_hand(TASKS[task](), SETTINGS[optimizer], NUM_TRACED)
            plan = plan_for(task, 4, SETTINGS[optimizer], grad_accum_steps=grad_accum_steps)

            for trace in two_nodes.run(train_and_trace, task, plan, NUM_TRACED):
                assert differences(trace, expected) == []


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
def test_in_single_precision_the_loss_curve_is_that_of_one_process(ranks_of: dict[int, Ranks], optimizer: str) -> None:
    settings = SETTINGS[optimizer]
    expected = by_hand(TASKS["recipe_transformer_fp32"](), settings, NUM_TRACED)

    for world_size, grad_accum_steps in ((2, 1), (4, 4)):
        plan = plan_for("recipe_transformer_fp32", world_size, settings, grad_accum_steps=grad_accum_steps)
        for trace in ranks_of[world_size].run(train_and_trace, "recipe_transformer_fp32", plan, NUM_TRACED)[:1]:
            assert trace.losses == pytest.approx(expected.losses, abs=5e-6)


@pytest.mark.parametrize("world_size", [2, 4])
def test_batch_norm_takes_its_statistics_over_all_ranks(ranks_of: dict[int, Ranks], world_size: int) -> None:
    expected = by_hand(TASKS["batch_norm"](), SETTINGS["sgd"], NUM_TRACED)

    plan = plan_for("batch_norm", world_size, SETTINGS["sgd"])
    for trace in ranks_of[world_size].run(train_and_trace, "batch_norm", plan, NUM_TRACED):
        assert differences(trace, expected) == []


@pytest.mark.parametrize("optimizer", ["sgd", "adamw"])
@pytest.mark.parametrize("fault", sorted(FAULTS))
def test_the_comparison_sees_a_planted(ranks_of: dict[int, Ranks], fault: str, optimizer: str) -> None:
    expected = by_hand(TASKS["mlp"](), SETTINGS[optimizer], NUM_TRACED)
    plan = plan_for("mlp", 4, SETTINGS[optimizer], grad_accum_steps=4)

    traces = ranks_of[4].run(train_with_fault, "mlp", plan, NUM_TRACED, fault)

    assert any(differences(trace, expected) for trace in traces)


def test_a_loss_of_sum_and_count_weighs_every_token_of_the_step_the_same(ranks_of: dict[int, Ranks]) -> None:
    """Each sample has another number of tokens that count, so the mean of means over ranks is another number."""
    expected = by_hand(TASKS["masked_mean"](), SETTINGS["sgd"], NUM_TRACED)

    for world_size, grad_accum_steps in ((2, 1), (4, 4)):
        plan = plan_for("masked", world_size, SETTINGS["sgd"], grad_accum_steps=grad_accum_steps)
        for trace in ranks_of[world_size].run(train_and_trace, "masked", plan, NUM_TRACED):
            assert differences(trace, expected) == []
