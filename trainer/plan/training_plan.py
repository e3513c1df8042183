"""The plan file: all that a rank needs to train, as `python -m trainer run plan.json` reads it. Pure.

A job file's `run`, `train`, `parallel` and `checkpoint` become a `TrainingSpec` at submission; with the layout of an
attempt and the folders of a node that is a `TrainingPlan`, which the supervisor writes and every rank reads.
Not for: training (`trainer.loop`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from gangline.protocol.launch import decode, encode
from trainer.plan.parallel_plan import (
    ParallelPlan,
    ParallelRequest,
    RankLayout,
    check_parallel_request,
    resolve_parallel,
)
from trainer.plan.problem import PlanError, PlanProblem
from trainer.plan.recipe_catalog import check_recipe

PLAN_VERSION: Final = 1
MAX_KEPT: Final = 100
"""Largest `checkpoint.keep`: an attempt is told of as many, so that it knows which to delete."""
OPTIMIZERS: Final = ("adamw", "sgd")
SCHEDULES: Final = ("constant", "linear", "cosine")


@dataclass(frozen=True, kw_only=True)
class RunTarget:
    """What is trained: a built-in recipe, or a function of the user's that returns a `TrainTask`."""

    recipe: str | None = None
    entry: str | None = None
    """`package.module:function`."""
    args: dict[str, Any] = field(default_factory=dict)
    """Parameters of the recipe, or keyword arguments of the function."""


@dataclass(frozen=True, kw_only=True)
class TrainSettings:
    """How long and how it is trained. A step is one optimizer update."""

    steps: int | None = None
    """Steps in all. Give this or `epochs`."""
    epochs: int | None = None
    """Passes over the training data."""
    batch_size: int = 32
    """Global batch size: samples per step, over all ranks and micro-batches."""
    optimizer: str = "adamw"
    lr: float = 1e-3
    weight_decay: float = 0.0
    """Applied to parameters of two and more dimensions."""
    momentum: float = 0.9
    """Of sgd."""
    schedule: str = "constant"
    """Of the learning rate after the warm-up."""
    warmup_steps: int = 0
    """The learning rate rises linearly over these steps."""
    final_lr_ratio: float = 0.0
    """Where linear and cosine end, as a part of `lr`."""
    clip_norm: float | None = None
    """Largest norm of the gradient; None: not clipped."""
    eval_every: int | None = None
    """Evaluate each so many steps (and at the end); None: at the end only."""
    seed: int = 0
    deterministic: bool = False
    """Only algorithms that give the same bits each time; slower."""
    data_workers: int = 0
    """Processes per rank that load samples."""
    report_every: int | None = None
    """Report each so many steps; None: about twice a second."""
    hang_after_seconds: float = 300.0
    """A rank that moves on in nothing for this long (and five slow steps) counts as hung."""


@dataclass(frozen=True, kw_only=True)
class CheckpointSettings:
    """When checkpoints are written, and how many are kept. One is always written when a job is asked to make room."""

    every_steps: int | None = None
    every_seconds: float | None = 600.0
    """Whichever of the two comes first; both None: only on request and at the end."""
    keep: int = 3
    """Newest accepted checkpoints that stay on disk."""
    is_async: bool = True
    """Write in the background: the step waits only for a copy in memory."""


@dataclass(frozen=True, kw_only=True)
class TrainingSpec:
    """What a job says about its training, whatever GPUs it gets."""

    run: RunTarget
    parallel: ParallelRequest = field(default_factory=ParallelRequest)
    train: TrainSettings = field(default_factory=TrainSettings)
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    profile: dict[str, Any] | None = None
    """What the model costs, as `python -m trainer profile -o json` counts it; None: not known, or a recipe's own."""


@dataclass(frozen=True, kw_only=True)
class ResumePoint:
    """An accepted checkpoint."""

    path: str
    """Relative to the plan's `checkpoint_root`."""
    step: int


@dataclass(frozen=True, kw_only=True)
class TrainingPlan:
    """The plan file."""

    version: int = PLAN_VERSION
    run: RunTarget
    parallel: ParallelPlan
    train: TrainSettings
    checkpoint: CheckpointSettings = field(default_factory=CheckpointSettings)
    checkpoint_root: str | None = None
    """Folder of all the job's checkpoints on this node; None: none are written and none are read."""
    checkpoint_subfolder: str = ""
    """Folder below the root that this attempt writes into."""
    is_checkpoint_root_shared: bool = True
    """Whether all nodes see the same folder. If not, each node writes a whole copy of its own."""
    resume_from: tuple[ResumePoint, ...] | None = None
    """Checkpoints to try, newest first. None (no server chose): the newest usable one below the root."""
    notes: tuple[str, ...] = ()
    """What the user should know about how the plan was made."""


def check_training(spec: TrainingSpec) -> None:
    """Raise PlanError with all that is wrong with a job's settings, whatever its ranks."""
    problems = _problems_of(spec)
    try:
        check_parallel_request(spec.parallel)
    except PlanError as error:
        problems += error.problems
    problems += _least_parts_problems(spec)
    if problems:
        raise PlanError(problems)


def plan_training(spec: TrainingSpec, layout: RankLayout) -> TrainingPlan:
    """The plan of `spec` for the ranks of `layout`, without folders. Raises PlanError."""
    problems = _problems_of(spec)
    batch_size = spec.train.batch_size if spec.train.batch_size >= 1 else None
    try:
        resolved = resolve_parallel(spec.parallel, layout, batch_size=batch_size)
    except PlanError as error:
        raise PlanError([*problems, *error.problems]) from error
    problems += batch_problems(spec.train, resolved.plan)
    if problems:
        raise PlanError(problems)
    return TrainingPlan(
        run=spec.run,
        parallel=resolved.plan,
        train=spec.train,
        checkpoint=spec.checkpoint,
        notes=resolved.notes,
    )


def batch_problems(train: TrainSettings, parallel: ParallelPlan) -> list[PlanProblem]:
    """What keeps the global batch from being split over ranks and micro-batches."""
    return _parts_problems(
        train.batch_size, parallel.data_parallel_size, parallel.grad_accum_steps, parallel.micro_batches
    )


def _least_parts_problems(spec: TrainingSpec) -> list[PlanProblem]:
    """As `batch_problems`, with the axes that a job names: on any number of ranks there are as many parts."""
    asked = spec.parallel
    numbers = (
        (asked.dp_replicate or 1) * (asked.dp_shard or 1),
        asked.grad_accum_steps,
        asked.micro_batches or 1,
    )
    return _parts_problems(spec.train.batch_size, *numbers) if min(numbers) >= 1 else []


def _parts_problems(batch_size: int, data: int, accum: int, micro_batches: int) -> list[PlanProblem]:
    parts = data * accum * micro_batches
    if batch_size < 1 or batch_size >= parts:
        return []
    named = ((data, "data-parallel ranks"), (accum, "grad_accum_steps"), (micro_batches, "micro_batches"))
    product = " × ".join(f"{number} {name}" for number, name in named if number > 1)
    fewer = batch_size // (data * accum)
    alternative = f", or parallel.micro_batches to {fewer} or less" if micro_batches > 1 and fewer > 0 else ""
    return [
        PlanProblem(
            key="train.batch_size",
            message=f"is {batch_size}, but {product} need at least one sample each: {parts}.",
            fix=f"Set train.batch_size to {parts} or more{alternative}.",
        )
    ]


def read_plan(text: str | bytes) -> TrainingPlan:
    """The plan in a plan file. Raises PlanError for anything that is not one."""
    try:
        data = json.loads(text)
        plan = decode(TrainingPlan, data)
    except ValueError as error:
        raise PlanError(
            [PlanProblem(key="plan file", message=f"cannot be read: {error}.", fix="Write it as JSON; see the README.")]
        ) from error
    if plan.version != PLAN_VERSION:
        fix = f"Use a plan of version {PLAN_VERSION}, or another version of Gangline."
        raise PlanError([PlanProblem(key="version", message=f"is {plan.version}.", fix=fix)])
    # One that says its version was written by an agent, of a newer release perhaps, with settings that do not matter
    # here. In one that was written by hand what is not understood is a mistake, and would be trained without.
    if "version" not in data and (unknown := list(_unknown_keys(data, encode(plan)))):
        raise PlanError(unknown)
    check_training(TrainingSpec(run=plan.run, parallel=ParallelRequest(), train=plan.train, checkpoint=plan.checkpoint))
    return plan


def _unknown_keys(given: Any, known: Any, where: str = "") -> Iterator[PlanProblem]:
    """Keys in what was `given` that are not in what was made of it, which is `known`."""
    if isinstance(given, dict) and isinstance(known, dict):
        for key, value in given.items():
            name = f"{where}.{key}" if where else str(key)
            if key in known:
                yield from _unknown_keys(value, known[key], name)
            else:
                fix = f"Use one of: {', '.join(map(str, known))}."
                yield PlanProblem(key=name, message="means nothing in a plan file.", fix=fix)
    elif isinstance(given, list) and isinstance(known, list | tuple):
        for index, (one, other) in enumerate(zip(given, known, strict=True)):
            yield from _unknown_keys(one, other, f"{where}[{index}]")


def write_plan(plan: TrainingPlan) -> str:
    """The text of a plan file."""
    return json.dumps(encode(plan), indent=1, ensure_ascii=False) + "\n"


def _problems_of(spec: TrainingSpec) -> list[PlanProblem]:
    return [problem for rule in _RULES for problem in rule(spec)]


# --- Rules -----------------------------------------------------------------------------------------------------------


def _target_rule(spec: TrainingSpec) -> Iterator[PlanProblem]:
    recipe, entry = spec.run.recipe, spec.run.entry
    if (recipe is None) == (entry is None):
        yield PlanProblem(key="run", message="needs recipe or entry, one of them.", fix="Name one.")
    if entry is not None:
        module, colon, function = entry.partition(":")
        words = [*module.split("."), function]
        if not colon or not all(word.isidentifier() for word in words):
            yield PlanProblem(
                key="run.entry",
                message=f"is {entry!r}, which does not name a function.",
                fix="Write package.module:function.",
            )


def _recipe_rule(spec: TrainingSpec) -> Iterator[PlanProblem]:
    if spec.run.recipe is not None:
        yield from check_recipe(spec.run.recipe, spec.run.args)


def _length_rule(spec: TrainingSpec) -> Iterator[PlanProblem]:
    train = spec.train
    if (train.steps is None) == (train.epochs is None):
        both = "both steps and epochs" if train.steps is not None else "neither steps nor epochs"
        yield PlanProblem(key="train", message=f"says {both}.", fix="Give one of train.steps and train.epochs.")


def _number_rule(spec: TrainingSpec) -> Iterator[PlanProblem]:
    for part, name, value, least, is_open in (
        ("train", "steps", spec.train.steps, 1, False),
        ("train", "epochs", spec.train.epochs, 1, False),
        ("train", "batch_size", spec.train.batch_size, 1, False),
        ("train", "lr", spec.train.lr, 0, False),
        ("train", "weight_decay", spec.train.weight_decay, 0, False),
        ("train", "momentum", spec.train.momentum, 0, False),
        ("train", "warmup_steps", spec.train.warmup_steps, 0, False),
        ("train", "final_lr_ratio", spec.train.final_lr_ratio, 0, False),
        ("train", "clip_norm", spec.train.clip_norm, 0, True),
        ("train", "eval_every", spec.train.eval_every, 1, False),
        ("train", "seed", spec.train.seed, 0, False),
        ("train", "data_workers", spec.train.data_workers, 0, False),
        ("train", "report_every", spec.train.report_every, 1, False),
        ("train", "hang_after", spec.train.hang_after_seconds, 0, True),
        ("checkpoint", "every_steps", spec.checkpoint.every_steps, 1, False),
        ("checkpoint", "every", spec.checkpoint.every_seconds, 0, True),
        ("checkpoint", "keep", spec.checkpoint.keep, 1, False),
    ):
        if value is None:
            continue
        if not math.isfinite(value) or value < least or (is_open and value == least):
            bound = f"more than {least}" if is_open else f"at least {least}"
            yield PlanProblem(key=f"{part}.{name}", message=f"is {value}.", fix=f"Use a number of {bound}.")


def _keep_rule(spec: TrainingSpec) -> Iterator[PlanProblem]:
    if spec.checkpoint.keep > MAX_KEPT:
        yield PlanProblem(
            key="checkpoint.keep", message=f"is {spec.checkpoint.keep}.", fix=f"Use a number of at most {MAX_KEPT}."
        )


def _word_rule(spec: TrainingSpec) -> Iterator[PlanProblem]:
    for name, value, choices in (
        ("optimizer", spec.train.optimizer, OPTIMIZERS),
        ("schedule", spec.train.schedule, SCHEDULES),
    ):
        if value not in choices:
            fix = f"Use one of: {', '.join(choices)}."
            yield PlanProblem(key=f"train.{name}", message=f"cannot be {value!r}.", fix=fix)


def _warmup_rule(spec: TrainingSpec) -> Iterator[PlanProblem]:
    steps, warmup = spec.train.steps, spec.train.warmup_steps
    if steps is not None and warmup >= steps and steps > 0 and warmup > 0:
        yield PlanProblem(
            key="train.warmup_steps",
            message=f"is {warmup}, but there are only {steps} steps.",
            fix=f"Set it below {steps}.",
        )


_RULES: Final[tuple[Callable[[TrainingSpec], Iterator[PlanProblem]], ...]] = (
    _target_rule,
    _recipe_rule,
    _length_rule,
    _number_rule,
    _keep_rule,
    _word_rule,
    _warmup_rule,
)
