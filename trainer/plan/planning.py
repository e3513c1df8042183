"""A job's training on the ranks of a layout, with what is known of its model: the plan, why, and what it needs. Pure.

The API asks at submission and for a dry run, and again when an attempt has its GPUs. Where the model's profile is not
known (an entry whose owner sent none), `auto` stays open: the ranks choose when they start.
Not for: the rules of the choice (`trainer.plan.auto_plan`).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from trainer.plan.auto_plan import AutoChoice, choose_plan, facts_of
from trainer.plan.choice_text import choice_lines
from trainer.plan.estimate import OptimizerKind
from trainer.plan.model_profile import ModelProfile, read_profile
from trainer.plan.model_rules import model_problems
from trainer.plan.parallel_plan import RankLayout
from trainer.plan.plan_text import describe_plan
from trainer.plan.problem import PlanError
from trainer.plan.recipe_profiles import recipe_profile
from trainer.plan.training_plan import TrainingPlan, TrainingSpec, plan_training

OPEN_NOTE = (
    "Strategy auto is decided by the ranks when they start: nothing is known of the model here. `gang check --profile` "
    "and `gang submit --profile` count it where PyTorch and your code can be imported."
)

UNKNOWN_NOTE = (
    "Nothing is known of the model here: whether it can be split so, the ranks find out when they start, and "
    "`gang check --profile` before."
)


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan, and what is to be said of it."""

    plan: TrainingPlan
    lines: tuple[str, ...]
    """Layout, bytes, traffic, reasons and alternatives, for people."""
    choice: AutoChoice | None = None
    """None: nothing is known of the model."""


def plan_on(
    spec: TrainingSpec, layout: RankLayout, *, gpu_memory_bytes: int | None, profile: ModelProfile | None = None
) -> Planned:
    """The plan of `spec` for the ranks of `layout` on GPUs of `gpu_memory_bytes` each (None: not known, or CPU slots).

    `profile`: of the model, where it was counted here; None: what the job brought along, or the recipe's own.
    Raises PlanError for what cannot run or, of an `auto`, cannot fit however it is split; what else may not fit is a
    note of the plan.
    """
    plan = plan_training(spec, layout)
    profile = profile or profile_of(spec)
    if profile is None:
        is_open = plan.parallel.strategy == "auto"
        is_split = plan.parallel.pp * plan.parallel.tp > 1
        notes = (OPEN_NOTE,) if is_open else (UNKNOWN_NOTE,) if is_split else ()
        plan = replace(plan, notes=(*plan.notes, *notes))
        return Planned(plan=plan, lines=() if is_open else tuple(describe_plan(plan.parallel, layout)))
    is_auto = plan.parallel.strategy == "auto"
    request = spec.parallel if is_auto else replace(spec.parallel, strategy=plan.parallel.strategy)
    choice = choose_plan(
        profile,
        request,
        layout,
        gpu_memory_bytes=gpu_memory_bytes,
        batch_size=spec.train.batch_size,
        optimizer=OptimizerKind(name=spec.train.optimizer, momentum=spec.train.momentum),
    )
    if problems := model_problems(choice.plan, facts_of(profile)):
        raise PlanError(problems)
    why = (f"Strategy auto: {choice.why}",) if is_auto else ()
    notes = tuple(dict.fromkeys((*plan.notes, *why, *choice.warnings)))
    lines = choice_lines(profile, choice, layout, batch_size=spec.train.batch_size, gpu_memory_bytes=gpu_memory_bytes)
    return Planned(plan=replace(plan, parallel=choice.plan, notes=notes), lines=tuple(lines), choice=choice)


def profile_of(spec: TrainingSpec) -> ModelProfile | None:
    """What is known of the model: what the job brought along, else the recipe's own. Raises PlanError."""
    if spec.profile is not None:
        return read_profile(json.dumps(spec.profile))
    if spec.run.recipe is not None:
        return recipe_profile(spec.run.recipe, spec.run.args)
    return None
