"""A plan in words: which ranks do what, how long they wait for each other, what they send. Pure.

Not for: bytes (`trainer.plan.estimate`).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from trainer.plan.axes import AXES, ParallelPlan, RankLayout
from trainer.plan.parallel_rules import product_of
from trainer.plan.schedules import bubble_of
from trainer.plan.split import rank_of_stage, stage_ids

MAX_ROWS: Final = 12
"""Rows of the table of ranks; of more, the first and the last are shown."""


@dataclass(frozen=True, kw_only=True)
class Collective:
    """What the ranks of a group do together."""

    axis: str
    """The group: ranks that differ on this axis alone; `world`: all ranks."""
    kind: str
    """all-reduce, all-gather, reduce-scatter or send."""
    what: str
    times: int
    """In a step, for each `of`."""
    of: str = "step"


def collectives_of(plan: ParallelPlan) -> tuple[Collective, ...]:
    """What is sent in a step, by kind, without what tells of loss and stopping."""
    return tuple(_collectives(plan))


def describe_plan(plan: ParallelPlan, layout: RankLayout) -> list[str]:
    """The lines that `gang check` prints of a plan."""
    if plan.strategy == "auto":
        return [f"auto on {_on(layout)}: the ranks choose the plan when they know the model"]
    lines = [f"{plan.strategy} on {_on(layout)}: {product_of(plan)}"]
    if plan.world_size > 1:
        lines += ["", *_table(plan, layout), "", *_groups(plan)]
    parts = [f"{plan.grad_accum_steps} gradient accumulation parts"] if plan.grad_accum_steps > 1 else []
    if plan.pp > 1:
        stages = f"{plan.num_stages} stages{f' cut at {list(plan.cut_points)}' if plan.cut_points else ''}"
        micro = f"{plan.micro_batches} micro-batch{'es' if plan.micro_batches > 1 else ''}"
        parts = [plan.schedule, stages, micro, f"bubble {bubble_of(plan):.1%}", *parts]
    if parts:
        lines += ["", ", ".join(parts)]
    sent = collectives_of(plan)
    if sent:
        lines += ["", "sent in each step:", *(f"  {_in_words(one)}" for one in sent)]
    return lines


def _on(layout: RankLayout) -> str:
    ranks = f"{layout.world_size} rank{'s' if layout.world_size > 1 else ''}"
    return f"{ranks} of {layout.num_nodes} nodes" if layout.num_nodes > 1 else f"{ranks} of one node"


# --- Who does what ---------------------------------------------------------------------------------------------------


def _table(plan: ParallelPlan, layout: RankLayout) -> Iterator[str]:
    """A row for each run of ranks on one node that work on the same stages; with tensor parallelism also on the same
    samples."""
    rows = [("node", "ranks", "stages", "data part")]
    group = plan.tp if plan.tp > 1 else math.gcd(layout.ranks_per_node, plan.data_parallel_size)
    rows += [_row(plan, layout, first, group) for first in range(0, plan.world_size, group)]
    if len(rows) > MAX_ROWS + 1:
        hidden = len(rows) - 1 - MAX_ROWS
        rows = [*rows[:MAX_ROWS], ("…", f"{hidden} more", "", ""), rows[-1]]
    shown = [index for index in range(4) if index != 2 or plan.pp > 1]
    widths = {index: max(len(row[index]) for row in rows) for index in shown}
    for row in rows:
        yield "  " + "  ".join(row[index].ljust(widths[index]) for index in shown).rstrip()


def _row(plan: ParallelPlan, layout: RankLayout, first: int, size: int) -> tuple[str, str, str, str]:
    data_size = plan.data_parallel_size
    pp_rank = first // (data_size * plan.tp)
    parts = [rank // plan.tp % data_size for rank in (first, first + size - 1)]
    stages = ", ".join(map(str, stage_ids(plan, pp_rank)))
    return str(first // layout.ranks_per_node), _span(first, first + size - 1), stages, _span(*parts)


def _groups(plan: ParallelPlan) -> Iterator[str]:
    """Of each axis in use the first group, as an example, and how many there are."""
    for index, axis in enumerate(AXES):
        size = getattr(plan, axis)
        if size > 1:
            stride = 1
            for inner in AXES[index + 1 :]:
                stride *= getattr(plan, inner)
            ranks = [number * stride for number in range(size)]
            number = plan.world_size // size
            others = f", the first of {number} groups" if number > 1 else ""
            yield f"{axis} {size}: ranks {_listed(ranks)}{others}"


def _listed(ranks: Sequence[int]) -> str:
    told = [str(rank) for rank in ranks]
    return ", ".join(told if len(told) <= 8 else [*told[:4], "…", told[-1]])


def _span(first: int, last: int) -> str:
    return str(first) if first == last else f"{first}-{last}"


# --- What is sent ----------------------------------------------------------------------------------------------------


def _collectives(plan: ParallelPlan) -> Iterator[Collective]:
    accum = plan.grad_accum_steps
    parts = accum * plan.micro_batches
    if plan.pp > 1:
        crossed = sum(
            rank_of_stage(plan, stage) != rank_of_stage(plan, stage + 1) for stage in range(plan.num_stages - 1)
        )
        yield Collective(
            axis="pp", kind="send", what="activations to the next stage", times=crossed * parts, of="pipeline"
        )
        yield Collective(axis="pp", kind="send", what="their gradients back", times=crossed * parts, of="pipeline")
    if plan.tp > 1:
        of = "pair of split layers"
        yield Collective(axis="tp", kind="all-reduce", what="activations", times=parts, of=of)
        yield Collective(axis="tp", kind="all-reduce", what="gradients of activations", times=parts, of=of)
    if plan.dp_shard > 1:
        # Outside a pipeline parameters are given back after forward, and gathered again for backward.
        gathers = accum if plan.pp > 1 else 2 * accum
        yield Collective(axis="dp_shard", kind="all-gather", what="parameters", times=gathers, of="layer")
        yield Collective(axis="dp_shard", kind="reduce-scatter", what="gradients", times=accum, of="layer")
    if plan.dp_replicate > 1 and plan.dp_shard > 1:
        yield Collective(axis="dp_replicate", kind="all-reduce", what="shards of gradients", times=accum, of="layer")
    elif plan.dp_replicate > 1:
        yield Collective(axis="dp_replicate", kind="all-reduce", what="gradients", times=1, of="bucket of 25 MiB")


def _in_words(one: Collective) -> str:
    times = "once" if one.times == 1 else f"{one.times} times"
    return f"{one.axis}: {one.kind} of {one.what}, {times} per {one.of}"
