"""How a model is spread over ranks: the one `ParallelPlan`, and the presets that users name. Pure.

`resolve_parallel` turns what a job file says into the plan for a layout of ranks, or says all that is wrong. What no
test has shown to train right is refused by name, never tried. Not for: applying a plan (`trainer.parallel`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from trainer.plan.axes import (
    ACTIVATION_CHECKPOINTING,
    ALIASES,
    AXES,
    PRECISIONS,
    STRATEGIES,
    ParallelPlan,
    ParallelRequest,
    RankLayout,
    ResolvedParallel,
)
from trainer.plan.parallel_rules import name_of, plan_problems, request_problems, value_problems
from trainer.plan.pipeline_defaults import fill_pipeline
from trainer.plan.presets import axes_for
from trainer.plan.problem import PlanError, PlanProblem

__all__ = [
    "ACTIVATION_CHECKPOINTING",
    "ALIASES",
    "AXES",
    "PRECISIONS",
    "STRATEGIES",
    "ParallelPlan",
    "ParallelRequest",
    "RankLayout",
    "ResolvedParallel",
    "check_parallel_plan",
    "check_parallel_request",
    "resolve_parallel",
]


def resolve_parallel(
    request: ParallelRequest, layout: RankLayout, *, batch_size: int | None = None
) -> ResolvedParallel:
    """The plan for the ranks of `layout`. Raises PlanError with every problem.

    `batch_size`: samples of a step, to which a number of micro-batches that is not given is lowered; None: any.
    """
    problems = value_problems(request)
    if any(problem.key == "parallel.strategy" for problem in problems):
        raise PlanError(problems)  # what the other keys mean depends on it
    # A value that is refused is taken as not given, so that the others are judged all the same.
    request, notes = _without_alias(_without(request, problems))
    problems = _merged(problems, request_problems(request))
    try:
        plan = _with_axes(request, layout)
    except PlanError as error:
        raise PlanError(_merged(problems, error.problems)) from error
    filled = fill_pipeline(request, plan, batch_size)
    problems = _merged(problems, plan_problems(filled.plan, layout.world_size))
    if problems:
        raise PlanError(problems)
    if layout.world_size == 1 and filled.plan.strategy not in ("single", "auto"):
        notes += (
            f"parallel.strategy {filled.plan.strategy} on one rank runs as single: there is no other to share with.",
        )
    return ResolvedParallel(plan=filled.plan, notes=(*notes, *filled.notes))


def check_parallel_request(request: ParallelRequest) -> None:
    """Raise PlanError with all that is wrong whatever the number of ranks."""
    problems = value_problems(request)
    if not any(problem.key == "parallel.strategy" for problem in problems):
        problems = _merged(problems, request_problems(_without_alias(_without(request, problems))[0]))
    if problems:
        raise PlanError(problems)


def check_parallel_plan(plan: ParallelPlan, world_size: int) -> None:
    """Raise PlanError unless this code can run `plan` on `world_size` ranks. For plan files written by hand."""
    problems = plan_problems(plan, world_size)
    if problems:
        raise PlanError(problems)


def _with_axes(request: ParallelRequest, layout: RankLayout) -> ParallelPlan:
    """The plan as far as it does not depend on a pipeline. Raises PlanError."""
    plan = ParallelPlan(
        strategy=request.strategy or "single",
        grad_accum_steps=request.grad_accum_steps,
        precision=request.precision,
        activation_checkpointing=request.activation_checkpointing,
        compile=request.compile,
        find_unused_parameters=request.find_unused_parameters,
        sync_batch_norm=request.sync_batch_norm,
    )
    if request.strategy == "auto" or (request.strategy == "single" and layout.world_size > 1):
        return plan
    sizes = axes_for(request, layout)
    plan = replace(plan, pp=sizes["pp"], dp_replicate=sizes["dp_replicate"], dp_shard=sizes["dp_shard"], tp=sizes["tp"])
    return plan if request.strategy is not None else replace(plan, strategy=name_of(plan))


def _without_alias(request: ParallelRequest) -> tuple[ParallelRequest, tuple[str, ...]]:
    if request.strategy not in ALIASES:
        return request, ()
    meant = ALIASES[request.strategy]
    note = (
        f"parallel.strategy {request.strategy} is taken as {meant}: one process per GPU, which PyTorch recommends over "
        "torch.nn.DataParallel even on one machine."
    )
    return replace(request, strategy=meant), (note,)


def _without(request: ParallelRequest, problems: Iterable[PlanProblem]) -> ParallelRequest:
    """The request with the defaults for the keys that are refused."""
    defaults = ParallelRequest()
    names = {problem.key.removeprefix("parallel.") for problem in problems}
    return replace(request, **{name: getattr(defaults, name) for name in names})


def _merged(problems: list[PlanProblem], others: Iterable[PlanProblem]) -> list[PlanProblem]:
    """`problems` with those of `others` that are about another key."""
    known = {problem.key for problem in problems}
    return [*problems, *(problem for problem in others if problem.key not in known)]
