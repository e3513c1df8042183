"""Tensor parallelism: the linear layers that a task names are split over neighbouring ranks, by columns or by rows.

A column-wise layer gives each rank a part of its output; a row-wise one takes such parts and adds up what comes out, so
a pair costs one all-reduce forward and one backward (Shoeybi et al. 2019, section 3). All other parameters stay whole
on each rank, which computes the same with them. Not for: whether sizes divide (`trainer.plan`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from fnmatch import fnmatchcase
from typing import Final

from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from trainer.failure import ConfigError

STYLES: Final[Mapping[str, Callable[[], ParallelStyle]]] = {"colwise": ColwiseParallel, "rowwise": RowwiseParallel}


def split_linears(model: nn.Module, plan: Mapping[str, str], mesh: DeviceMesh) -> None:
    """Split the linear layers of `model` that `plan` (name pattern to `colwise` or `rowwise`) names, in place.

    Every rank of `mesh` must hold the same weights: nothing is sent. Raises ConfigError for a pattern with another word
    or a layer that is none. A pattern may match nothing here: a pipeline stage has some layers only.
    """
    problems = [f"{pattern}: {style!r}" for pattern, style in plan.items() if style not in STYLES]
    if problems:
        raise ConfigError(
            f"the task's tensor_parallel_plan has {'; '.join(problems)}. Write {' or '.join(STYLES)} for each."
        )
    named = _named(model, plan)
    _refuse_shared(model, {id(module) for module, _ in named})
    for module, style in named:
        parallelize_module(module, mesh, STYLES[style](), src_data_rank=None)


def _refuse_shared(model: nn.Module, split: set[int]) -> None:
    """A weight with two owners, of which one is split, would become two weights."""
    owners: dict[nn.Parameter, list[tuple[str, bool]]] = {}
    for name, module in model.named_modules():
        for parameter in module.parameters(recurse=False):
            owners.setdefault(parameter, []).append((name, id(module) in split))
    shared = [places for places in owners.values() if len(places) > 1 and any(is_split for _, is_split in places)]
    if shared:
        told = "; ".join(" and ".join(name for name, _ in places) for places in shared)
        raise ConfigError(
            f"the task's tensor_parallel_plan splits layers that share their weight with others ({told}). Leave them "
            "out of the plan, or give each a weight of its own."
        )


def split_sizes(model: nn.Module, plan: Mapping[str, str]) -> tuple[int, ...]:
    """The sizes that a number of ranks must divide to split what `plan` names, each once. Raises ConfigError."""
    sizes = [one.out_features if style == "colwise" else one.in_features for one, style in _named(model, plan)]
    return tuple(dict.fromkeys(sizes))


def _named(model: nn.Module, plan: Mapping[str, str]) -> list[tuple[nn.Linear, str]]:
    found: list[tuple[nn.Linear, str]] = []
    for name, module in model.named_modules():
        style = next((style for pattern, style in plan.items() if fnmatchcase(name, pattern)), None)
        if style is None:
            continue
        if not isinstance(module, nn.Linear):
            raise ConfigError(
                f"the task's tensor_parallel_plan names {name}, which is a {type(module).__name__}; only Linear layers "
                "can be split."
            )
        found.append((module, style))
    return found
