"""What data parallelism promises beyond equal gradients: unused parameters named, uneven data, one score for all."""

from __future__ import annotations

import dataclasses
import math
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from gangline.protocol.pulse import Pulse
from tests.distributed.tasks import SLOW_EVALUATION_SECONDS, TASKS
from tests.distributed.training_cases import Recorder, plan_for
from tests.support.ranks import TEST_SECONDS, RankFailed, Ranks
from trainer.assembly import assemble_task
from trainer.loop import Surroundings, Training
from trainer.mesh import Mesh
from trainer.plan.training_plan import CheckpointSettings, TrainingPlan, TrainSettings
from trainer.stop import StopFlag

pytestmark = pytest.mark.timeout(TEST_SECONDS)

TRAIN = TrainSettings(steps=8, batch_size=8, optimizer="sgd", lr=0.05)
SOON_SECONDS = 40.0
"""Ranks that wait for one that does not come wait for 60."""


@pytest.fixture(scope="module")
def two_ranks() -> Iterator[Ranks]:
    with Ranks(2) as ranks:
        yield ranks


def train(mesh: Mesh, task: str, plan: TrainingPlan) -> dict[str, Any]:
    """Train to the end; the last step, the buffers, and what was told."""
    events = Recorder()
    subject = assemble_task(TASKS[task](), plan, mesh, events, {})
    around = Surroundings(mesh=mesh, events=events, stop=StopFlag({}), pulse=Pulse(None), say=lambda text: None)
    before = [one.detach().clone() for one in subject.model.inner.parameters()]
    ending = Training(subject, around).run()
    after = list(subject.model.inner.parameters())
    moved = math.sqrt(sum(float((new - old).square().sum()) for new, old in zip(after, before, strict=True)))
    torch.use_deterministic_algorithms(False)  # the ranks live on
    buffers = {name: buffer.clone() for name, buffer in subject.model.inner.named_buffers()}
    return {
        "moved": moved,
        "modes": getattr(subject.model.inner, "modes", []),
        "steps": [one["step"] for one in events.records if one["kind"] == "progress" and "loss" in one["metrics"]],
        "notices": [one["text"] for one in events.records if one["kind"] == "notice"],
        "step_seconds": events.values("step_seconds"),
        "dtypes": {str(one.dtype) for one in after},
        "grad_norm": events.values("grad_norm"),
        "step": ending.step,
        "buffers": buffers,
        "val_loss": events.values("val_loss"),
        "loss": events.values("loss"),
    }


@pytest.mark.parametrize(
    ("task", "where"), [("unused_layer", "on every rank"), ("layer_of_odd_ranks", "on rank 0 only")]
)
def test_o48_unused_parameters_are_named_before_anybody_waits_for_them(two_ranks: Ranks, task: str, where: str) -> None:
    with pytest.raises(RankFailed) as failure:
        two_ranks.run(train, task, plan_for(task, 2, TRAIN), seconds=SOON_SECONDS)

    assert failure.value.types == {0: "UnusedParametersError", 1: "UnusedParametersError"}
    text = str(failure.value)
    assert f"2 parameters got no gradient {where}: extra.bias, extra.weight" in text
    assert "find_unused_parameters: true" in text


@pytest.mark.parametrize("task", ["unused_layer", "layer_of_odd_ranks"])
def test_o48_with_the_option_it_trains(two_ranks: Ranks, task: str) -> None:
    ended = two_ranks.run(train, task, plan_for(task, 2, TRAIN, find_unused_parameters=True))

    assert [one["step"] for one in ended] == [8, 8]


def test_o46_uneven_streams_stop_with_the_shortest_rank(two_ranks: Ranks) -> None:
    settings = dataclasses.replace(TRAIN, steps=100)

    ended = two_ranks.run(train, "uneven_stream", plan_for("uneven_stream", 2, settings))

    assert [one["step"] for one in ended] == [10, 10]
    assert len(ended[0]["loss"]) == 10


def test_an_iterable_dataset_goes_on_where_its_checkpoint_stands(two_ranks: Ranks, tmp_path: Path) -> None:
    def plan(steps: int) -> TrainingPlan:
        made = plan_for("uneven_stream", 2, dataclasses.replace(TRAIN, steps=steps))
        return dataclasses.replace(made, checkpoint=CheckpointSettings(), checkpoint_root=str(tmp_path))

    whole = two_ranks.run(train, "uneven_stream", plan_for("uneven_stream", 2, dataclasses.replace(TRAIN, steps=9)))
    first = two_ranks.run(train, "uneven_stream", plan(4))
    second = two_ranks.run(train, "uneven_stream", plan(9))

    assert first[0]["loss"] + second[0]["loss"] == whole[0]["loss"]


def test_o51_batch_norm_statistics_and_scores_are_the_same_on_every_rank(two_ranks: Ranks) -> None:
    with_sync = two_ranks.run(train, "batch_norm", plan_for("batch_norm", 2, TRAIN))
    without = two_ranks.run(train, "batch_norm", plan_for("batch_norm", 2, TRAIN, sync_batch_norm=False))

    for first, second in (with_sync, without):
        assert first["buffers"].keys() == second["buffers"].keys() != set()
        assert all((first["buffers"][name] == one).all() for name, one in second["buffers"].items())
        assert first["val_loss"] == second["val_loss"] != []


def test_bf16_computes_in_half_precision_and_keeps_the_weights_in_fp32(two_ranks: Ranks) -> None:
    settings = dataclasses.replace(TRAIN, steps=40, optimizer="adamw", lr=1e-2)

    half = two_ranks.run(train, "recipe_transformer_fp32", plan_for("", 2, settings, precision="bf16"))[0]
    full = two_ranks.run(train, "recipe_transformer_fp32", plan_for("", 2, settings))[0]

    assert half["dtypes"] == {"torch.float32"}
    assert half["loss"] != full["loss"]
    assert half["loss"][-1] == pytest.approx(full["loss"][-1], rel=0.05)
    assert half["loss"][-1] < 0.9 * half["loss"][0]


def test_clipping_bounds_the_update_and_reports_the_norm_before_it(two_ranks: Ranks) -> None:
    one_step = dataclasses.replace(TRAIN, steps=1)

    clipped = two_ranks.run(train, "mlp", plan_for("mlp", 2, dataclasses.replace(one_step, clip_norm=1e-3)))
    free = two_ranks.run(train, "mlp", plan_for("mlp", 2, one_step))

    norm = free[0]["grad_norm"][0]
    assert norm > 1e-2
    assert clipped[0]["grad_norm"] == [pytest.approx(norm, rel=1e-10)]
    assert free[0]["moved"] == pytest.approx(TRAIN.lr * norm, rel=1e-10)
    assert clipped[0]["moved"] == pytest.approx(TRAIN.lr * 1e-3, rel=1e-3)


@pytest.mark.full
@pytest.mark.timeout(600)
def test_a_compiled_model_trains_the_same_and_its_checkpoint_loads_uncompiled(two_ranks: Ranks, tmp_path: Path) -> None:
    def plan(steps: int, *, compile: bool) -> TrainingPlan:
        made = plan_for("mlp", 2, dataclasses.replace(TRAIN, steps=steps), compile=compile)
        return dataclasses.replace(made, checkpoint=CheckpointSettings(), checkpoint_root=str(tmp_path))

    whole = two_ranks.run(train, "mlp", plan_for("mlp", 2, dataclasses.replace(TRAIN, steps=6)))
    first = two_ranks.run(train, "mlp", plan(3, compile=True), seconds=500)
    second = two_ranks.run(train, "mlp", plan(6, compile=False))

    assert first[0]["loss"] + second[0]["loss"] == pytest.approx(whole[0]["loss"], rel=1e-9)


def test_a_part_that_is_kept_in_evaluation_mode_stays_there_after_an_evaluation(two_ranks: Ranks) -> None:
    settings = dataclasses.replace(TRAIN, steps=4, eval_every=2)

    ended = two_ranks.run(train, "frozen_backbone", plan_for("frozen_backbone", 2, settings))

    assert ended[0]["modes"] and not any(ended[0]["modes"])


def test_ranks_with_other_numbers_of_batches_evaluate_a_batch_norm_without_statistics(two_ranks: Ranks) -> None:
    task = "batch_norm_without_statistics"

    ended = two_ranks.run(train, task, plan_for(task, 2, TRAIN), seconds=SOON_SECONDS)

    assert ended[0]["val_loss"] == ended[1]["val_loss"] != []


def test_reentrant_activation_checkpointing_is_not_taken_for_unused_parameters(two_ranks: Ranks) -> None:
    ended = two_ranks.run(train, "recomputed", plan_for("recomputed", 2, TRAIN))

    assert [one["step"] for one in ended] == [8, 8]


@pytest.mark.parametrize(
    ("task", "message"),
    [
        ("longer_on_rank_1", "the ranks see different data (samples and held-out samples: rank 0: 97 and 41; rank 1"),
        ("empty_stream", "the training data ended before its first step"),
    ],
)
def test_data_that_ranks_cannot_train_on_together_is_refused_at_once(two_ranks: Ranks, task: str, message: str) -> None:
    with pytest.raises(RankFailed) as failure:
        two_ranks.run(train, task, plan_for(task, 2, TRAIN), seconds=SOON_SECONDS)

    assert failure.value.types == {0: "ConfigError", 1: "ConfigError"}
    assert message in str(failure.value)


def test_a_stream_that_ends_early_says_so_and_loses_no_report(two_ranks: Ranks) -> None:
    settings = dataclasses.replace(TRAIN, steps=100)
    plan = plan_for("uneven_stream", 2, settings)
    plan = dataclasses.replace(plan, train=dataclasses.replace(plan.train, report_every=4))

    ended = two_ranks.run(train, "uneven_stream", plan)[0]

    assert ended["steps"] == [4, 8, 10]
    assert ended["notices"] == ["The training data ended at step 10 of 100."]


def test_metrics_and_counts_of_one_element_are_numbers(two_ranks: Ranks) -> None:
    assert two_ranks.run(train, "shaped_metric", plan_for("shaped_metric", 2, TRAIN))[0]["step"] == 8


def train_by_a_clock_that_sleeping_moves(mesh: Mesh, task: str, plan: TrainingPlan) -> dict[str, Any]:
    """As `train`; who sleeps wakes up at once, and it is that much later."""
    clock, slept = time.perf_counter, [0.0]
    with patch.object(time, "sleep", slept.append), patch.object(time, "perf_counter", lambda: clock() + sum(slept)):
        return train(mesh, task, plan)


def test_the_time_of_an_evaluation_is_no_time_of_the_steps(two_ranks: Ranks) -> None:
    settings = dataclasses.replace(TRAIN, eval_every=4)
    plan = plan_for("slow_evaluation", 2, settings)

    ended = two_ranks.run(train_by_a_clock_that_sleeping_moves, "slow_evaluation", plan)[0]

    assert len(ended["step_seconds"]) == 8
    assert max(ended["step_seconds"][1:]) < SLOW_EVALUATION_SECONDS


def test_deterministic_runs_give_the_same_bits(two_ranks: Ranks) -> None:
    settings = dataclasses.replace(TRAIN, deterministic=True)

    runs = [two_ranks.run(train, "batch_norm", plan_for("batch_norm", 2, settings))[0] for _ in range(2)]

    assert runs[0]["loss"] == runs[1]["loss"] != []


def test_nan_on_one_rank_is_that_ranks_failure_and_the_others_say_so(two_ranks: Ranks) -> None:
    with pytest.raises(RankFailed) as failure:
        two_ranks.run(train, "not_finite_on_rank_1", plan_for("not_finite_on_rank_1", 2, TRAIN))

    assert failure.value.types == {0: "PeerFailedError", 1: "NonFiniteLossError"}
    assert "the loss is not finite at step 4 on rank 1" in str(failure.value)


@pytest.mark.full
def test_o45_the_score_of_7_samples_does_not_depend_on_the_number_of_ranks(two_ranks: Ranks) -> None:
    scores = []
    with Ranks(1) as one, Ranks(3) as three:
        for ranks in (one, two_ranks, three):
            settings = dataclasses.replace(TRAIN, steps=1, lr=0.0)
            ended = ranks.run(train, "seven_held_out", plan_for("seven_held_out", ranks.world_size, settings))
            scores.append({round(value, 12) for rank in ended for value in rank["val_loss"]})

    assert scores[0] == scores[1] == scores[2]
    assert len(scores[0]) == 1 and not math.isnan(next(iter(scores[0])))
