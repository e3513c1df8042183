"""`python -m trainer profile` and `plan`: what they print, and what they say of files they cannot use."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from gangline.protocol.launch import encode
from gangline.protocol.outcomes import TrainerExit
from gangline.protocol.pulse import Pulse
from trainer.main import main
from trainer.plan.model_profile import read_profile
from trainer.plan.parallel_plan import ParallelPlan, ParallelRequest, RankLayout
from trainer.plan.recipe_profiles import recipe_profile
from trainer.plan.training_plan import (
    RunTarget,
    TrainingPlan,
    TrainingSpec,
    TrainSettings,
    plan_training,
    write_plan,
)
from trainer.stop import StopFlag

ENTRY = """
import torch
from torch import nn
from trainer.task import TrainTask


def build(width: int) -> TrainTask:
    data = [(torch.zeros(width), torch.zeros(width))]
    return TrainTask(
        model=lambda: nn.Sequential(nn.Linear(width, width), nn.ReLU(), nn.Linear(width, width)),
        loss=nn.functional.mse_loss,
        data=data,
    )
"""


def call(*arguments: str) -> int:
    return main(list(arguments), StopFlag({}), Pulse(None))


@pytest.fixture
def plan_file(tmp_path: Path) -> Path:
    run = RunTarget(recipe="transformer", args={"num_layers": 12, "width": 1024, "num_heads": 16, "data": "synthetic"})
    plan = TrainingPlan(run=run, parallel=ParallelPlan(strategy="auto"), train=TrainSettings(steps=1, batch_size=16))
    path = tmp_path / "plan.json"
    path.write_text(write_plan(plan))
    return path


def test_a_profile_is_printed_that_can_be_read(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert call("profile", str(plan_file), "-o", "json") == 0
    args = {"num_layers": 12, "width": 1024, "num_heads": 16, "data": "synthetic"}
    assert read_profile(capsys.readouterr().out) == recipe_profile("transformer", args)


def test_an_entry_of_a_job_file_is_counted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "counted_entry.py").write_text(ENTRY)
    job = tmp_path / "job.yaml"
    job.write_text("run: {entry: 'counted_entry:build', args: {width: 32}}\ntrain: {steps: 5, batch_size: 8}\n")
    assert call("profile", str(job), "-o", "json") == 0
    profile = read_profile(capsys.readouterr().out)
    assert profile.name == "counted_entry:build"
    assert profile.num_parameters == 2 * (32 * 32 + 32)
    assert [layer.name for layer in profile.layers] == ["0", "1", "2"]


def test_a_plan_is_printed_with_layout_bytes_why_and_alternatives(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("plan", str(plan_file), "--nodes", "2", "--ranks-per-node", "4", "--gpu-memory", "1GB") == 0
    printed = capsys.readouterr().out
    for words in ("on 8 ranks of 2 nodes", "optimizer", "all-gather", "why: Transformer has 15", "or: "):
        assert words in printed


def test_a_plan_as_json_has_the_parallel_plan_and_the_reasons(
    plan_file: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("plan", str(plan_file), "--ranks-per-node", "2", "--gpu-memory", "80GB", "-o", "json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert (printed["plan"]["strategy"], printed["plan"]["dp_replicate"]) == ("ddp", 2)
    assert printed["memory"]["by_pp_rank"][0]["total"] < 80 * 10**9
    assert printed["why"]


def test_a_profile_made_before_is_taken(plan_file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    call("profile", str(plan_file), "-o", "json")
    made = tmp_path / "profile.json"
    made.write_text(capsys.readouterr().out)
    assert call("plan", str(plan_file), "--profile", str(made), "--gpu-memory", "80GB") == 0
    assert "Chosen is single" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--gpu-memory", "1MB"), "whatever the batch"),
        (("--gpu-memory", "much"), "Write a number and GB or GiB"),
        (("--strategy", "magic"), "parallel.strategy cannot be 'magic'"),
        (("--profile", "missing.json"), "No such file"),
    ],
)
def test_what_cannot_be_planned_is_a_configuration_error_with_its_reason(
    plan_file: Path, arguments: tuple[str, ...], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert call("plan", str(plan_file), *arguments) == TrainerExit.CONFIG_ERROR
    assert words in capsys.readouterr().err


def test_a_script_has_no_model_that_could_be_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    job = tmp_path / "job.yaml"
    job.write_text("run: {script: train.py}\n")
    assert call("profile", str(job)) == TrainerExit.CONFIG_ERROR
    assert "must name a recipe or an entry" in capsys.readouterr().err


def test_a_job_file_is_planned_on_what_its_resources_say_wherever_one_stands(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "path", [*sys.path])
    (tmp_path / "planned_entry.py").write_text(ENTRY)
    job = tmp_path / "job.yaml"
    job.write_text(
        "run: {entry: 'planned_entry:build', args: {width: 32}}\ntrain: {steps: 5, batch_size: 8}\n"
        "resources: {gpus: {min: 2, max: 4}}\nparallel: {strategy: auto}\n"
    )

    assert call("plan", str(job), "-o", "json") == 0

    plan = json.loads(capsys.readouterr().out)["plan"]
    assert (plan["strategy"], plan["dp_replicate"]) == ("ddp", 4)


def test_a_plan_that_the_model_does_not_go_with_is_refused(plan_file: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = call("plan", str(plan_file), "--strategy", "tensor", "--ranks-per-node", "3")

    assert code == TrainerExit.CONFIG_ERROR
    assert "parallel.tp" in capsys.readouterr().err


# --- What is printed is what would run --------------------------------------------------------------------------------

JOB = "run: {recipe: transformer}\nresources: {gpus: 4}\n"


@pytest.mark.parametrize(
    ("parallel", "expected"),
    [
        ("{}", {"strategy": "ddp", "dp_replicate": 4}),
        ("{strategy: dp}", {"strategy": "ddp", "dp_replicate": 4}),
        ("{pp: 2}", {"strategy": "pipeline", "pp": 2, "dp_replicate": 2}),
        ("{tp: 2, dp_shard: 2}", {"strategy": "tensor", "tp": 2, "dp_shard": 2}),
    ],
)
def test_a_job_that_names_no_strategy_gets_what_a_submitted_one_gets(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parallel: str, expected: dict[str, Any]
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"{JOB}parallel: {parallel}\ntrain: {{batch_size: 32}}\n")

    assert call("plan", str(job), "--gpu-memory", "10MB", "-o", "json") == 0

    plan = json.loads(capsys.readouterr().out)["plan"]
    assert {key: plan[key] for key in expected} == expected
    assert plan["grad_accum_steps"] == 1, "only auto cuts a batch to make it fit"


@pytest.mark.parametrize(
    ("parallel", "words"),
    [
        ("{strategy: ddp}", "train.batch_size is 2, but 4 data-parallel ranks need at least one sample each"),
        ("{strategy: pipeline, micro_batches: 8}", "train.batch_size is 2, but 8 micro_batches need"),
    ],
)
def test_a_batch_with_fewer_samples_than_parts_is_refused_as_at_submission(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], parallel: str, words: str
) -> None:
    job = tmp_path / "job.yaml"
    job.write_text(f"{JOB}parallel: {parallel}\ntrain: {{batch_size: 2}}\n")

    assert call("plan", str(job)) == TrainerExit.CONFIG_ERROR
    assert words in capsys.readouterr().err


def test_a_plan_file_is_shown_as_it_is(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Four ranks as two pipelines in a V beside each other: nothing of that is chosen anew."""
    request = ParallelRequest(strategy="pipeline", pp=2, dp_shard=2, schedule="ZBVZeroBubble", micro_batches=4)
    spec = TrainingSpec(run=RunTarget(recipe="transformer"), parallel=request, train=TrainSettings(steps=1))
    plan = plan_training(spec, RankLayout(ranks_per_node=4))
    file = tmp_path / "plan.json"
    file.write_text(write_plan(plan))

    assert call("plan", str(file), "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["plan"] == encode(plan.parallel)
    assert call("plan", str(file), "--ranks-per-node", "6", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["pp"] == 6, "on other ranks the strategy is filled in anew"
    assert call("plan", str(file), "--strategy", "auto", "-o", "json") == 0
    assert json.loads(capsys.readouterr().out)["plan"]["strategy"] == "ddp"
