"""What is wrong with how a model is to be split: rules of what is asked, and of the plan for its ranks. Pure.

A rule says a problem once, with the sum that shows it and the nearest thing that works. Not for: what depends on the
model (`trainer.plan.model_rules`) or on the batch (`trainer.plan.training_plan`).
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Final

from trainer.plan.axes import (
    ACTIVATION_CHECKPOINTING,
    ALIASES,
    AXES,
    PRECISIONS,
    STRATEGIES,
    STRATEGY_AXES,
    ParallelPlan,
    ParallelRequest,
)
from trainer.plan.problem import PlanProblem
from trainer.plan.schedules import (
    PROVEN,
    SCHEDULE_NAMES,
    SCHEDULES,
    combination_of,
    nearest_micro_batches,
    nearest_proven_plan,
)

Asked = ParallelRequest | ParallelPlan
PIPELINE_STRATEGIES: Final = ("pipeline", "model")
PIPELINE_KEYS: Final = ("schedule", "stages_per_rank", "micro_batches", "cut_points")
"""Keys that mean something in a pipeline only."""


def value_problems(asked: Asked) -> list[PlanProblem]:
    """Words that nobody knows and numbers below one."""
    return [*_word_rule(asked), *_number_rule(asked)]


def request_problems(request: ParallelRequest) -> list[PlanProblem]:
    """What contradicts itself in what was asked, whatever the ranks, where every value is right in itself."""
    return [problem for rule in _REQUEST_RULES for problem in rule(request)]


def plan_problems(plan: ParallelPlan, world_size: int) -> list[PlanProblem]:
    """All that keeps a plan from running on `world_size` ranks."""
    problems = [*value_problems(plan), *_world_rule(plan, world_size)]
    if problems:
        return problems
    return [problem for rule in _PLAN_RULES for problem in rule(plan)]


# --- Each value by itself --------------------------------------------------------------------------------------------


def _word_rule(asked: Asked) -> Iterator[PlanProblem]:
    for name, choices in (
        ("strategy", (*STRATEGIES, *ALIASES) if isinstance(asked, ParallelRequest) else STRATEGIES),
        ("schedule", SCHEDULE_NAMES),
        ("precision", PRECISIONS),
        ("activation_checkpointing", ACTIVATION_CHECKPOINTING),
    ):
        value = getattr(asked, name)
        if value is not None and value not in choices:
            fix = f"Use one of: {', '.join(choices)}."
            yield PlanProblem(key=f"parallel.{name}", message=f"cannot be {value!r}.", fix=fix)


def _number_rule(asked: Asked) -> Iterator[PlanProblem]:
    for name in (*AXES, "stages_per_rank", "micro_batches", "grad_accum_steps"):
        value = getattr(asked, name)
        if value is not None and value < 1:
            yield PlanProblem(key=f"parallel.{name}", message=f"is {value}.", fix="Use a whole number from 1.")
    yield from cut_order_problems(asked.cut_points)


def cut_order_problems(cut_points: Sequence[int] | None) -> Iterator[PlanProblem]:
    """Cut points that do not come one after another, from 1."""
    cuts = (0, *(cut_points or ()))
    if any(first >= second for first, second in itertools.pairwise(cuts)):
        yield PlanProblem(
            key="parallel.cut_points",
            message=f"is {list(cuts[1:])}, but each is the number of a stage's first layer, above the one before.",
            fix=f"Write rising numbers from 1, such as {sorted({max(1, cut) for cut in cuts[1:]})}.",
        )


# --- What was asked --------------------------------------------------------------------------------------------------


def _auto_rule(request: ParallelRequest) -> Iterator[PlanProblem]:
    if request.strategy != "auto":
        return
    for name in (*AXES, *PIPELINE_KEYS):
        value = getattr(request, name)
        if value is not None:
            yield PlanProblem(
                key=f"parallel.{name}",
                message=f"is {_told(value)}, but auto chooses it.",
                fix="Remove it, or name the strategy that you mean.",
            )


def _pipeline_key_rule(request: ParallelRequest) -> Iterator[PlanProblem]:
    """Keys of a pipeline without one. 1 is what it is anyway."""
    can_have_one = request.strategy in PIPELINE_STRATEGIES and request.pp != 1
    if can_have_one or (request.pp or 1) > 1 or request.strategy == "auto":
        return
    for name in PIPELINE_KEYS:
        value = getattr(request, name)
        if value not in (None, 1):
            why = f"{request.strategy} has none" if request.strategy else "neither strategy nor pp asks for one"
            yield PlanProblem(
                key=f"parallel.{name}",
                message=f"is {_told(value)}, which means something in a pipeline only, and {why}.",
                fix="Remove it, or set parallel.strategy: pipeline.",
            )


def _own_axis_rule(request: ParallelRequest) -> Iterator[PlanProblem]:
    """`pipeline` with pp 1 would quietly be something else."""
    for axis in STRATEGY_AXES.get(request.strategy or "", ()):
        if getattr(request, axis) == 1 and request.strategy != "ddp":
            yield PlanProblem(
                key="parallel.strategy",
                message=f"{request.strategy} is {axis} of 2 or more, but parallel.{axis} is 1.",
                fix=f"Leave {axis} out, or name another strategy.",
            )


def _strategy_unused_rule(request: ParallelRequest) -> Iterator[PlanProblem]:
    elsewhere = next((axis for axis in ("pp", "dp_shard", "tp") if (getattr(request, axis) or 1) > 1), None)
    if request.strategy in ("fsdp", "hsdp", "model", "pipeline", "tensor"):
        yield from _unused_problems(request, request.strategy)
    elif elsewhere is not None:
        yield from _unused_problems(request, f"{elsewhere} {getattr(request, elsewhere)}")


def _unused_problems(asked: Asked, why: str) -> Iterator[PlanProblem]:
    if asked.find_unused_parameters:
        yield PlanProblem(
            key="parallel.find_unused_parameters",
            message=f"is a setting of DDP, and {why} runs without DDP.",
            fix="Remove it, or use parallel.strategy: ddp.",
        )


def _is_without_pipeline(asked: Asked) -> bool:
    """A plan always has a schedule; without a pipeline it means nothing."""
    return isinstance(asked, ParallelPlan) and asked.pp == 1


# --- Both ------------------------------------------------------------------------------------------------------------


def _model_rule(asked: Asked) -> Iterator[PlanProblem]:
    if asked.strategy != "model":
        return
    for name, only in (("schedule", "GPipe"), ("stages_per_rank", 1), ("micro_batches", 1)):
        value = getattr(asked, name)
        if value not in (None, only) and (isinstance(asked, ParallelRequest) or asked.pp > 1):
            yield PlanProblem(
                key=f"parallel.{name}",
                message=f"is {_told(value)}, but model passes the whole batch through the layers once, in turn.",
                fix="Remove it, or use parallel.strategy: pipeline.",
            )


def _stages_rule(asked: Asked) -> Iterator[PlanProblem]:
    if asked.schedule is None or asked.stages_per_rank is None or asked.strategy in ("model", "auto"):
        return
    if _is_without_pipeline(asked):
        return
    schedule, stages = SCHEDULES[asked.schedule], asked.stages_per_rank
    if schedule.least_stages <= stages <= schedule.most_stages:
        return
    least, most = schedule.least_stages, schedule.most_stages
    other = "Interleaved1F1B" if stages > 1 else "1F1B"
    yield PlanProblem(
        key="parallel.stages_per_rank",
        message=f"is {stages}, but {schedule.name} has {least if least == most else f'{least} or more'} on each rank.",
        fix=f"Set it to {least}, or use parallel.schedule: {other}.",
    )


def _split_backward_rule(asked: Asked) -> Iterator[PlanProblem]:
    if asked.schedule is None or not SCHEDULES[asked.schedule].splits_backward or _is_without_pipeline(asked):
        return
    if asked.activation_checkpointing != "none":
        yield PlanProblem(
            key="parallel.activation_checkpointing",
            message=(
                f"is {asked.activation_checkpointing}, but {asked.schedule} computes the gradients of inputs and of "
                "weights apart, and would compute each forward twice more."
            ),
            fix="Use parallel.schedule: Interleaved1F1B, or activation_checkpointing: none.",
        )
    if asked.compile:
        yield PlanProblem(
            key="parallel.compile",
            message=f"is true, but {asked.schedule} computes the gradients of inputs and of weights apart, which "
            "torch.compile cannot.",
            fix="Use parallel.schedule: Interleaved1F1B, or compile: false.",
        )


_REQUEST_RULES: Final[tuple[Callable[[ParallelRequest], Iterator[PlanProblem]], ...]] = (
    _auto_rule,
    _pipeline_key_rule,
    _own_axis_rule,
    _strategy_unused_rule,
    _model_rule,
    _stages_rule,
    _split_backward_rule,
)


# --- The plan --------------------------------------------------------------------------------------------------------


def _world_rule(plan: ParallelPlan, world_size: int) -> Iterator[PlanProblem]:
    if plan.strategy == "auto":
        used = [f"{axis} {getattr(plan, axis)}" for axis in AXES if getattr(plan, axis) != 1]
        if used:
            yield PlanProblem(
                key="parallel.strategy", message=f"is auto, but says {', '.join(used)}.", fix="Leave all axes at 1."
            )
    elif plan.strategy == "single" and world_size != 1:
        yield PlanProblem(
            key="parallel.strategy",
            message=f"single runs on one rank, but the job's resources make {world_size}.",
            fix="Ask for one GPU, or use parallel.strategy: ddp.",
        )
    elif plan.world_size != world_size:
        yield PlanProblem(
            key="parallel",
            message=f"makes {product_of(plan)} = {plan.world_size} ranks, but {world_size} were started.",
            fix=f"Make the product {world_size}, or start {plan.world_size} ranks.",
        )


def _strategy_rule(plan: ParallelPlan) -> Iterator[PlanProblem]:
    missing = [axis for axis in STRATEGY_AXES.get(plan.strategy, ()) if getattr(plan, axis) == 1]
    if missing and plan.world_size > 1:
        yield PlanProblem(
            key="parallel.strategy",
            message=f"{plan.strategy} is {' and '.join(missing)} of 2 or more, but this makes {product_of(plan)}.",
            fix=f"Use parallel.strategy: {name_of(plan)}, or a number of ranks that it splits.",
        )


def _no_pipeline_rule(plan: ParallelPlan) -> Iterator[PlanProblem]:
    if plan.pp > 1:
        return
    for name in ("stages_per_rank", "micro_batches", "cut_points"):
        value = getattr(plan, name)
        if value not in (None, 1):
            yield PlanProblem(
                key=f"parallel.{name}",
                message=f"is {_told(value)}, but with pp 1 there is no pipeline.",
                fix="Leave it out, or set parallel.pp to 2 or more.",
            )


def _micro_batch_rule(plan: ParallelPlan) -> Iterator[PlanProblem]:
    schedule = SCHEDULES[plan.schedule]
    if plan.pp == 1 or plan.strategy == "model" or schedule.takes(plan.micro_batches, plan.pp):
        return
    nearest = " or ".join(map(str, nearest_micro_batches(plan.schedule, plan.micro_batches, plan.pp)))
    other = "GPipe" if plan.stages_per_rank == 1 else "Interleaved1F1B"
    alternative = f", or use parallel.schedule: {other}" if SCHEDULES[other].takes(plan.micro_batches, plan.pp) else ""
    yield PlanProblem(
        key="parallel.micro_batches",
        message=f"is {plan.micro_batches} over pp {plan.pp}, but {schedule.name} takes {schedule.rule}.",
        fix=f"Set it to {nearest}{alternative}.",
    )


def _cut_count_rule(plan: ParallelPlan) -> Iterator[PlanProblem]:
    if plan.pp > 1 and plan.cut_points is not None and len(plan.cut_points) != plan.num_stages - 1:
        yield PlanProblem(
            key="parallel.cut_points",
            message=(
                f"has {len(plan.cut_points)} of {list(plan.cut_points)}, but pp {plan.pp} × stages_per_rank "
                f"{plan.stages_per_rank} = {plan.num_stages} stages are cut at {plan.num_stages - 1}."
            ),
            fix=f"Write {plan.num_stages - 1}, or leave it out: layers are then split by their cost.",
        )


def _proven_rule(plan: ParallelPlan) -> Iterator[PlanProblem]:
    used = combination_of(plan)
    if used in PROVEN:
        return
    nearest = nearest_proven_plan(plan)
    changes = [
        f"parallel.{name}: {getattr(nearest, name)}"
        for name in ("schedule", *AXES)
        if getattr(nearest, name) != getattr(plan, name)
    ]
    data = {"none": "", "replicate": "copies", "shard": "shards", "hybrid": "copies of shards"}[used.data]
    ways = [
        used.schedule,
        f"{data} ({_data_product(plan)})" if data else None,
        f"tp {plan.tp}" if used.tensor else None,
    ]
    yield PlanProblem(
        key="parallel",
        message=f"combines {' and '.join(way for way in ways if way)}, which no test has shown to train right.",
        fix=f"The nearest that works: {', '.join(changes)}.",
    )


def _plan_unused_rule(plan: ParallelPlan) -> Iterator[PlanProblem]:
    for axis in ("pp", "dp_shard", "tp"):
        if getattr(plan, axis) > 1:
            yield from _unused_problems(plan, f"{axis} {getattr(plan, axis)}")
            return


_PLAN_RULES: Final[tuple[Callable[[ParallelPlan], Iterator[PlanProblem]], ...]] = (
    _strategy_rule,
    _no_pipeline_rule,
    _model_rule,
    _stages_rule,
    _micro_batch_rule,
    _cut_count_rule,
    _split_backward_rule,
    _proven_rule,
    _plan_unused_rule,
)


def name_of(plan: ParallelPlan) -> str:
    """The strategy that a plan's axes amount to: the outermost one in use."""
    if plan.pp > 1:
        return "pipeline"
    if plan.tp > 1:
        return "tensor"
    if plan.dp_shard > 1:
        return "hsdp" if plan.dp_replicate > 1 else "fsdp"
    return "ddp" if plan.dp_replicate > 1 else "single"


def product_of(plan: ParallelPlan) -> str:
    """The axes as a product in words."""
    return " × ".join(f"{axis} {getattr(plan, axis)}" for axis in AXES)


def _data_product(plan: ParallelPlan) -> str:
    return " × ".join(f"{axis} {getattr(plan, axis)}" for axis in AXES[1:3] if getattr(plan, axis) > 1)


def _told(value: object) -> str:
    return str(list(value) if isinstance(value, tuple) else value)
