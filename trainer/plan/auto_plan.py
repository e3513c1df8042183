"""Chooses how a model is split, by the rules of the field, and says why in numbers. Pure.

The first way that fits is taken: whole copies, then shards, first as they are and then with smaller micro-batches and
activation checkpointing; then tensor parallelism inside the node with shards, then pipelines, then layers one after
another. Only what holds whatever the batch (parameters, gradients, optimizer) can refuse a job; the rest is an estimate
and warns. Not for: the words of the choice (`trainer.plan.auto_text`), the estimate itself (`trainer.plan.estimate`).
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

from trainer.plan.auto_text import (
    cannot_fit,
    no_way,
    told_alternative,
    too_large_warning,
    why_chosen,
    why_unknown_memory,
)
from trainer.plan.axes import ParallelPlan, ParallelRequest, RankLayout
from trainer.plan.candidates import (
    Candidate,
    Subject,
    Way,
    copies,
    needs,
    one_after_another,
    pipelines,
    reliefs,
    shards,
    tensor,
    weigh,
)
from trainer.plan.estimate import MemoryEstimate, OptimizerKind
from trainer.plan.model_profile import ModelProfile
from trainer.plan.model_rules import ModelFacts, model_problems
from trainer.plan.parallel_plan import resolve_parallel
from trainer.plan.problem import PlanError
from trainer.plan.schedules import bubble_of

USABLE_PART: Final = 0.9
"""Of a GPU's memory: the rest is for the CUDA context, the libraries and what the allocator cannot use."""
MOST_ALTERNATIVES: Final = 4
RECOMPUTED: Final = {"none": 1.0, "selective": 1.1, "full": 4 / 3}
"""Time of a step under activation checkpointing: full runs every forward twice, of three equal parts of work."""
LEAST_GAIN: Final = 0.05
"""An alternative with more GPUs that is not faster by this part is not worth telling."""


@dataclass(frozen=True, kw_only=True)
class Alternative:
    """Another way, with its price."""

    text: str
    plan: ParallelPlan
    layout: RankLayout
    memory_bytes: int
    """What its fullest rank needs."""
    relative_step_time: float
    """Of a step, against the chosen plan; what is sent is not counted."""


@dataclass(frozen=True, kw_only=True)
class AutoChoice:
    """The plan that was chosen, and why."""

    plan: ParallelPlan
    why: str
    """One paragraph."""
    memory: MemoryEstimate
    alternatives: tuple[Alternative, ...] = ()
    warnings: tuple[str, ...] = ()


def choose_plan(
    profile: ModelProfile,
    request: ParallelRequest,
    layout: RankLayout,
    *,
    gpu_memory_bytes: int | None,
    batch_size: int,
    optimizer: OptimizerKind | None = None,
) -> AutoChoice:
    """The plan for `request` on the ranks of `layout`, with GPUs of `gpu_memory_bytes` each (None: not known).

    A request that names another strategy than `auto` gets that: then there are only warnings. Raises PlanError when
    parameters, gradients and optimizer state cannot fit however they are split, and when no way can use these ranks.
    """
    subject = Subject(
        profile=profile,
        request=request,
        layout=layout,
        batch_size=batch_size,
        optimizer=optimizer or OptimizerKind(),
    )
    if request.strategy not in (None, "auto"):
        return _as_asked(subject, gpu_memory_bytes)
    if gpu_memory_bytes is None:
        return _by_layers_alone(subject)
    picked = _pick(subject, gpu_memory_bytes * USABLE_PART)
    if picked.best is None:
        raise PlanError([no_way(subject)])
    least = min(picked.tried, key=lambda one: one.memory.largest_states)
    if least.memory.largest_states > gpu_memory_bytes:
        raise PlanError([cannot_fit(subject, least, gpu_memory_bytes)])
    best = picked.best if picked.has_fit else _next_best(picked.tried, gpu_memory_bytes)
    warnings = () if picked.has_fit else (too_large_warning(best, gpu_memory_bytes),)
    return AutoChoice(
        plan=best.plan,
        why=why_chosen(subject, best, picked.tried, gpu_memory_bytes, has_fit=picked.has_fit),
        memory=best.memory,
        alternatives=_alternatives(subject, best, gpu_memory_bytes),
        warnings=(*warnings, *best.notes),
    )


def facts_of(profile: ModelProfile) -> ModelFacts:
    """What of a profile the rules about models need."""
    return ModelFacts(
        num_layers=len(profile.layers) if profile.can_split else None,
        layer_names=tuple(layer.name for layer in profile.layers),
        tensor_parallel_sizes=profile.tensor_parallel_sizes,
        has_tensor_parallel_plan=profile.has_tensor_parallel_plan,
        has_batch_norm=profile.has_batch_norm,
        scalar_parameters=profile.scalar_parameters,
    )


# --- Without a choice ------------------------------------------------------------------------------------------------


def _as_asked(subject: Subject, gpu_memory_bytes: int | None) -> AutoChoice:
    resolved = resolve_parallel(subject.request, subject.layout, batch_size=subject.batch_size)
    if problems := model_problems(resolved.plan, facts_of(subject.profile)):
        raise PlanError(problems)
    chosen = Candidate(plan=resolved.plan, memory=needs(subject, resolved.plan))
    is_too_large = gpu_memory_bytes is not None and chosen.total > gpu_memory_bytes * USABLE_PART
    warning = (too_large_warning(chosen, gpu_memory_bytes),) if is_too_large and gpu_memory_bytes else ()
    why = f"{subject.request.strategy} was asked for."
    alternatives: tuple[Alternative, ...] = ()
    if is_too_large and gpu_memory_bytes:
        automatic = replace(subject, request=replace(subject.request, strategy="auto"))
        alternatives = _alternatives(automatic, chosen, gpu_memory_bytes)
    return AutoChoice(
        plan=chosen.plan,
        why=why,
        memory=chosen.memory,
        alternatives=alternatives,
        warnings=(*warning, *resolved.notes),
    )


def _by_layers_alone(subject: Subject) -> AutoChoice:
    """With whole copies where the batch has samples for all, else the first way that can use all ranks."""
    for ways in (copies, shards, tensor, pipelines, one_after_another):
        for way in ways(subject):
            candidate = weigh(subject, way)
            if candidate is not None:
                why = why_unknown_memory(subject, candidate)
                return AutoChoice(plan=candidate.plan, why=why, memory=candidate.memory, warnings=candidate.notes)
    raise PlanError([no_way(subject)])


# --- The rules -------------------------------------------------------------------------------------------------------


_RULES: Final[tuple[tuple[Callable[[Subject], Iterator[Way]], ...], ...]] = (
    (copies, shards),
    (tensor,),
    (pipelines,),
    (one_after_another,),
)
"""Ways to split, dearer ones later. Those of a row are tried with every relief before those of the next."""


@dataclass(frozen=True, kw_only=True)
class Picked:
    """What the rules came to."""

    best: Candidate | None
    """None: nothing can use these ranks."""
    has_fit: bool
    tried: tuple[Candidate, ...]
    """All that was weighed, in order; the last is the best where it fits."""


def _pick(subject: Subject, usable_bytes: float) -> Picked:
    tried: list[Candidate] = []
    for row in _RULES:
        for relief in reliefs(subject):
            for rule in row:
                for way in rule(subject):
                    candidate = _least_cut(subject, {**way, **relief}, usable_bytes)
                    if candidate is None:
                        continue
                    tried.append(candidate)
                    if candidate.total <= usable_bytes:
                        return Picked(best=candidate, has_fit=True, tried=tuple(tried))
    return Picked(best=min(tried, key=lambda one: one.total, default=None), has_fit=False, tried=tuple(tried))


def _next_best(tried: Sequence[Candidate], gpu_memory_bytes: int) -> Candidate:
    """Where nothing is sure to fit: the first that fits if all the memory can be used, else what needs least."""
    may_fit = (one for one in tried if one.total <= gpu_memory_bytes)
    return next(may_fit, None) or min(tried, key=lambda one: one.total)


def _least_cut(subject: Subject, way: Way, usable_bytes: float) -> Candidate | None:
    """The way with the fewest parts of the batch that fit; the most, where none do."""
    if way["grad_accum_steps"] is not None:
        return weigh(subject, way)
    whole = weigh(subject, {**way, "grad_accum_steps": 1})
    if whole is None or whole.total <= usable_bytes:
        return whole
    plan = whole.plan
    most = subject.batch_size // (plan.data_parallel_size * plan.micro_batches)
    options = _cuts(most)
    found = {}

    def is_enough(steps: int) -> bool:
        found[steps] = weigh(subject, {**way, "grad_accum_steps": steps, "micro_batches": _kept(plan)})
        one = found[steps]
        return one is not None and one.total <= usable_bytes

    place = min(bisect_left(options, True, key=is_enough), len(options) - 1)
    if options[place] not in found:
        is_enough(options[place])
    return found[options[place]] or whole


def _kept(plan: ParallelPlan) -> int | None:
    return plan.micro_batches if plan.pp > 1 else None


def _cuts(most: int) -> list[int]:
    """1, 2, 4, … and `most` itself."""
    return sorted({*(2**power for power in range(most.bit_length())), most})


# --- Alternatives ----------------------------------------------------------------------------------------------------


def step_cost(plan: ParallelPlan) -> float:
    """Time of a step in arbitrary units, if nothing were sent: work over ranks, what waits, what is computed again."""
    return RECOMPUTED[plan.activation_checkpointing] / (plan.world_size * (1.0 - bubble_of(plan)))


def _alternatives(subject: Subject, chosen: Candidate, gpu_memory_bytes: int) -> tuple[Alternative, ...]:
    """Other ways on the same GPUs (beside whole copies none is better), the best on fewer, and on twice as many."""
    usable = gpu_memory_bytes * USABLE_PART
    has_copies = chosen.plan.strategy in ("single", "ddp") and chosen.total <= usable
    found = [*([] if has_copies else _other_ways(subject, chosen, usable)), *_other_sizes(subject, chosen, usable)]
    return tuple(_alternative(subject, layout, one, chosen) for layout, one in found[:MOST_ALTERNATIVES])


def _other_ways(subject: Subject, chosen: Candidate, usable: float) -> Iterator[tuple[RankLayout, Candidate]]:
    """The first that fits of each other row, and of shards beside copies."""
    told = {chosen.plan.strategy}
    for rules in ((shards,), (tensor,), (pipelines,)):
        other = _first_fit(subject, rules, usable)
        if other is not None and other.plan.strategy not in told:
            told.add(other.plan.strategy)
            yield subject.layout, other
            if len(told) > 2:
                return


def _first_fit(
    subject: Subject, rules: Sequence[Callable[[Subject], Iterator[Way]]], usable: float
) -> Candidate | None:
    for relief in reliefs(subject):
        for rule in rules:
            for way in rule(subject):
                candidate = _least_cut(subject, {**way, **relief}, usable)
                if candidate is not None and candidate.total <= usable:
                    return candidate
    return None


def _other_sizes(subject: Subject, chosen: Candidate, usable: float) -> Iterator[tuple[RankLayout, Candidate]]:
    for layout in _smaller(subject.layout):
        picked = _pick(replace(subject, layout=layout), usable)
        if picked.best is not None and picked.has_fit:
            yield layout, picked.best
            break
    larger = _larger(subject.layout)
    picked = _pick(replace(subject, layout=larger), usable)
    if picked.best is not None and picked.has_fit:
        is_faster = step_cost(picked.best.plan) < (1 - LEAST_GAIN) * step_cost(chosen.plan)
        if is_faster or chosen.total > usable:
            yield larger, picked.best


def _smaller(layout: RankLayout) -> Iterator[RankLayout]:
    """The fewest GPUs first, halving nodes, then ranks."""
    found = []
    nodes, ranks = layout.num_nodes, layout.ranks_per_node
    while nodes * ranks > 1:
        nodes, ranks = (nodes // 2, ranks) if nodes > 1 else (1, ranks // 2)
        found.append(RankLayout(num_nodes=max(1, nodes), ranks_per_node=max(1, ranks)))
    return reversed(found)


def _larger(layout: RankLayout) -> RankLayout:
    if layout.num_nodes == 1 and layout.ranks_per_node < 8:
        return RankLayout(num_nodes=1, ranks_per_node=2 * layout.ranks_per_node)
    return RankLayout(num_nodes=2 * layout.num_nodes, ranks_per_node=layout.ranks_per_node)


def _alternative(subject: Subject, layout: RankLayout, other: Candidate, chosen: Candidate) -> Alternative:
    relative = step_cost(other.plan) / step_cost(chosen.plan)
    return Alternative(
        text=told_alternative(other, layout, relative),
        plan=other.plan,
        layout=layout,
        memory_bytes=other.total,
        relative_step_time=relative,
    )
