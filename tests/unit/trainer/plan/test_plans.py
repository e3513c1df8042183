"""Plans: what a job file says becomes a plan for its ranks, or every problem with its key and fix."""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest

from gangline.protocol.launch import decode
from trainer.plan.parallel_plan import ParallelPlan, ParallelRequest, RankLayout
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
TWO = RankLayout(ranks_per_node=2)
BY_HAND = {"run": {"recipe": "mlp", "args": {"hidden": [3]}}, "parallel": {}, "train": {"steps": 5}}


def keys_of(error: pytest.ExceptionInfo[PlanError]) -> list[str]:
    """What the problems are about."""
    return [problem.key for problem in error.value.problems]


def test_all_problems_are_told_at_once() -> None:
    spec = TrainingSpec(
        run=RunTarget(entry="no function"),
        parallel=ParallelRequest(strategy="single", precision="fp8", grad_accum_steps=0),
        train=TrainSettings(steps=5, epochs=2, lr=-1.0, optimizer="adam", schedule="step", warmup_steps=7),
        checkpoint=CheckpointSettings(keep=0, every_seconds=0.0),
    )

    with pytest.raises(PlanError) as error:
        plan_training(spec, TWO)

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

    with pytest.raises(PlanError, match=r"2 data-parallel ranks × 4 grad_accum_steps need at least one sample each: 8"):
        plan_training(spec, TWO)


def test_a_batch_must_have_a_sample_for_each_micro_batch_that_was_asked_for() -> None:
    """O-49: a batch of 8 in 3 parts trains (parts differ by one sample), one of 2 in 4 parts cannot."""
    spec = TrainingSpec(run=RunTarget(recipe="mlp"), parallel=ParallelRequest(strategy="pipeline", micro_batches=4))

    with pytest.raises(PlanError) as error:
        plan_training(replace(spec, train=TrainSettings(steps=1, batch_size=2)), TWO)
    assert "is 2, but 4 micro_batches need at least one sample each: 4" in str(error.value)
    assert "or parallel.micro_batches to 2 or less" in str(error.value)
    with pytest.raises(PlanError, match="at least one sample each: 4"):
        check_training(replace(spec, train=TrainSettings(steps=1, batch_size=2)))

    plan = plan_training(replace(spec, train=TrainSettings(steps=1, batch_size=7)), TWO)
    assert plan.parallel.micro_batches == 4


def test_what_no_number_of_ranks_makes_right_is_told_before_the_ranks_are_known() -> None:
    parallel = ParallelRequest(strategy="ddp", schedule="GPipe", pp=0, find_unused_parameters=True)

    with pytest.raises(PlanError) as error:
        check_training(TrainingSpec(run=RunTarget(recipe="mlp"), train=TRAIN, parallel=parallel))

    assert keys_of(error) == ["parallel.pp", "parallel.schedule"]


def test_what_depends_on_the_ranks_waits_until_they_are_known() -> None:
    parallel = ParallelRequest(pp=4, tp=8, dp_shard=2, cut_points=(1, 2))

    check_training(TrainingSpec(run=RunTarget(recipe="mlp"), train=TRAIN, parallel=parallel))


def test_specs_and_plan_files_of_before_there_were_pipelines_still_read() -> None:
    spec: dict[str, Any] = {
        "run": {"recipe": "mlp"},
        "parallel": {"strategy": "ddp", "grad_accum_steps": 2},
        "train": {"steps": 5},
    }
    file = {**spec, "parallel": {**spec["parallel"], "dp_replicate": 4, "schedule": "1F1B", "micro_batches": 1}}

    assert decode(TrainingSpec, spec).parallel == ParallelRequest(strategy="ddp", grad_accum_steps=2)
    assert read_plan(json.dumps(file)).parallel == ParallelPlan(strategy="ddp", dp_replicate=4, grad_accum_steps=2)


def test_a_plan_file_comes_back_as_it_was_written() -> None:
    plan = TrainingPlan(
        run=RunTarget(recipe="mlp", args={"hidden": [3, 4]}),
        parallel=ParallelPlan(strategy="pipeline", pp=4, schedule="GPipe", micro_batches=8, cut_points=(2, 3, 5)),
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
    text = change if isinstance(change, str) else json.dumps({**BY_HAND, **change})

    with pytest.raises(PlanError, match=message):
        read_plan(text)


@pytest.mark.parametrize(
    ("change", "key", "fix"),
    [
        ({"train": {"steps": 5, "btach_size": 64}}, "train.btach_size", "batch_size"),
        ({"checkpoint": {"every": "10m"}}, "checkpoint.every", "every_seconds"),
        ({"checkpoint_folder": "/tmp/run"}, "checkpoint_folder", "checkpoint_root"),
        ({"resume_from": [{"path": "a", "step": 5, "stpe": 6}]}, "resume_from[0].stpe", "step"),
    ],
)
def test_a_key_that_means_nothing_is_refused_in_a_file_that_was_written_by_hand(
    change: dict[str, object], key: str, fix: str
) -> None:
    with pytest.raises(PlanError) as error:
        read_plan(json.dumps({**BY_HAND, **change}))

    assert keys_of(error) == [key]
    assert fix in error.value.problems[0].fix.removesuffix(".").split(": ")[1].split(", ")
    newer = json.dumps({**json.loads(write_plan(read_plan(json.dumps(BY_HAND)))), "of_a_later_release": 1})
    assert read_plan(newer) == read_plan(json.dumps(BY_HAND)), "an agent of a later release wrote it"
