"""Whether the ranks that write a checkpoint have the whole model together: asked once, before the training starts.

On a folder that all nodes share they are all ranks. Without one each node writes a copy of its own, which a plan that
splits the model over nodes cannot make whole. Not for: whether the files are whole (`layout`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.distributed.tensor import DTensor

from trainer.checkpoint.errors import some_of
from trainer.checkpoint.state import GlobalNames
from trainer.failure import ConfigError


@dataclass(frozen=True, kw_only=True)
class Piece:
    """What a rank has of a tensor that is split: a box."""

    shape: tuple[int, ...]
    """Of the whole tensor."""
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]
    is_as_held: bool = True
    """Whether the rank's memory has those sizes. torch's formula for rows that tp and dp_shard both split is wrong for
    some uneven numbers (7 rows over 2 × 3 ranks): a checkpoint by it would mix rows up. Wherever it takes an offset
    wrong, it takes the size of another rank's piece wrong."""


@dataclass(frozen=True, kw_only=True)
class RankPart:
    """What a rank has of the model."""

    node_rank: int
    pieces: Mapping[str, Piece | None]
    """By global name; None: all of it."""


def part_of(values: Mapping[str, Any], node_rank: int) -> RankPart:
    """What is here of the model whose values (or those of them that are here) these are. No communication."""
    pieces = {name: _piece(value) if isinstance(value, DTensor) else None for name, value in values.items()}
    return RankPart(node_rank=node_rank, pieces=pieces)


def is_whole_on_each_node(parts: Sequence[RankPart], names: GlobalNames) -> bool:
    """Whether the ranks of each node have the whole model together."""
    return all(not incomplete(members, names) for members in _by_node(parts).values())


def check_copies(parts: Sequence[RankPart], names: GlobalNames, *, is_shared: bool) -> None:
    """Raise ConfigError unless each copy that is written can be whole. `parts` by rank. Pure.

    `is_shared`: the checkpoint folder is one for all nodes.
    """
    twisted = sorted({name for part in parts for name, one in part.pieces.items() if one and not one.is_as_held})
    if twisted:
        raise ConfigError(
            f"this plan splits {some_of(twisted)} by tp and by dp_shard in pieces of uneven sizes that a checkpoint "
            "cannot tell apart. Choose tp and dp_shard whose product divides the first dimension of these weights."
        )
    _check_together(parts, names)
    if is_shared or is_whole_on_each_node(parts, names):
        return
    lacking = {node: incomplete(members, names) for node, members in _by_node(parts).items()}
    node, missing = next((node, missing) for node, missing in lacking.items() if missing)
    raise ConfigError(
        f"the plan splits the model over nodes, so no node could write a whole checkpoint: the ranks of node {node} do "
        f"not have all of {some_of(missing)}. It needs a folder that all nodes share (start each agent with "
        "--shared-folder), or a plan that keeps a whole copy inside each node, such as hsdp."
    )


def _check_together(parts: Sequence[RankPart], names: GlobalNames) -> None:
    absent = incomplete(parts, names)
    unknown = sorted({name for part in parts for name in part.pieces if name not in names.descriptions})
    problems = [f"no rank has {some_of(absent)}, or not all of it"] if absent else []
    problems += [f"{some_of(unknown)} was not in it"] if unknown else []
    if problems:
        raise ConfigError(
            f"the ranks together do not have the model as it was before it was split: {'; '.join(problems)}. A "
            "checkpoint of them would not load. Use another plan, and report this one."
        )


def incomplete(parts: Sequence[RankPart], names: GlobalNames) -> list[str]:
    """Names of what these ranks do not have all of together."""
    return [
        name
        for name in names.descriptions
        if not _is_covered([one.pieces[name] for one in parts if name in one.pieces])
    ]


def _is_covered(pieces: Sequence[Piece | None]) -> bool:
    """Whether they make a whole. Pieces overlap only where they are the same one (torch checks that when it saves)."""
    if None in pieces:
        return True
    different = {piece for piece in pieces if piece is not None}
    return sum(math.prod(one.sizes) for one in different) == max(
        (math.prod(one.shape) for one in different), default=-1
    )


def _piece(tensor: DTensor) -> Piece:
    chunk = tensor.__create_chunk_list__()[0]
    return Piece(
        shape=tuple(tensor.shape),
        offsets=tuple(chunk.offsets),
        sizes=tuple(chunk.sizes),
        is_as_held=chunk.sizes == tensor.to_local().shape,
    )


def _by_node(parts: Sequence[RankPart]) -> dict[int, list[RankPart]]:
    return {
        node: [part for part in parts if part.node_rank == node] for node in sorted({one.node_rank for one in parts})
    }
