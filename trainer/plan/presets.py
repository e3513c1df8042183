"""From the name of a strategy and a few numbers to a size for every axis. Pure.

Numbers that are given stand; of those that are not, each strategy has one that takes the ranks that are left, the
others are 1. Not for: a pipeline's schedule and micro-batches (`trainer.plan.pipeline_defaults`), or whether the plan
that comes of it may run (`trainer.plan.parallel_rules`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Final

from trainer.plan.axes import AXES, STRATEGY_AXES, ParallelRequest, RankLayout
from trainer.plan.problem import PlanError, PlanProblem

TAKES_THE_REST: Final[Mapping[str | None, tuple[str, ...]]] = {
    None: ("dp_replicate",),
    "single": (),
    "ddp": ("dp_replicate",),
    "fsdp": ("dp_shard", "dp_replicate"),
    "hsdp": ("dp_shard", "dp_replicate"),
    "model": ("pp", "dp_replicate"),
    "pipeline": ("pp", "dp_replicate"),
    "tensor": ("dp_replicate",),
}
"""Of these axes, the first that is not given takes the ranks that the others leave."""


def axes_for(request: ParallelRequest, layout: RankLayout) -> dict[str, int]:
    """The size of every axis. Raises PlanError where the numbers do not make the layout's ranks."""
    given = {axis: size for axis in AXES if (size := getattr(request, axis)) is not None}
    preset = _preset_sizes(request.strategy, given, layout)
    rest = next((axis for axis in TAKES_THE_REST[request.strategy] if axis not in given | preset), None)
    sizes = {axis: 1 for axis in AXES if axis != rest} | preset | given
    problems = list(_node_problems(sizes, layout))
    known, world_size = math.prod(sizes.values()), layout.world_size
    fits = world_size % known == 0 if rest else world_size == known
    if not fits and not (problems and world_size % (known // sizes["tp"]) == 0):
        problems.append(_product_problem(request.strategy, given, sizes, rest, layout))
    if problems:
        raise PlanError(problems)
    if rest is not None:
        sizes[rest] = world_size // known
    return {axis: sizes[axis] for axis in AXES}


def _preset_sizes(strategy: str | None, given: Mapping[str, int], layout: RankLayout) -> dict[str, int]:
    """Sizes that a strategy has of its own: those of `tensor` and `hsdp` follow from the nodes."""
    left, remainder = divmod(layout.world_size, math.prod(given.values()))
    if remainder:
        return {}
    if strategy == "tensor" and "tp" not in given:
        return {"tp": math.gcd(layout.ranks_per_node, left)}
    if strategy == "hsdp" and "dp_shard" not in given and "dp_replicate" not in given:
        of_a_node = math.gcd(layout.ranks_per_node // math.gcd(layout.ranks_per_node, given.get("tp", 1)), left)
        if layout.num_nodes > 1 and of_a_node > 1:
            return {"dp_shard": of_a_node}
        return {"dp_replicate": next((size for size in range(2, math.isqrt(left) + 1) if left % size == 0), 1)}
    return {}


def _node_problems(sizes: Mapping[str, int], layout: RankLayout) -> Iterator[PlanProblem]:
    """Ranks that split a layer exchange something at every layer: over the network that would be all they do."""
    ranks, tp = layout.ranks_per_node, sizes.get("tp", 1)
    if ranks % tp:
        fit = " or ".join(str(size) for size in _neighbours(tp, _divisors(ranks)))
        yield PlanProblem(
            key="parallel.tp",
            message=f"is {tp}, but a node has {ranks} rank{'s' if ranks > 1 else ''}, and the ranks that split a layer "
            "share a node.",
            fix=f"Set it to {fit}, or ask for {tp} GPUs on each node.",
        )


def _product_problem(
    strategy: str | None, given: Mapping[str, int], sizes: Mapping[str, int], rest: str | None, layout: RankLayout
) -> PlanProblem:
    world_size, known = layout.world_size, math.prod(sizes.values())
    product = " × ".join(f"{axis} {sizes[axis]}" for axis in AXES if axis in sizes)
    told = f"{product} = {known} ranks, but the job's resources make {world_size}"
    if rest is not None:
        told += f", which {known} does not divide" if known <= world_size else ""
    nearest = _nearest_sizes(strategy, given, sizes, rest is not None, layout)
    number = max(known, known * round(world_size / known)) if rest is not None else known
    numbers = ", ".join(f"{axis}: {size}" for axis, size in nearest.items() if size != given[axis])
    key = next(iter(given)) if len(given) == 1 else None
    return PlanProblem(
        key="parallel" if key is None else f"parallel.{key}",
        message=f"makes {told}." if key is None else f"is {given[key]}: {told}.",
        fix=f"{f'Set {numbers}, or a' if numbers else 'A'}sk for {number} GPU{'s' if number > 1 else ''}.",
    )


def _nearest_sizes(
    strategy: str | None, given: Mapping[str, int], sizes: Mapping[str, int], has_rest: bool, layout: RankLayout
) -> dict[str, int]:
    """The sizes for the axes that were given that fit the layout with the fewest and smallest changes; {}: none do."""
    world_size = layout.world_size
    other = math.prod(size for axis, size in sizes.items() if axis not in given)
    if world_size % other:
        return {}
    room, found = world_size // other, []
    own = STRATEGY_AXES.get(strategy or "", ())

    def extend(axes: tuple[str, ...], chosen: tuple[int, ...], left: int) -> None:
        if not axes:
            if has_rest or left == 1:
                changed = sum(size != given[axis] for axis, size in zip(given, chosen, strict=True))
                distance = sum(abs(math.log(size / given[axis])) for axis, size in zip(given, chosen, strict=True))
                found.append((changed, distance, chosen))
            return
        for size in _divisors(left):
            if axes[0] == "tp" and layout.ranks_per_node % size:
                continue
            if size > 1 or axes[0] not in own or given[axes[0]] == 1:
                extend(axes[1:], (*chosen, size), left // size)

    extend(tuple(given), (), room)
    return dict(zip(given, min(found)[2], strict=True)) if found else {}


def _divisors(number: int) -> list[int]:
    small = [size for size in range(1, math.isqrt(number) + 1) if number % size == 0]
    return sorted({*small, *(number // size for size in small)})


def _neighbours(wanted: int, sizes: list[int]) -> list[int]:
    """The ones of `sizes` next to `wanted`, below and above it."""
    below, above = [size for size in sizes if size < wanted], [size for size in sizes if size > wanted]
    return [*below[-1:], *above[:1]]
