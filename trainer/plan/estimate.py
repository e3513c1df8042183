"""How many bytes a rank needs for a model under a plan, by kind. Pure.

Parameters, gradients and optimizer state are exact: sums over shapes, with shards as FSDP2 cuts them. Activations come
from the profile; what lies between (gradients on their way, gathered layers, what is received) is the most that lies
there at once by what torch does. Not for: choosing a plan (`trainer.plan.auto_plan`), or text (`estimate_text`).
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from trainer.plan.axes import ParallelPlan
from trainer.plan.model_profile import LayerProfile, ModelProfile
from trainer.plan.split import split_by_cost, stage_ids, stages_of

BUCKET_BYTES: Final = 25 * 2**20
"""Gradients outside DDP are averaged together up to about this size (`trainer.parallel.gradients`)."""
STEP_COUNTER_BYTES: Final = 4
"""AdamW keeps the number of steps with each parameter."""
_LOW_BYTES: Final = 2
"""Bytes of a number in bf16."""
_REDUCED_BYTES: Final = 4
"""Bytes of a number in which FSDP adds gradients up under bf16."""
Sizes = tuple[tuple[tuple[int, ...], int, int | None, bool], ...]
"""As `LayerProfile.sizes`."""


@dataclass(frozen=True, kw_only=True)
class OptimizerKind:
    """What an optimizer keeps for each parameter."""

    name: str = "adamw"
    """`adamw` or `sgd`; `other`: one of the task's own, counted as AdamW."""
    momentum: float = 0.9
    """Of sgd."""

    @property
    def copies(self) -> int:
        """Tensors of the parameter's size: AdamW's two moments, SGD's momentum."""
        return (1 if self.momentum else 0) if self.name == "sgd" else 2

    @property
    def bytes_beside(self) -> int:
        """Bytes for each parameter whatever its size."""
        return 0 if self.name == "sgd" else STEP_COUNTER_BYTES


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """Bytes of one rank, by kind."""

    pp_rank: int
    parameters: int
    gradients: int
    optimizer: int
    buffers: int
    activations: int
    """What is kept between forward and backward when most is kept."""
    workspace: int
    """Outputs and gradients on their way through the layer at work, and the loss."""
    communication: int
    """Gathered layers, buckets, what is received from other stages."""

    @property
    def states(self) -> int:
        """Parameters, gradients and optimizer: what is exact, and lies there whatever the batch."""
        return self.parameters + self.gradients + self.optimizer

    @property
    def total(self) -> int:
        """All kinds together."""
        return self.states + self.buffers + self.activations + self.workspace + self.communication


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """What ranks need under a plan. Of the ranks of a pipeline stage the one with the largest shards is told."""

    by_pp_rank: tuple[RankMemory, ...]
    samples_per_micro_batch: int
    """The most that a rank runs forward and backward at once."""

    @property
    def worst(self) -> RankMemory:
        """The rank that needs most."""
        return max(self.by_pp_rank, key=lambda rank: rank.total)

    @property
    def largest_states(self) -> int:
        """Most bytes of parameters, gradients and optimizer on a rank."""
        return max(rank.states for rank in self.by_pp_rank)


def estimate(
    profile: ModelProfile, plan: ParallelPlan, *, batch_size: int, optimizer: OptimizerKind | None = None
) -> MemoryEstimate:
    """The bytes that `plan` needs for a global batch of `batch_size`. Raises ValueError for fewer layers than
    stages."""
    optimizer = optimizer or OptimizerKind()
    parts = plan.data_parallel_size * plan.grad_accum_steps * plan.micro_batches
    samples = max(1, math.ceil(batch_size / parts))
    stages = stage_layers(profile, plan)
    ranks = tuple(
        _rank_memory(profile, plan, stages, pp_rank, samples=samples, optimizer=optimizer) for pp_rank in range(plan.pp)
    )
    return MemoryEstimate(by_pp_rank=ranks, samples_per_micro_batch=samples)


def stage_layers(profile: ModelProfile, plan: ParallelPlan) -> tuple[range, ...]:
    """Numbers of the layers of each stage, as the ranks split them. Raises ValueError for fewer layers than stages."""
    if plan.pp == 1:
        return (range(len(profile.layers)),)
    cuts = plan.cut_points
    if cuts is None:
        cuts = _balanced(tuple(layer.flops_per_sample for layer in profile.layers), plan.num_stages)
    return stages_of(len(profile.layers), cuts)


@lru_cache(maxsize=256)
def _balanced(flops: tuple[float, ...], num_stages: int) -> tuple[int, ...]:
    """As `trainer.parallel.stages`: a layer costs its operations, and something even if it has none."""
    return split_by_cost([one + 1.0 for one in flops], num_stages)


def own_layers(profile: ModelProfile, plan: ParallelPlan, pp_rank: int) -> tuple[LayerProfile, ...]:
    """The layers on one rank of the pipeline."""
    stages = stage_layers(profile, plan)
    own = stage_ids(plan, pp_rank) if plan.pp > 1 else (0,)
    return tuple(profile.layers[index] for stage in sorted(own) for index in stages[stage])


# --- Exact: parameters, gradients, optimizer -------------------------------------------------------------------------


def states_of(
    layers: Iterable[LayerProfile], plan: ParallelPlan, optimizer: OptimizerKind, *, shard: int = 0
) -> tuple[int, int, int]:
    """(parameters, gradients, optimizer) in bytes of the rank with number `shard` on the axis dp_shard: 0 has most."""
    parameters = gradients = states = 0
    for sizes in _sizes_once(layers):
        stored, trained, kept = _states(sizes, plan.tp, plan.dp_shard, optimizer, shard)
        parameters, gradients, states = parameters + stored, gradients + trained, states + kept
    return parameters, gradients, states


def whole_bytes(
    layers: Iterable[LayerProfile], plan: ParallelPlan, *, element_size: int | None = None, is_trained: bool = False
) -> tuple[int, int]:
    """(all together, the largest) of the bytes of parameters as a tensor-parallel rank computes with them, with
    `element_size` instead of their own. What several layers share is there once. `is_trained`: only of those that are.
    """
    each = [_whole(sizes, plan.tp, element_size, is_trained) for sizes in _sizes_once(layers)]
    return sum(total for total, _ in each), max((most for _, most in each), default=0)


@lru_cache(maxsize=4096)
def _whole(sizes: Sizes, tp: int, element_size: int | None, is_trained: bool) -> tuple[int, int]:
    found = [
        math.prod(_split_shape(shape, split_dim, tp)) * (element_size or own_size)
        for shape, own_size, split_dim, is_trainable in sizes
        if is_trainable or not is_trained
    ]
    return sum(found), max(found, default=0)


@lru_cache(maxsize=4096)
def _states(sizes: Sizes, tp: int, dp_shard: int, optimizer: OptimizerKind, shard: int) -> tuple[int, int, int]:
    """FSDP2 deals out rows of dimension 0 as `torch.chunk` does, and pads every shard to the size of the first."""
    parameters = gradients = states = 0
    for shape, element_size, split_dim, is_trainable in sizes:
        local = _split_shape(shape, split_dim, tp)
        rows, width = (local[0], math.prod(local[1:])) if local else (1, 1)
        most = math.ceil(rows / dp_shard)
        own = min(max(rows - shard * most, 0), most)
        parameters += most * width * element_size
        if is_trainable:
            gradients += most * width * element_size
            states += optimizer.copies * own * width * element_size + optimizer.bytes_beside
    return parameters, gradients, states


def _sizes_once(layers: Iterable[LayerProfile]) -> Iterator[Sizes]:
    """The sizes of each layer's parameters, without those that an earlier one of `layers` has."""
    found: set[str] = set()
    layers = list(layers)
    has_shared = any(layer.has_shared for layer in layers)
    for layer in layers:
        if not has_shared:
            yield layer.sizes
            continue
        yield tuple(size for size, one in zip(layer.sizes, layer.parameters, strict=True) if one.name not in found)
        found.update(one.name for one in layer.parameters)


def _split_shape(shape: tuple[int, ...], split_dim: int | None, tp: int) -> tuple[int, ...]:
    if tp == 1 or split_dim is None:
        return shape
    return (*shape[:split_dim], math.ceil(shape[split_dim] / tp), *shape[split_dim + 1 :])


# --- A rank ----------------------------------------------------------------------------------------------------------


def _rank_memory(
    profile: ModelProfile,
    plan: ParallelPlan,
    stages: Sequence[range],
    pp_rank: int,
    *,
    samples: int,
    optimizer: OptimizerKind,
) -> RankMemory:
    own = sorted(stage_ids(plan, pp_rank)) if plan.pp > 1 else [0]
    by_stage = {stage: [profile.layers[index] for index in stages[stage]] for stage in own}
    layers = [layer for stage in own for layer in by_stage[stage]]
    parameters, gradients, states = states_of(layers, plan, optimizer)
    last = len(stages) - 1
    return RankMemory(
        pp_rank=pp_rank,
        parameters=parameters,
        gradients=gradients,
        optimizer=states,
        buffers=sum(layer.buffer_bytes for layer in layers),
        activations=_activations(profile, plan, by_stage, pp_rank, samples, has_loss=last in own),
        workspace=_workspace(profile, plan, layers, samples, has_loss=last in own),
        communication=_communication(plan, by_stage, samples, last),
    )


def _activations(
    profile: ModelProfile,
    plan: ParallelPlan,
    by_stage: Mapping[int, Sequence[LayerProfile]],
    pp_rank: int,
    samples: int,
    *,
    has_loss: bool,
) -> int:
    kept = sum(_kept(layer, plan, samples) for layers in by_stage.values() for layer in layers)
    if has_loss:
        kept += samples * profile.loss(plan.precision)
    # All stages of a rank are alike to within a layer, so a stage-and-micro-batch is an equal part of them.
    alive = alive_micro_batches(plan, pp_rank) / len(by_stage)
    again = 0
    if plan.activation_checkpointing != "none":
        everything = [layer for layers in by_stage.values() for layer in layers]
        again = max(_kept_of_all(layer, plan, samples) for layer in everything)
    return round(alive * kept) + again


def alive_micro_batches(plan: ParallelPlan, pp_rank: int) -> int:
    """Forwards of one stage whose backward is still to come, at most, on a rank of the pipeline."""
    if plan.pp == 1:
        return 1
    most = plan.micro_batches * plan.stages_per_rank
    return min(most, _ALIVE[plan.schedule](plan, pp_rank))


def _warm_up(plan: ParallelPlan, pp_rank: int) -> int:
    """Interleaved: forwards before the first backward, as torch's schedule counts them, and one more."""
    return (plan.stages_per_rank - 1) * plan.pp + 2 * (plan.pp - 1 - pp_rank) + 1


_ALIVE: Final[Mapping[str, Callable[[ParallelPlan, int], int]]] = {
    "GPipe": lambda plan, pp_rank: plan.micro_batches,
    "1F1B": lambda plan, pp_rank: plan.pp - pp_rank,
    "Interleaved1F1B": _warm_up,
    "InterleavedZeroBubble": _warm_up,
    "ZBVZeroBubble": lambda plan, pp_rank: 2 * plan.pp,
    "DualPipeV": lambda plan, pp_rank: 2 * plan.pp + 1,
}


def _kept(layer: LayerProfile, plan: ParallelPlan, samples: int) -> int:
    """What a layer keeps of a micro-batch under the plan's activation checkpointing."""
    kept = layer.activations(plan.precision)
    if plan.activation_checkpointing == "full":
        return samples * kept.input
    if plan.activation_checkpointing == "selective":
        # What is dear to compute lies where the layer is split, in the same part as all that is saved.
        part = 1.0 if not kept.saved else _split(kept.saved, kept.saved_split, plan.tp) / kept.saved
        return round(samples * min((kept.selective - kept.input) * part + kept.input, kept.saved + kept.input))
    return _kept_of_all(layer, plan, samples)


def _kept_of_all(layer: LayerProfile, plan: ParallelPlan, samples: int) -> int:
    kept = layer.activations(plan.precision)
    fixed = kept.saved_fixed
    if plan.dp_shard > 1 and plan.precision == "bf16":
        fixed = 0  # FSDP gathers parameters in bf16, so there are no copies
    elif fixed and plan.tp > 1:
        (local, _), (whole, _) = (whole_bytes([layer], split) for split in (plan, ParallelPlan()))
        fixed = round(fixed * local / max(1, whole))
    return samples * _split(kept.saved, kept.saved_split, plan.tp) + fixed


def _split(saved: int, split: int, tp: int) -> int:
    return saved - split + math.ceil(split / tp)


def _workspace(
    profile: ModelProfile, plan: ParallelPlan, layers: Sequence[LayerProfile], samples: int, *, has_loss: bool
) -> int:
    """The larger of: at the loss, the model's output and two gradients of what the loss keeps (one is made of the
    other); at a layer, the gradients of its output and its input."""
    kept = [layer.activations(plan.precision) for layer in layers]
    at_layer = max(one.input + one.output for one in kept)
    at_loss = kept[-1].output + 2 * profile.loss(plan.precision) if has_loss else 0
    return samples * max(at_layer, at_loss)


# --- Communication ---------------------------------------------------------------------------------------------------


def _communication(plan: ParallelPlan, by_stage: Mapping[int, Sequence[LayerProfile]], samples: int, last: int) -> int:
    layers = [layer for own in by_stage.values() for layer in own]
    total = _gathered(layers, plan) if plan.dp_shard > 1 else _exchanged(layers, plan)
    if plan.pp > 1:
        for stage, own in by_stage.items():
            # Room for every micro-batch's input, and for the gradient of its output, is made at the start.
            received = own[0].activations(plan.precision).input if stage > 0 else 0
            received += own[-1].activations(plan.precision).output if stage < last else 0
            total += plan.micro_batches * samples * received
    return total


def _exchanged(layers: Sequence[LayerProfile], plan: ParallelPlan) -> int:
    """Beside gradients that are averaged whole. DDP's buckets are the gradients themselves; a gradient that was just
    computed lies beside its bucket. Our own exchange copies a bucket at a time."""
    if plan.dp_replicate == 1:
        return 0
    total, largest = whole_bytes(layers, plan, is_trained=True)
    return min(total, BUCKET_BYTES + largest) if plan.pp * plan.tp > 1 else largest


def _gathered(layers: Sequence[LayerProfile], plan: ParallelPlan) -> int:
    """What FSDP2 holds whole: two units (one computes while the next is gathered), the gradient of one, and the same in
    the type it is added up in. In a pipeline all of the rank's units, and their gradients until they are added up."""
    is_low = plan.precision == "bf16"
    units = _units(layers)
    gathered = [whole_bytes(unit, plan, element_size=_LOW_BYTES if is_low else None)[0] for unit in units]
    reduced = [whole_bytes(unit, plan, element_size=_REDUCED_BYTES if is_low else None)[0] for unit in units]
    if plan.pp > 1:
        return sum(gathered) + sum(reduced) + max(reduced)
    several = 2 if len(units) > 1 else 1
    return (several + 1) * max(gathered) + max(reduced)


def _units(layers: Sequence[LayerProfile]) -> list[list[LayerProfile]]:
    """The layers whose parameters FSDP gathers together: each by itself. Those that share one go with the root."""
    if not any(layer.has_shared for layer in layers):
        return [[layer] for layer in layers]
    holders = Counter(one.name for layer in layers for one in layer.parameters)
    is_root = [any(holders[one.name] > 1 for one in layer.parameters) for layer in layers]
    root = [layer for layer, with_root in zip(layers, is_root, strict=True) if with_root]
    return [root, *([layer] for layer, with_root in zip(layers, is_root, strict=True) if not with_root)]
