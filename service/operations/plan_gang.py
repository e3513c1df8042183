"""Which layouts of a gang its training can be split over: each is planned before the job is stored. Pure.

Not for: which of them fit the pool (`service.domain.spec`), nor which fits now (`service.scheduler`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Final

from service.domain.gang_layout import GangLayout
from service.domain.spec import JobSpec, ResolvedGang, gang_of
from trainer.plan.parallel_plan import ParallelPlan, RankLayout
from trainer.plan.planning import Planned, plan_on
from trainer.plan.problem import PlanError
from trainer.plan.training_plan import TrainingSpec

MAX_SIZES_NAMED: Final = 16


def plan_gang(spec: JobSpec, gang: ResolvedGang, gpu_memory_bytes: int | None) -> tuple[ResolvedGang, Planned | None]:
    """The gang without the layouts that have no plan, and the plan of the first that is left.

    `gpu_memory_bytes`: of the smallest GPU it may get; None: not known. No plan where nothing is trained. Raises
    PlanError when no layout is left, with what is wrong with the largest.
    """
    if spec.training is None:
        return gang, None
    if not gang.layouts:
        ranks = RankLayout(num_nodes=gang.num_nodes, ranks_per_node=gang.processes_per_node)
        return gang, plan_on(spec.training, ranks, gpu_memory_bytes=gpu_memory_bytes)
    found = _plan_each(spec.training, gang.layouts, gpu_memory_bytes)
    good = [(_with_need(layout, one.plan.parallel), one) for layout, one in found if isinstance(one, Planned)]
    left = gang_of(spec, [layout for layout, _ in good])
    if left is None:
        raise next(error for _, error in found if isinstance(error, PlanError))
    sizes = {layout.num_gpus for layout in left.layouts}
    lost = {
        layout.num_gpus: error
        for layout, error in found
        if layout.num_gpus not in sizes and isinstance(error, PlanError)
    }
    first = good[0][1]
    return left, replace(first, plan=replace(first.plan, notes=(*first.plan.notes, *_left_out(lost))))


def _plan_each(
    training: TrainingSpec, layouts: Sequence[GangLayout], gpu_memory_bytes: int | None
) -> list[tuple[GangLayout, Planned | PlanError]]:
    """Each layout with its plan, or with all that keeps it from having one."""
    plans: dict[RankLayout, Planned | PlanError] = {}
    found = []
    for layout in layouts:
        ranks = RankLayout(num_nodes=layout.num_nodes, ranks_per_node=layout.processes_per_node)
        if ranks not in plans:
            try:
                plans[ranks] = plan_on(training, ranks, gpu_memory_bytes=gpu_memory_bytes)
            except PlanError as error:
                plans[ranks] = error
        found.append((layout, plans[ranks]))
    return found


def _with_need(layout: GangLayout, plan: ParallelPlan) -> GangLayout:
    """Pipeline stages are spread over nodes, and what fewer ranks of a node than parts of a layer hold is not whole."""
    is_split = plan.pp > 1 or layout.processes_per_node < plan.dp_shard * plan.tp
    return replace(layout, needs_shared_folder=layout.num_nodes > 1 and is_split)


def _left_out(lost: dict[int, PlanError]) -> tuple[str, ...]:
    """What to tell of the sizes that have no plan; nothing when there is none."""
    if not lost:
        return ()
    *others, last = map(str, lost)
    sizes = f"{', '.join(others)} and {last}" if others else last
    if len(lost) > MAX_SIZES_NAMED:
        sizes = f"{len(lost)} of the numbers of"
    (first, *_) = lost[next(iter(lost))].problems
    return (f"It never runs on {sizes} GPUs: {first.key} {first.message}",)
