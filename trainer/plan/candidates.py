"""The ways to split a model that `auto` weighs: what each asks for, and what it then needs. Pure.

Not for: which is taken (`trainer.plan.auto_plan`).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from trainer.plan.axes import ACTIVATION_CHECKPOINTING, AXES, ParallelPlan, ParallelRequest, RankLayout
from trainer.plan.estimate import MemoryEstimate, OptimizerKind, estimate
from trainer.plan.model_profile import ModelProfile
from trainer.plan.model_rules import ModelFacts, model_problems
from trainer.plan.parallel_plan import resolve_parallel
from trainer.plan.problem import PlanError


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A plan that could run, and what it needs."""

    plan: ParallelPlan
    memory: MemoryEstimate
    notes: tuple[str, ...] = ()

    @property
    def total(self) -> int:
        """Bytes of its fullest rank."""
        return self.memory.worst.total


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What is to be split, and over what."""

    profile: ModelProfile
    request: ParallelRequest
    layout: RankLayout
    batch_size: int
    optimizer: OptimizerKind


Way = dict[str, int | str | None]
"""What a way to split sets in the request."""


# --- Ways to split ---------------------------------------------------------------------------------------------------


def copies(subject: Subject) -> Iterator[Way]:
    """Whole copies: a single one, or one for each rank (DDP)."""
    yield {"strategy": "ddp" if subject.layout.world_size > 1 else "single"}


def shards(subject: Subject) -> Iterator[Way]:
    """One copy over the ranks of each node, which talk fast, then one over all ranks."""
    if subject.layout.world_size > 1:
        if subject.layout.num_nodes > 1 and subject.layout.ranks_per_node > 1:
            yield {"strategy": "hsdp"}
        yield {"strategy": "fsdp"}


def tensor(subject: Subject) -> Iterator[Way]:
    """Layers split inside the node, and what is left sharded."""
    if not subject.profile.has_tensor_parallel_plan:
        return
    for tp in divisors(subject.layout.ranks_per_node):
        if not any(size % tp for size in subject.profile.tensor_parallel_sizes):
            rest = subject.layout.world_size // tp
            yield {"strategy": "tensor", "tp": tp, "dp_shard": rest if rest > 1 else None}


def pipelines(subject: Subject) -> Iterator[Way]:
    """The fewest stages that fit: with copies, with shards, with split layers. They need a batch that can be cut."""
    world_size = subject.layout.world_size
    if not subject.profile.can_split or not can_be_cut(subject):
        return
    for pp in divisors(world_size):
        rest = world_size // pp
        if pp > len(subject.profile.layers):
            return
        yield {"strategy": "pipeline", "pp": pp}
        if rest > 1:
            yield {"strategy": "pipeline", "pp": pp, "dp_shard": rest}
            for way in tensor(subject):
                if rest % int(way["tp"] or 1) == 0:
                    yield {"strategy": "pipeline", "pp": pp, "tp": way["tp"]}


def one_after_another(subject: Subject) -> Iterator[Way]:
    """For a batch that cannot be cut: one rank (or group of ranks that split layers) works at a time."""
    if subject.profile.can_split and subject.layout.world_size > 1 and not can_be_cut(subject):
        for way in reversed([*tensor(subject)]):  # the more ranks a layer is split over, the fewer wait
            yield {"strategy": "model", "tp": way["tp"], "pp": subject.layout.world_size // int(way["tp"] or 1)}
        yield {"strategy": "model"}


def can_be_cut(subject: Subject) -> bool:
    """Whether parts of a batch may run one by one: BatchNorm would see the parts."""
    return subject.batch_size > 1 and not subject.profile.has_batch_norm


def reliefs(subject: Subject) -> Iterator[Way]:
    """What makes a way need less, cheapest first: smaller micro-batches cost next to nothing, checkpointing costs time.
    Not below what was asked for, and BatchNorm sees micro-batches, so its batches are not cut."""
    modes = ACTIVATION_CHECKPOINTING[ACTIVATION_CHECKPOINTING.index(subject.request.activation_checkpointing) :]
    asked = subject.request.grad_accum_steps
    can_cut = asked == 1 and not subject.profile.has_batch_norm
    yield {"activation_checkpointing": modes[0], "grad_accum_steps": asked}
    for mode in modes:
        if can_cut or mode != modes[0]:
            yield {"activation_checkpointing": mode, "grad_accum_steps": None if can_cut else asked}


# --- What they need --------------------------------------------------------------------------------------------------


def weigh(subject: Subject, way: Way) -> Candidate | None:
    """The plan of a way; None where it cannot run, or not as was asked."""
    request, changes = subject.request, {key: value for key, value in way.items() if value is not None}
    for key, value in changes.items():
        asked = getattr(request, key)
        if key in AXES and asked is not None and asked != value:
            return None
    try:
        resolved = resolve_parallel(replace(request, **changes), subject.layout, batch_size=subject.batch_size)  # type: ignore[arg-type]
    except PlanError:
        return None
    plan = resolved.plan
    if plan.data_parallel_size * plan.grad_accum_steps * plan.micro_batches > subject.batch_size:
        return None
    if model_problems(plan, facts_of(subject.profile)):
        return None
    return Candidate(plan=plan, memory=needs(subject, plan), notes=resolved.notes)


def facts_of(profile: ModelProfile) -> ModelFacts:
    """What the rules of plans ask of a model."""
    return ModelFacts(
        num_layers=len(profile.layers) if profile.can_split else None,
        layer_names=tuple(layer.name for layer in profile.layers),
        tensor_parallel_sizes=profile.tensor_parallel_sizes,
        has_tensor_parallel_plan=profile.has_tensor_parallel_plan,
        has_batch_norm=profile.has_batch_norm,
        scalar_parameters=profile.scalar_parameters,
    )


def needs(subject: Subject, plan: ParallelPlan) -> MemoryEstimate:
    return estimate(subject.profile, plan, batch_size=subject.batch_size, optimizer=subject.optimizer)


def divisors(number: int) -> list[int]:
    """Those from 2 on."""
    return [size for size in range(2, number + 1) if number % size == 0]
