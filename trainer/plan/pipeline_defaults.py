"""What a pipeline is filled in with where the job file leaves it open: schedule, stages on a rank, micro-batches. Pure.

Not for: whether what was given goes together (`trainer.plan.parallel_rules`).
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from trainer.plan.axes import ParallelPlan, ParallelRequest
from trainer.plan.schedules import SCHEDULES, bubble_of, nearest_micro_batches

MICRO_BATCHES_PER_RANK: Final = 4
"""Of a pipeline, unless told otherwise or the batch is too small: less than a fifth of each step is then bubble."""


@dataclass(frozen=True, kw_only=True)
class Filled:
    """A plan, not yet judged, with what the user should know about how it was chosen."""

    plan: ParallelPlan
    notes: tuple[str, ...] = ()


def fill_pipeline(request: ParallelRequest, plan: ParallelPlan, batch_size: int | None) -> Filled:
    """`plan`, which has its axes, with a schedule and micro-batches: as asked, or as a batch of so many samples (None:
    any number) allows."""
    if plan.pp == 1:
        return _without_pipeline(request, plan)
    plan = replace(plan, cut_points=request.cut_points)
    if plan.strategy == "model":
        return _with_bubble(
            replace(
                plan,
                schedule=request.schedule or "GPipe",
                stages_per_rank=request.stages_per_rank or 1,
                micro_batches=request.micro_batches or 1,
            )
        )
    stages = request.stages_per_rank or (SCHEDULES[request.schedule].least_stages if request.schedule else 1)
    schedule = request.schedule or ("1F1B" if stages == 1 else "Interleaved1F1B")
    plan = replace(plan, schedule=schedule, stages_per_rank=stages)
    micro_batches = request.micro_batches or _default_micro_batches(plan, batch_size)
    notes = []
    if request.schedule is None and schedule == "1F1B" and (micro_batches or 0) < plan.pp:
        plan = replace(plan, schedule="GPipe")
        micro_batches = micro_batches or _default_micro_batches(plan, batch_size)
        notes.append(f"parallel.schedule is GPipe: 1F1B takes {SCHEDULES['1F1B'].rule} ({plan.pp}), this takes fewer.")
    # Where the batch allows none, the least that the schedule takes shows by how much it is too small.
    plan = replace(plan, micro_batches=micro_batches or nearest_micro_batches(plan.schedule, 1, plan.pp)[0])
    if request.micro_batches is None:
        notes = [*_lowered_note(plan, batch_size), *notes]
    return _with_bubble(plan, *notes)


def _without_pipeline(request: ParallelRequest, plan: ParallelPlan) -> Filled:
    """Of a pipeline on one rank its parts are kept: as large a part of the batch is in memory at a time."""
    if request.micro_batches is None or request.micro_batches == 1 or plan.world_size > 1:
        return Filled(plan=plan)
    parts = plan.grad_accum_steps * request.micro_batches
    note = f"parallel.micro_batches {request.micro_batches} run one after another on the one rank, in {parts} parts."
    return Filled(plan=replace(plan, grad_accum_steps=parts), notes=(note,))


def _default_micro_batches(plan: ParallelPlan, batch_size: int | None) -> int | None:
    """The usual number, lowered to what the batch has samples for, best without a smaller part; None: too few."""
    usual = MICRO_BATCHES_PER_RANK * plan.pp
    if batch_size is None:
        return usual
    parts = plan.data_parallel_size * plan.grad_accum_steps
    most = min(usual, batch_size // parts)
    taken = [number for number in range(most, 0, -1) if SCHEDULES[plan.schedule].takes(number, plan.pp)]
    even = [number for number in taken if number >= plan.pp and batch_size % (parts * number) == 0]
    return next(iter(even or taken), None)


def _lowered_note(plan: ParallelPlan, batch_size: int | None) -> list[str]:
    usual = MICRO_BATCHES_PER_RANK * plan.pp
    if plan.micro_batches >= usual:
        return []
    others = f"dp {plan.data_parallel_size} × grad_accum_steps {plan.grad_accum_steps}"
    return [
        f"parallel.micro_batches is {plan.micro_batches}, not {MICRO_BATCHES_PER_RANK} × pp = {usual}, which "
        f"train.batch_size {batch_size} does not split into evenly ({others} × micro_batches parts)."
    ]


def _with_bubble(plan: ParallelPlan, *notes: str) -> Filled:
    """With a note when ranks wait for much of a step."""
    if plan.micro_batches >= plan.pp:
        return Filled(plan=plan, notes=notes)
    idle = f"ranks wait {bubble_of(plan):.0%} of each step (bubble)"
    if plan.strategy == "model":
        note = f"model: one of {plan.pp} ranks works at a time, so {idle}; parallel.strategy: pipeline overlaps them."
    else:
        note = (
            f"micro_batches {plan.micro_batches} over pp {plan.pp}: {idle}; more of them, which may need a larger "
            "train.batch_size, make it less."
        )
    return Filled(plan=plan, notes=(*notes, note))
