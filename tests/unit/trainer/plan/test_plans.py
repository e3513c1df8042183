"""Plans: what a job file says becomes a plan for its ranks, or every problem with its key and fix."""

from __future__ import annotations

import dataclasses
import json
from typing import Any

import pytest

from trainer.plan.parallel_plan import ParallelPlan, ParallelRequest, check_parallel_plan, resolve_parallel
from trainer.plan.problem import PlanError
from trainer.plan.training_plan import (
    CheckpointSettings,
    ResumePoint,
    RunTarget,
    TrainingPlan,
    TrainingSpec,
    TrainSettings,
    check_training,
    plan_training,
    read_plan,
    write_plan,
)

TRAIN = TrainSettings(steps=10)


def keys_of(error: pytest.ExceptionInfo[PlanError]) -> list[str]:
    """What the problems are about."""
    return [problem.key for problem in error.value.problems]


@pytest.mark.parametrize(
    ("asked", "world_size", "strategy"),
    [
        (None, 1, "single"),
        (None, 4, "ddp"),
        ("single", 1, "single"),
        ("ddp", 4, "ddp"),
        ("ddp", 1, "ddp"),
        ("dp", 4, "ddp"),
    ],
)
def test_a_strategy_is_chosen_by_the_ranks_unless_one_is_named(
    asked: str | None, world_size: int, strategy: str
) -> None:
    plan = resolve_parallel(ParallelRequest(strategy=asked), world_size).plan

    assert (plan.strategy, plan.dp_replicate, plan.world_size) == (strategy, world_size, world_size)


def test_dp_is_taken_as_ddp_and_says_so() -> None:
    assert "taken as ddp" in resolve_parallel(ParallelRequest(strategy="dp"), 2).notes[0]


@pytest.mark.parametrize("strategy", ["fsdp", "hsdp", "model", "tensor", "pipeline", "auto"])
def test_a_strategy_that_no_code_runs_yet_is_refused_by_name(strategy: str) -> None:
    with pytest.raises(PlanError) as error:
        resolve_parallel(ParallelRequest(strategy=strategy), 4)

    assert keys_of(error) == ["parallel.strategy"]
    assert f"{strategy} is not run by this version" in str(error.value)


@pytest.mark.parametrize("axis", ["pp", "dp_shard", "tp", "stages_per_rank", "micro_batches"])
def test_an_axis_that_no_code_runs_yet_is_refused_by_name(axis: str) -> None:
    two: dict[str, Any] = {axis: 2}
    plan = dataclasses.replace(ParallelPlan(strategy="ddp"), **two)

    with pytest.raises(PlanError) as error:
        check_parallel_plan(plan, plan.world_size)

    assert keys_of(error) == [f"parallel.{axis}"]


def test_a_plan_file_that_names_a_strategy_that_no_code_runs_is_refused() -> None:
    with pytest.raises(PlanError, match="fsdp is not run by this version"):
        check_parallel_plan(ParallelPlan(strategy="fsdp", dp_replicate=2), 2)


def test_a_plan_for_another_number_of_ranks_shows_the_product() -> None:
    with pytest.raises(PlanError, match=r"pp 1 × dp_replicate 4 × dp_shard 1 × tp 1 = 4 ranks, but 3 were started"):
        check_parallel_plan(ParallelPlan(strategy="ddp", dp_replicate=4), 3)


def test_all_problems_are_told_at_once() -> None:
    spec = TrainingSpec(
        run=RunTarget(entry="no function"),
        parallel=ParallelRequest(strategy="pipeline", precision="fp8", grad_accum_steps=0),
        train=TrainSettings(steps=5, epochs=2, lr=-1.0, optimizer="adam", schedule="step", warmup_steps=7),
        checkpoint=CheckpointSettings(keep=0, every_seconds=0.0),
    )

    with pytest.raises(PlanError) as error:
        plan_training(spec, 2)

    assert set(keys_of(error)) == {
        "run.entry",
        "parallel.strategy",
        "parallel.precision",
        "parallel.grad_accum_steps",
        "train",
        "train.lr",
        "train.optimizer",
        "train.schedule",
        "train.warmup_steps",
        "checkpoint.keep",
        "checkpoint.every",
    }


@pytest.mark.parametrize(
    ("train", "message"),
    [
        (TrainSettings(), "neither steps nor epochs"),
        (TrainSettings(steps=1, epochs=1), "both steps and epochs"),
        (TrainSettings(steps=1, lr=float("nan")), "train.lr is nan"),
        (TrainSettings(steps=1, clip_norm=0.0), "train.clip_norm is 0.0"),
    ],
)
def test_settings_that_mean_nothing_are_refused(train: TrainSettings, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        check_training(TrainingSpec(run=RunTarget(recipe="mlp"), train=train))


def test_a_batch_smaller_than_its_parts_is_refused_with_the_sum() -> None:
    spec = TrainingSpec(
        run=RunTarget(recipe="mlp"),
        parallel=ParallelRequest(grad_accum_steps=4),
        train=TrainSettings(steps=1, batch_size=7),
    )

    with pytest.raises(PlanError, match=r"2 data-parallel ranks × 4 micro-batches need at least one sample each: 8"):
        plan_training(spec, 2)


def test_a_plan_file_comes_back_as_it_was_written() -> None:
    plan = TrainingPlan(
        run=RunTarget(recipe="mlp", args={"hidden": [3, 4]}),
        parallel=ParallelPlan(strategy="ddp", dp_replicate=2),
        train=TRAIN,
        checkpoint_root="/shared/jobs/1",
        checkpoint_subfolder="attempt-3",
        resume_from=(ResumePoint(path="attempt-2/step-00000005", step=5),),
        notes=("a note",),
    )

    assert read_plan(write_plan(plan)) == plan


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("not json", "cannot be read"),
        ({"run": 3}, "cannot be read"),
        ({"version": 2}, "version is 2"),
        ({"train": {"steps": "many"}}, "cannot be read"),
        ({"train": {"steps": 0}}, "train.steps is 0"),
    ],
)
def test_what_is_no_plan_file_is_refused(change: str | dict[str, object], message: str) -> None:
    least = {"run": {"recipe": "mlp"}, "parallel": {}, "train": {"steps": 5}}
    text = change if isinstance(change, str) else json.dumps({**least, **change})

    with pytest.raises(PlanError, match=message):
        read_plan(text)
