"""A recipe or entry in a job file: its settings are the plan's, wrong ones are all told at once, each with its line."""

from __future__ import annotations

import json
from typing import Any

import pytest

from service.domain.spec import JobSpec
from service.schemas.parse_spec import InvalidSpec, Problem, parse_spec
from service.schemas.training_wire import CheckpointWire, ParallelWire, TrainWire
from service.schemas.wire_types import WireModel
from trainer.plan.parallel_plan import ParallelRequest, RankLayout
from trainer.plan.problem import PlanError
from trainer.plan.training_plan import CheckpointSettings, RunTarget, TrainingSpec, TrainSettings, plan_training

RECIPE = {"name": "x", "run": {"recipe": "mlp"}, "train": {"steps": 10}}
ENTRY = {"name": "x", "run": {"entry": "pkg.task:make"}, "train": {"steps": 10}, "code": {"path": "/shared/code"}}


def parsed(document: dict[str, Any], *overrides: str) -> JobSpec:
    return parse_spec(json.dumps(document).encode(), "application/json", overrides)


def trained(document: dict[str, Any]) -> TrainingSpec:
    training = parsed(document).training
    assert training is not None
    return training


def problems_of(document: dict[str, Any], *overrides: str) -> dict[str, Problem]:
    with pytest.raises(InvalidSpec) as caught:
        parsed(document, *overrides)
    return {problem.pointer: problem for problem in caught.value.problems}


def test_a_recipe_needs_no_code_and_takes_the_defaults_of_the_plan() -> None:
    args = {"hidden": [64, 64], "dropout": 0.1, "target": None}
    spec = parsed({**RECIPE, "run": {"recipe": "mlp", "args": args}})

    assert (spec.run.kind, spec.code.bundle, spec.code.path) == ("recipe", None, None)
    assert spec.training == TrainingSpec(
        run=RunTarget(recipe="mlp", args=args),
        train=TrainSettings(steps=10),
    )


def test_an_entry_is_a_function_of_the_code() -> None:
    args = {"width": 64, "layers": [1, 2], "deep": {"a": None}}
    spec = parsed({**ENTRY, "run": {"entry": "pkg.task:make", "args": args}})

    assert (spec.run.kind, spec.training and spec.training.run) == (
        "entry",
        RunTarget(entry="pkg.task:make", args=args),
    )
    assert "no code to find the entry in" in problems_of({**ENTRY, "code": None})["run.entry"].message


def test_every_setting_of_the_job_file_reaches_the_plan() -> None:
    text = """
name: x
run: {recipe: transformer, args: {size: tiny}}
train: {epochs: 3, batch_size: 64, optimizer: sgd, lr: 3e-4, weight_decay: 0.1, momentum: 0.8, schedule: cosine,
        warmup_steps: 5, final_lr_ratio: 0.1, clip_norm: 1, eval_every: 50, seed: 7, deterministic: true,
        data_workers: 2, report_every: 4, hang_after: 10m}
parallel: {strategy: pipeline, pp: 2, dp_replicate: 1, dp_shard: 2, tp: 1, schedule: Interleaved1F1B,
           stages_per_rank: 3, micro_batches: 4, cut_points: [1, 2, 3, 5, 8], activation_checkpointing: selective,
           precision: bf16, grad_accum_steps: 2, compile: true, sync_batch_norm: false}
checkpoint: {every_steps: 100, every: 1h30m, keep: 5, async: false}
"""
    assert parse_spec(text.encode(), "application/yaml", ()).training == TrainingSpec(
        run=RunTarget(recipe="transformer", args={"size": "tiny"}),
        train=TrainSettings(
            epochs=3, batch_size=64, optimizer="sgd", lr=3e-4, weight_decay=0.1, momentum=0.8, schedule="cosine",
            warmup_steps=5, final_lr_ratio=0.1, clip_norm=1.0, eval_every=50, seed=7, deterministic=True,
            data_workers=2, report_every=4, hang_after_seconds=600.0,
        ),
        parallel=ParallelRequest(
            strategy="pipeline", pp=2, dp_replicate=1, dp_shard=2, tp=1, schedule="Interleaved1F1B",
            stages_per_rank=3, micro_batches=4, cut_points=(1, 2, 3, 5, 8), activation_checkpointing="selective",
            precision="bf16", grad_accum_steps=2, compile=True, sync_batch_norm=False,
        ),
        checkpoint=CheckpointSettings(every_steps=100, every_seconds=5400.0, keep=5, is_async=False),
    )  # fmt: skip


@pytest.mark.parametrize(
    ("given", "every_steps", "every_seconds"),
    [({}, None, 600.0), ({"every_steps": 9}, 9, None), ({"every": "5m"}, None, 300.0)],
)
def test_checkpoints_come_by_the_clock_unless_steps_are_named(
    given: dict[str, Any], every_steps: int | None, every_seconds: float | None
) -> None:
    settings = trained({**RECIPE, "checkpoint": given}).checkpoint
    assert (settings.every_steps, settings.every_seconds) == (every_steps, every_seconds)


def test_a_trained_job_may_be_preempted_unless_it_says_no_and_a_script_only_if_it_says_so() -> None:
    script = {"name": "x", "run": {"script": "a.py"}, "code": {"path": "/c"}}
    wished = [parsed({**document, **more}).preemptible for document in (RECIPE, ENTRY, script)
              for more in ({}, {"preemptible": False}, {"preemptible": True})]  # fmt: skip
    assert wished == [True, False, True, True, False, True, False, False, True]


@pytest.mark.parametrize(
    ("parts", "pointer", "message"),
    [
        ({"train": None}, "train", "says neither steps nor epochs"),
        ({"train": {"steps": 1, "epochs": 1}}, "train", "says both steps and epochs"),
        ({"train": {"steps": 0}}, "train.steps", "must be at least 1, not 0"),
        ({"train": {"steps": "10"}}, "train.steps", "must be a whole number"),
        ({"train": {"steps": 10**13}}, "train.steps", "must be at most"),
        ({"train": {"steps": 10, "lr": -1}}, "train.lr", "must be at least 0"),
        ({"train": {"steps": 10, "warmup_steps": 10}}, "train.warmup_steps", "there are only 10 steps"),
        ({"train": {"steps": 10, "optimizer": "adam"}}, "train.optimizer", 'cannot be "adam"'),
        ({"train": {"steps": 10, "hang_after": 0}}, "train.hang_after", "must be more than 0"),
        ({"train": {"steps": 10, "hang_after": "5x"}}, "train.hang_after", "is not a duration"),
        ({"train": {"steps": 10, "batch_size": 3}, "parallel": {"grad_accum_steps": 4}}, "train.batch_size", "is 3"),
        ({"parallel": {"strategy": "fsdp", "pp": 0}}, "parallel.pp", "must be at least 1"),
        ({"parallel": {"strategy": "pipeline", "schedule": "1f1b"}}, "parallel.schedule", 'cannot be "1f1b"'),
        ({"parallel": {"strategy": "ddp", "schedule": "1F1B"}}, "parallel.schedule", "in a pipeline only, and ddp has"),
        ({"parallel": {"micro_batches": 4}}, "parallel.micro_batches", "neither strategy nor pp asks for one"),
        ({"parallel": {"pp": 2, "cut_points": [2, 1]}}, "parallel.cut_points", "above the one before"),
        ({"parallel": {"pp": 2, "cut_points": [0]}}, "parallel.cut_points[0]", "must be at least 1"),
        ({"parallel": {"pp": 2, "cut_points": 3}}, "parallel.cut_points", "must be a list"),
        ({"parallel": {"pp": 2, "cut_points": [1] * 1001}}, "parallel.cut_points", "at most 1000 are allowed"),
        ({"parallel": {"activation_checkpointing": "all"}}, "parallel.activation_checkpointing", 'cannot be "all"'),
        ({"parallel": {"strategy": "tensor", "find_unused_parameters": True}}, "parallel.find_unused_parameters",
         "is a setting of DDP"),
        ({"parallel": {"strategy": "pipeline", "micro_batches": 33}}, "train.batch_size", "33 micro_batches need at"),
        ({"parallel": {"strategy": "dpp"}}, "parallel.strategy", 'cannot be "dpp"'),
        ({"parallel": {"precision": "fp16"}}, "parallel.precision", 'cannot be "fp16"'),
        ({"checkpoint": {"keep": 0}}, "checkpoint.keep", "must be at least 1"),
        ({"checkpoint": {"async": "yes"}}, "checkpoint.async", "must be true or false"),
        ({"checkpoint": {"is_async": True}}, "checkpoint.is_async", "unknown key"),
        ({"run": {"recipe": "mlp", "args": ["a", 1]}}, "run.args", "must be a mapping of parameters"),
        ({"run": {"recipe": "mlp", "args": "a"}}, "run.args", "must be a mapping of parameters"),
        ({"run": {"recipe": "mlp", "args": {"width": 1}}}, "run.args.width", "is no parameter of mlp"),
        ({"run": {"recipe": "mlp", "args": {"dropout": "x"}}}, "run.args.dropout", "must be a number"),
        ({"run": {"recipe": "mpl"}}, "run.recipe", "names no recipe"),
        ({"run": {"recipe": 3}}, "run.recipe", "must be a string"),
        ({"run": {"recipe": "mlp", "script": "a.py"}, "code": {"path": "/c"}}, "run.recipe", "exclude each other"),
    ],
)  # fmt: skip
def test_a_wrong_setting_is_the_one_problem(parts: dict[str, Any], pointer: str, message: str) -> None:
    problems = problems_of({**RECIPE, **parts})

    assert message in problems[pointer].message
    assert list(problems) == [pointer]


@pytest.mark.parametrize("entry", ["train.py", "pkg:", ":make", "pkg/task:make", "pkg.task:make()", "a b:c", ""])
def test_an_entry_that_names_no_function_is_refused(entry: str) -> None:
    problem = problems_of({**ENTRY, "run": {"entry": entry}})["run.entry"]
    assert "does not name a function" in problem.message or "is empty" in problem.message


@pytest.mark.parametrize(
    ("args", "pointer", "message"),
    [
        ({"a": {"b": "\ud800"}}, "run.args.a.b", "lone surrogate"),
        ({"a": {"b\0": 1}}, "run.args.a.b\0", "NUL character"),
        ({"a": "x" * 2_000_000}, "run.args", "at most 1048576 are allowed"),
    ],
)
def test_parameters_of_an_entry_are_what_json_can_say(args: dict[str, Any], pointer: str, message: str) -> None:
    problems = problems_of({**ENTRY, "run": {"entry": "a:b", "args": args}})
    assert (list(problems), message in problems[pointer].message) == ([pointer], True)


def nested(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = {"a": value}
    return value


def test_parameters_of_any_depth_are_judged_without_failing() -> None:
    assert trained({**ENTRY, "run": {"entry": "a:b", "args": nested(20)}}).run.args == nested(20)
    for levels, pointer, message in ((25, "run.args.a", "deeper than 20 levels"), (300, "", "deeper than 30 levels")):
        problems = problems_of({**ENTRY, "run": {"entry": "a:b", "args": nested(levels)}})
        assert message in problems[pointer].message
    body = json.dumps({**ENTRY, "run": {"entry": "a:b", "args": {"big": 0}}}).replace('"big": 0', '"big": 1e999')
    with pytest.raises(InvalidSpec, match="finite"):
        parse_spec(body.encode(), "application/json", ())


def test_all_problems_come_at_once_each_with_its_line() -> None:
    text = "\n".join(
        (
            "name: x",
            "run: {entry: train.py}",
            "train:",
            "  stesp: 10",
            "  batch_size: 2",
            "  lr: fast",
            "parallel:",
            "  strategy: auto",
            "  pp: 4",
            "  grad_accum_steps: 4",
            "checkpoint: {every: 5x}",
        )
    )
    with pytest.raises(InvalidSpec) as caught:
        parse_spec(text.encode(), "application/yaml", ())

    found = [(problem.line, problem.pointer) for problem in caught.value.problems]
    assert found == [
        (2, "run.entry"), (2, "run.entry"), (4, "train.stesp"), (5, "train.batch_size"), (6, "train.lr"),
        (9, "parallel.pp"), (11, "checkpoint.every"),
    ]  # fmt: skip
    assert all(problem.suggestion for problem in caught.value.problems if problem.pointer != "train.lr")


@pytest.mark.parametrize(
    ("part", "key", "meant"),
    [
        ("train", "learning_rate", "train.lr"),
        ("train", "max_steps", "train.steps"),
        ("train", "num_epochs", "train.epochs"),
        ("train", "global_batch_size", "train.batch_size"),
        ("train", "gradient_accumulation_steps", "parallel.grad_accum_steps"),
        ("parallel", "mixed_precision", "parallel.precision"),
        ("parallel", "num_microbatches", "parallel.micro_batches"),
        ("parallel", "tensor_parallel_size", "parallel.tp"),
        ("parallel", "gradient_checkpointing", "parallel.activation_checkpointing"),
        ("parallel", "batch_size", "train.batch_size"),
        ("checkpoint", "save_steps", "checkpoint.every_steps"),
        ("checkpoint", "asynch", "checkpoint.async"),
        ("train", "epohcs", "train.epochs"),
    ],
)
def test_names_of_other_systems_are_understood_well_enough_to_help(part: str, key: str, meant: str) -> None:
    given: dict[str, Any] = {"train": {"steps": 10}, part: {key: 1}}
    suggestion = problems_of({**RECIPE, **given})[f"{part}.{key}"].suggestion
    assert suggestion == f"Did you mean {meant}?"


def test_settings_may_be_set_on_the_command_line() -> None:
    spec = parsed(RECIPE, "train.steps=20", "run.args.dropout=0.5", "parallel.precision=bf16", "checkpoint.async=false")
    assert spec.training is not None
    assert (spec.training.train.steps, spec.training.run.args) == (20, {"dropout": 0.5})
    assert (spec.training.parallel.precision, spec.training.checkpoint.is_async) == ("bf16", False)
    assert list(problems_of(RECIPE, "train.warmup_steps=99")) == ["--set train.warmup_steps"]


def test_a_short_exponent_is_a_number_where_it_is_a_setting_and_a_word_for_a_script() -> None:
    text = "{name: x, run: {entry: a:b, args: {lr: 3e-4, deep: [1e3]}}, code: {path: /c}, train: {steps: 9, lr: 1e-3}}"
    training = parse_spec(text.encode(), "application/yaml", ("run.args.eps=1e-8", "run.args.more={a: 1e-2}")).training
    assert training is not None
    assert (training.train.lr, training.run.args) == (
        1e-3,
        {"lr": 3e-4, "deep": [1e3], "eps": 1e-8, "more": {"a": 0.01}},
    )
    script = "{name: x, run: {script: a.py, args: [--lr, 3e-4]}, code: {path: /c}}"
    assert parse_spec(script.encode(), "application/yaml", ()).run.args == ("--lr", "3e-4")


@pytest.mark.parametrize(
    "parallel",
    [
        {"strategy": "pipeline", "pp": 4, "schedule": "DualPipeV"},
        {"strategy": "tensor", "tp": 8},
        {"pp": 2, "dp_shard": 2, "tp": 2, "cut_points": [3]},
        {"strategy": "hsdp"},
        {"strategy": "model"},
        {"strategy": "auto", "activation_checkpointing": "full"},
    ],
)
def test_how_many_ranks_a_plan_needs_is_no_matter_before_the_gang_is_known(parallel: dict[str, Any]) -> None:
    given = {**parallel, "cut_points": tuple(parallel["cut_points"])} if "cut_points" in parallel else parallel
    assert trained({**RECIPE, "parallel": parallel}).parallel == ParallelRequest(**given)


# --- The job file and the plan mean the same -----------------------------------------------------------------------

FIELDS = {"hang_after": "hang_after_seconds", "every": "every_seconds"}
LEAST = {
    "train.steps": (1, 0), "train.epochs": (1, 0), "train.batch_size": (1, 0), "train.lr": (0, -0.5),
    "train.weight_decay": (0, -0.5), "train.momentum": (0, -0.5), "train.warmup_steps": (0, -1),
    "train.final_lr_ratio": (0, -0.5), "train.clip_norm": (0.1, 0), "train.eval_every": (1, 0), "train.seed": (0, -1),
    "train.data_workers": (0, -1), "train.report_every": (1, 0), "train.hang_after": (0.1, 0),
    "parallel.grad_accum_steps": (1, 0), "parallel.pp": (1, 0), "parallel.dp_replicate": (1, 0),
    "parallel.dp_shard": (1, 0), "parallel.tp": (1, 0), "parallel.stages_per_rank": (1, 0),
    "parallel.micro_batches": (1, 0),
    "checkpoint.every_steps": (1, 0), "checkpoint.every": (0.1, 0), "checkpoint.keep": (1, 0),
}  # fmt: skip
"""Each number of a training: the least that is taken, and one that is not."""


def with_setting(key: str, value: Any) -> tuple[dict[str, Any], TrainingSpec]:
    """A job file with this setting, and the plan's own settings with it."""
    part, _, name = key.partition(".")
    parts: dict[str, dict[str, Any]] = {"train": {"steps": 10}, "parallel": {}, "checkpoint": {}}
    if name == "epochs":
        parts["train"] = {}
    parts[part][name] = value
    fields = {one: {FIELDS.get(name, name): value for name, value in given.items()} for one, given in parts.items()}
    spec = TrainingSpec(
        run=RunTarget(recipe="mlp"),
        train=TrainSettings(**fields["train"]),
        parallel=ParallelRequest(**fields["parallel"]),
        checkpoint=CheckpointSettings(**fields["checkpoint"]),
    )
    return {"name": "x", "run": {"recipe": "mlp"}, **parts}, spec


def test_every_number_of_a_training_is_in_the_table() -> None:
    models: dict[str, type[WireModel]] = {"train": TrainWire, "parallel": ParallelWire, "checkpoint": CheckpointWire}
    numbers = {
        f"{part}.{name}"
        for part, model in models.items()
        for name, facts in model.model_json_schema()["properties"].items()
        if any(option.get("type") in ("integer", "number") for option in facts["anyOf"])
    }
    assert numbers == set(LEAST)


@pytest.mark.parametrize("key", LEAST)
def test_the_job_file_takes_what_the_ranks_take_and_refuses_what_they_refuse(key: str) -> None:
    least, too_little = LEAST[key]

    document, spec = with_setting(key, least)
    parsed(document)
    plan_training(spec, RankLayout())

    document, spec = with_setting(key, too_little)
    assert list(problems_of(document)) == [key]
    with pytest.raises(PlanError) as caught:
        plan_training(spec, RankLayout())
    assert key in [problem.key for problem in caught.value.problems]
