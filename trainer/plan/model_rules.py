"""What of a plan does not go with the model: too few layers, sizes that do not divide, BatchNorm in a pipeline. Pure.

Every rank asks before anything is built, so that all of them say the same. Not for: finding the facts (`trainer`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from trainer.plan.axes import ParallelPlan
from trainer.plan.parallel_rules import cut_order_problems
from trainer.plan.problem import PlanProblem
from trainer.plan.schedules import SCHEDULES


@dataclass(frozen=True, kw_only=True)
class ModelFacts:
    """What plans depend on in a model."""

    num_layers: int | None
    """Length of the list of layers that are the model, called in turn; None: it has no such list."""
    tensor_parallel_sizes: tuple[int, ...] = ()
    """Numbers that `tp` must divide: heads, widths of what is split."""
    has_tensor_parallel_plan: bool = False
    """Whether the task says which layers are split, and how."""
    has_batch_norm: bool = False
    layer_names: tuple[str, ...] = ()
    """Of the list, in order; (): not known."""
    scalar_parameters: tuple[str, ...] = ()
    """Names of those without any dimension."""


def model_problems(plan: ParallelPlan, facts: ModelFacts) -> list[PlanProblem]:
    """All that keeps `plan` from running this model."""
    return [problem for rule in _RULES for problem in rule(plan, facts)]


def _list_rule(plan: ParallelPlan, facts: ModelFacts) -> Iterator[PlanProblem]:
    if plan.pp > 1 and facts.num_layers is None:
        yield PlanProblem(
            key="parallel.pp",
            message=f"is {plan.pp}, but the model does not list its layers, so nobody knows where to cut it.",
            fix="Make it an nn.Sequential, give the task `layers`, or use parallel.strategy: fsdp.",
        )


def _checkpointing_rule(plan: ParallelPlan, facts: ModelFacts) -> Iterator[PlanProblem]:
    if plan.activation_checkpointing != "none" and facts.num_layers is None and plan.pp == 1:
        yield PlanProblem(
            key="parallel.activation_checkpointing",
            message=f"is {plan.activation_checkpointing}, layer by layer, but the model does not list its layers.",
            fix="Make it an nn.Sequential, give the task `layers`, or use none.",
        )


def _layers_rule(plan: ParallelPlan, facts: ModelFacts) -> Iterator[PlanProblem]:
    layers, stages = facts.num_layers, plan.num_stages
    if plan.pp == 1 or layers is None or layers >= stages:
        return
    fewer = layers // plan.pp
    if fewer >= SCHEDULES[plan.schedule].least_stages:
        fix = f"Set parallel.stages_per_rank to {fewer}."
    elif fewer >= 1:
        fix = "Leave out parallel.stages_per_rank and use parallel.schedule: 1F1B."
    else:
        fix = f"Set parallel.pp to {layers} or less, or use parallel.strategy: fsdp."
    yield PlanProblem(
        key="parallel.pp",
        message=(
            f"is {plan.pp}: pp {plan.pp} × stages_per_rank {plan.stages_per_rank} = {stages} stages of one layer or "
            f"more, but the model has {layers} layer{'s' if layers > 1 else ''}{_named(facts)}."
        ),
        fix=fix,
    )


def _cut_rule(plan: ParallelPlan, facts: ModelFacts) -> Iterator[PlanProblem]:
    cuts, layers = plan.cut_points, facts.num_layers
    if plan.pp == 1 or cuts is None or layers is None:
        return
    yield from cut_order_problems(cuts)
    if len(cuts) != plan.num_stages - 1:
        yield PlanProblem(
            key="parallel.cut_points",
            message=f"is {list(cuts)}: {len(cuts)} cuts, but {plan.num_stages} stages need {plan.num_stages - 1}.",
            fix=f"Write {plan.num_stages - 1} numbers, or leave it out: layers are then split by their cost.",
        )
    beyond = [cut for cut in cuts if cut >= layers]
    if beyond:
        yield PlanProblem(
            key="parallel.cut_points",
            message=f"cuts at {', '.join(map(str, beyond))}, but the last layer is {layers - 1}{_named(facts)}.",
            fix=f"Use numbers from 1 to {layers - 1}.",
        )


def _tensor_rule(plan: ParallelPlan, facts: ModelFacts) -> Iterator[PlanProblem]:
    if plan.tp == 1:
        return
    if not facts.has_tensor_parallel_plan:
        yield PlanProblem(
            key="parallel.tp",
            message=f"is {plan.tp}, but the task does not say which layers to split.",
            fix="Give the task `tensor_parallel_plan`, or use parallel.strategy: fsdp.",
        )
    wrong = sorted({size for size in facts.tensor_parallel_sizes if size % plan.tp})
    if wrong:
        common = math.gcd(*facts.tensor_parallel_sizes)
        fitting = [tp for tp in range(2, common + 1) if common % tp == 0]
        nearest = min(fitting, key=lambda tp: (abs(tp - plan.tp), tp), default=None)
        sums = ", ".join(f"{size} = {size // plan.tp} × {plan.tp} + {size % plan.tp}" for size in wrong)
        yield PlanProblem(
            key="parallel.tp",
            message=f"is {plan.tp}, which does not divide all that is split: {sums}.",
            fix="Use parallel.strategy: fsdp." if nearest is None else f"Set it to {nearest}.",
        )


def _scalar_rule(plan: ParallelPlan, facts: ModelFacts) -> Iterator[PlanProblem]:
    if plan.dp_shard > 1 and facts.scalar_parameters:
        names = facts.scalar_parameters
        more = f" and {len(names) - _NAMES_TOLD} more" if len(names) > _NAMES_TOLD else ""
        yield PlanProblem(
            key="parallel.dp_shard",
            message=(
                f"is {plan.dp_shard}, but a parameter without dimension cannot be cut into shards: "
                f"{', '.join(names[:_NAMES_TOLD])}{more}."
            ),
            fix="Give it one, as torch.ones(1) has, or use parallel.strategy: ddp.",
        )


def _batch_norm_rule(plan: ParallelPlan, facts: ModelFacts) -> Iterator[PlanProblem]:
    parts = plan.micro_batches * plan.grad_accum_steps
    if plan.pp > 1 and parts > 1 and facts.has_batch_norm:
        yield PlanProblem(
            key="parallel.micro_batches" if plan.micro_batches > 1 else "parallel.grad_accum_steps",
            message=(
                f"cuts a batch into micro_batches {plan.micro_batches} × grad_accum_steps {plan.grad_accum_steps} = "
                f"{parts} parts, and BatchNorm in a pipeline would take its statistics of each part by itself."
            ),
            fix="Use GroupNorm or LayerNorm, parallel.strategy: model with one part, or ddp.",
        )


_RULES: Final[tuple[Callable[[ParallelPlan, ModelFacts], Iterator[PlanProblem]], ...]] = (
    _list_rule,
    _checkpointing_rule,
    _layers_rule,
    _cut_rule,
    _tensor_rule,
    _scalar_rule,
    _batch_norm_rule,
)
_NAMES_TOLD: Final = 4


def _named(facts: ModelFacts) -> str:
    names = facts.layer_names
    if not names:
        return ""
    if len(names) > _NAMES_TOLD:
        names = (*names[: _NAMES_TOLD - 2], "…", names[-1])
    return f" ({', '.join(names)})"
