"""An estimate in words: bytes of a rank by kind, and what its ranks send in a step. Pure."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final

from trainer.plan.axes import ParallelPlan
from trainer.plan.estimate import MemoryEstimate, RankMemory, own_layers, stage_layers, whole_bytes
from trainer.plan.model_profile import ModelProfile
from trainer.plan.split import rank_of_stage, stage_ids

_KINDS: Final = ("parameters", "gradients", "optimizer", "buffers", "activations", "workspace", "communication")
_UNITS: Final = (("TB", 10**12), ("GB", 10**9), ("MB", 10**6), ("kB", 10**3))
_LOW_BYTES: Final = 2


@dataclass(frozen=True, kw_only=True)
class Traffic:
    """What the rank of a plan that sends most of a kind hands to it in a step."""

    axis: str
    kind: str
    """all-reduce, all-gather, reduce-scatter or send."""
    num_bytes: int


def traffic_of(profile: ModelProfile, plan: ParallelPlan, *, batch_size: int) -> tuple[Traffic, ...]:
    """The bytes of a step by axis and kind. An all-gather counts what comes out, the others what goes in."""
    found: dict[tuple[str, str], int] = {}
    for pp_rank in range(plan.pp):
        own: dict[tuple[str, str], int] = {}
        for one in _of_rank(profile, plan, pp_rank, batch_size):
            own[one.axis, one.kind] = own.get((one.axis, one.kind), 0) + one.num_bytes
        found |= {key: max(found.get(key, 0), size) for key, size in own.items()}
    return tuple(Traffic(axis=axis, kind=kind, num_bytes=size) for (axis, kind), size in found.items() if size)


def estimate_lines(
    profile: ModelProfile,
    plan: ParallelPlan,
    estimate: MemoryEstimate,
    *,
    batch_size: int,
    gpu_memory_bytes: int | None = None,
) -> list[str]:
    """The lines that `gang check` prints: bytes of the rank that needs most, by kind, and what is sent in a step."""
    worst = estimate.worst
    whose = f"rank {worst.pp_rank} of the pipeline" if plan.pp > 1 else "each rank"
    lines = [f"memory of {whose}, micro-batches of {estimate.samples_per_micro_batch}:", *_kind_lines(worst)]
    total = f"  {'total':<14}{bytes_text(worst.total):>10}"
    if gpu_memory_bytes is not None:
        total += f"   of {bytes_text(gpu_memory_bytes)} ({worst.total / gpu_memory_bytes:.0%})"
    lines.append(total)
    if plan.pp > 1:
        lines.append(
            f"  totals by rank of the pipeline: {', '.join(bytes_text(one.total) for one in estimate.by_pp_rank)}"
        )
    if sent := traffic_of(profile, plan, batch_size=batch_size):
        lines += ["", "exchanged in each step, by the rank that exchanges most:"]
        lines += [f"  {one.axis:<14}{one.kind:<16}{bytes_text(one.num_bytes):>10}" for one in sent]
    return lines


def bytes_text(num_bytes: float) -> str:
    """A size for people: `71.3 GB`."""
    for unit, size in _UNITS:
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}" if num_bytes < 1000 * size else f"{num_bytes / size:.0f} {unit}"
    return f"{num_bytes:.0f} B"


def _kind_lines(rank: RankMemory) -> Iterator[str]:
    for kind in _KINDS:
        if size := getattr(rank, kind):
            yield f"  {kind:<14}{bytes_text(size):>10}"


def _sent_between_stages(profile: ModelProfile, plan: ParallelPlan, pp_rank: int) -> int:
    """Bytes per sample that a rank of a pipeline sends: activations to the next stages, gradients to those before."""
    sent = 0
    stages = stage_layers(profile, plan)
    for number in stage_ids(plan, pp_rank):
        first, last = (
            profile.layers[index].activations(plan.precision) for index in (stages[number][0], stages[number][-1])
        )
        if number < len(stages) - 1 and rank_of_stage(plan, number + 1) != pp_rank:
            sent += last.output
        if number > 0 and rank_of_stage(plan, number - 1) != pp_rank:
            sent += first.input
    return sent


def _of_rank(profile: ModelProfile, plan: ParallelPlan, pp_rank: int, batch_size: int) -> Iterator[Traffic]:
    layers = own_layers(profile, plan, pp_rank)
    whole, _ = whole_bytes(layers, plan, element_size=_LOW_BYTES if plan.precision == "bf16" else None)
    gradients, _ = whole_bytes(layers, plan, is_trained=True)
    samples = -(-batch_size // plan.data_parallel_size)
    kept = [layer.activations(plan.precision) for layer in layers]
    if plan.pp > 1:
        yield Traffic(axis="pp", kind="send", num_bytes=samples * _sent_between_stages(profile, plan, pp_rank))
    if plan.tp > 1:
        pairs = sum(
            one.output * sum(parameter.split_dim == 1 for parameter in layer.parameters)
            for one, layer in zip(kept, layers, strict=True)
        )
        yield Traffic(axis="tp", kind="all-reduce", num_bytes=2 * samples * pairs)
    if plan.dp_shard > 1:
        gathers = (1 if plan.pp > 1 else 2) * plan.grad_accum_steps
        yield Traffic(axis="dp_shard", kind="all-gather", num_bytes=gathers * whole)
        yield Traffic(axis="dp_shard", kind="reduce-scatter", num_bytes=plan.grad_accum_steps * gradients)
    if plan.dp_replicate > 1:
        times, parts = (plan.grad_accum_steps, plan.dp_shard) if plan.dp_shard > 1 else (1, 1)
        yield Traffic(axis="dp_replicate", kind="all-reduce", num_bytes=times * gradients // parts)
