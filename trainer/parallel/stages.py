"""From a model to this rank's stages of a pipeline: which layers they have, what goes between them, which weights they
share with other ranks.

Not for: running them (`trainer.parallel.pipeline`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch import nn

from trainer.failure import ConfigError
from trainer.mesh import Mesh
from trainer.parallel.axes import Axes
from trainer.parallel.gradients import TiedWeight
from trainer.parallel.layers import LayerCost, ListedLayer, stage_module
from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.split import rank_of_stage, split_by_cost, stage_ids, stages_of


@dataclass(frozen=True, kw_only=True)
class StageSplit:
    """Which layers each stage of a pipeline has."""

    ranges: tuple[range, ...]
    """Numbers of the layers, by stage."""
    own: tuple[int, ...]
    """Numbers of this rank's stages, in order."""


def split_layers(
    layers: Sequence[ListedLayer], costs: Sequence[LayerCost], plan: ParallelPlan, axes: Axes
) -> StageSplit:
    """The layers of each stage: as the plan's cut points say, else so that the costliest stage is as cheap as can be.

    Raises ConfigError for a stage that would have nothing to train.
    """
    num_stages = plan.pp * plan.stages_per_rank
    cuts = plan.cut_points
    if cuts is None:
        cuts = split_by_cost([cost.flops + 1.0 for cost in costs], num_stages)
    ranges = tuple(stages_of(len(layers), cuts))
    _refuse_untrained(layers, ranges)
    return StageSplit(ranges=ranges, own=tuple(sorted(stage_ids(plan, axes.pp_rank))))


def _refuse_untrained(layers: Sequence[ListedLayer], ranges: Sequence[range]) -> None:
    empty = [
        number
        for number, numbers in enumerate(ranges)
        if not any(one.requires_grad for index in numbers for one in layers[index].module.parameters())
    ]
    if empty:
        told = "; ".join(
            f"stage {number} has {', '.join(layers[index].name for index in ranges[number])}" for number in empty
        )
        raise ConfigError(
            f"some stages of the pipeline have no parameter to train ({told}). Use fewer stages, or say where to cut "
            "with parallel.cut_points."
        )


def own_modules(layers: Sequence[ListedLayer], split: StageSplit) -> tuple[nn.Module, Mapping[int, nn.Module]]:
    """(all that is this rank's, each of its stages by number), with the model's own names."""
    by_stage = {number: [layers[index] for index in split.ranges[number]] for number in split.own}
    together = [layer for number in split.own for layer in by_stage[number]]
    return stage_module(together), {number: stage_module(own) for number, own in by_stage.items()}


def tied_families(layers: Sequence[ListedLayer], split: StageSplit) -> list[list[tuple[int, str]]]:
    """Weights that several stages hold: for each, (stage, name) of every place, the first name first."""
    found: dict[nn.Parameter, list[tuple[int, str]]] = {}
    for number, numbers in enumerate(split.ranges):
        for index in numbers:
            layer = layers[index]
            for name, parameter in layer.module.named_parameters():
                found.setdefault(parameter, []).append((number, f"{layer.name}.{name}"))
    return [places for places in found.values() if len({number for number, _ in places}) > 1]


def tie(
    families: Sequence[Sequence[tuple[int, str]]], inner: nn.Module, plan: ParallelPlan, axes: Axes, mesh: Mesh
) -> tuple[TiedWeight, ...]:
    """The weights of this rank that other ranks hold copies of. All ranks call it with the same `families`, as
    `tied_families` found them; it makes process groups. Raises ConfigError for what cannot be kept equal."""
    ranks_per_stage = mesh.world_size // plan.pp
    tied: list[TiedWeight] = []
    for family in families:
        names = {rank_of_stage(plan, number): name for number, name in reversed(family)}
        if len(names) < len({number for number, _ in family}) and plan.dp_shard > 1:
            raise ConfigError(
                f"{' and '.join(name for _, name in family)} are one weight, and {plan.schedule} puts both on the same "
                "rank in two stages, which cannot be sharded apart. Use another schedule, or dp_replicate."
            )
        for place in range(ranks_per_stage if len(names) > 1 else 0):
            members = [holder * ranks_per_stage + place for holder in sorted(names)]
            # Every rank takes part in making each group, also of those that it is not in.
            group = dist.new_group(members, timeout=timedelta(seconds=mesh.start_timeout_seconds))
            if mesh.rank in members:
                first = rank_of_stage(plan, family[0][0])
                parameter = inner.get_parameter(names[axes.pp_rank])
                tied.append(TiedWeight(parameter=parameter, group=group, is_first=axes.pp_rank == first))
    return tuple(tied)
