"""Which part of the data is this rank's: for iterable datasets, which shard themselves.

A map-style dataset never needs it: the loader hands each rank its samples.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TypeVar

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class Shard:
    """Part `index` of `count` equal parts."""

    index: int
    count: int

    def of(self, items: Iterable[Item]) -> Iterator[Item]:
        """Every `count`-th item, beginning with number `index`: files of a folder, rows of a stream."""
        return islice(items, self.index, None, self.count)


def shard(environment: Mapping[str, str] | None = None) -> Shard:
    """This rank's part, by RANK and WORLD_SIZE of `environment` (None: of this process). Without them, all of it.

    Raises ValueError for variables that make no part.
    """
    variables = os.environ if environment is None else environment
    rank, world_size = variables.get("RANK", "0"), variables.get("WORLD_SIZE", "1")
    if not (rank.isdecimal() and world_size.isdecimal() and int(rank) < int(world_size)):
        raise ValueError(f"RANK is {rank!r} and WORLD_SIZE {world_size!r}: a rank is a number below the world size.")
    return Shard(index=int(rank), count=int(world_size))
