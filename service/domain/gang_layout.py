"""The layouts of a gang: as many GPUs on each of so many nodes. A job with a range of GPUs may start on any of several.

Pure. Not for: which of them a job asks for (`service.domain.spec`), nor which fits now (`service.scheduler`).
"""

from __future__ import annotations

import functools
import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

MAX_LAYOUTS: Final = 1_024
"""Of one job: each is planned at submission, and looked at in each pass of the scheduler."""


@dataclass(frozen=True, kw_only=True)
class GangLayout:
    """The same share on each of `num_nodes` nodes."""

    num_nodes: int
    gpus_per_node: int
    processes_per_node: int
    cpus_per_node: float
    needs_shared_folder: bool = False
    """Its nodes hold different parts of the model: they write one checkpoint together, into a folder that all see."""
    rest_gpus: int = 0
    """A smaller last share, on one more node: 12 GPUs on nodes of 8 are 8 + 4. Recorded jobs alone have it."""

    @property
    def num_gpus(self) -> int:
        """GPUs of the whole gang."""
        return self.num_nodes * self.gpus_per_node + self.rest_gpus

    @property
    def shares(self) -> list[int]:
        """GPUs on each of its nodes, the smaller last share at the end."""
        return [self.gpus_per_node] * self.num_nodes + ([self.rest_gpus] if self.rest_gpus else [])


def equal_shares(least: int, most: int, largest_share: int, num_nodes: int) -> Iterator[tuple[int, int]]:
    """Every (nodes, GPUs on each) that makes `least` to `most` GPUs on at most `num_nodes` nodes.

    The most GPUs come first, and of one number the fewest nodes. None gives more than `largest_share` GPUs.
    """
    found = [
        (nodes, share)
        for share in range(1, min(most, largest_share) + 1)
        for nodes in range(-(-least // share), min(most // share, num_nodes) + 1)
    ]
    yield from sorted(found, key=lambda layout: (-layout[0] * layout[1], layout[0]))


def most_compact(layouts: Sequence[GangLayout]) -> list[GangLayout]:
    """At most MAX_LAYOUTS of them, in their order: of each number of GPUs those on the fewest nodes.

    `layouts` come with the fewest nodes of each number first.
    """
    if len(layouts) <= MAX_LAYOUTS:
        return list(layouts)
    num_before: Counter[int] = Counter()
    places = []
    for layout in layouts:
        places.append(num_before[layout.num_gpus])
        num_before[layout.num_gpus] += 1
    kept = set(sorted(range(len(layouts)), key=lambda index: (places[index], index))[:MAX_LAYOUTS])
    return [layout for index, layout in enumerate(layouts) if index in kept]


@functools.lru_cache(maxsize=1024)
def easiest_by_share(layouts: tuple[GangLayout, ...]) -> tuple[GangLayout, ...]:
    """Of layouts that ask the same of a node, the one with the fewest nodes: if it does not fit, none of them does."""
    easiest: dict[tuple[int, float, bool], GangLayout] = {}
    for layout in layouts:
        share = (layout.gpus_per_node, layout.cpus_per_node, layout.needs_shared_folder)
        if share not in easiest or layout.num_nodes < easiest[share].num_nodes:
            easiest[share] = layout
    return tuple(easiest.values())


def layouts_to_json(layouts: Sequence[GangLayout]) -> str:
    """As stored with a job: it is read at each pass of the scheduler, so it is short."""
    rows = [
        [one.num_nodes, one.gpus_per_node, one.processes_per_node, one.cpus_per_node, int(one.needs_shared_folder)]
        for one in layouts
    ]
    return json.dumps(rows, separators=(",", ":"))


@functools.lru_cache(maxsize=256)
def layouts_from_json(text: str) -> tuple[GangLayout, ...]:
    """What `layouts_to_json` wrote."""
    return tuple(
        GangLayout(
            num_nodes=num_nodes,
            gpus_per_node=share,
            processes_per_node=processes,
            cpus_per_node=cpus,
            needs_shared_folder=bool(needs_shared_folder),
        )
        for num_nodes, share, processes, cpus, needs_shared_folder in json.loads(text)
    )


@functools.lru_cache(maxsize=4096)
def fixed_layout(
    num_nodes: int, gpus_per_node: int, processes_per_node: int, cpus_per_node: float
) -> tuple[GangLayout, ...]:
    """The layouts of a job that has just one."""
    only = GangLayout(
        num_nodes=num_nodes,
        gpus_per_node=gpus_per_node,
        processes_per_node=processes_per_node,
        cpus_per_node=cpus_per_node,
    )
    return (only,)


def layouts_of(
    stored: str | None, num_nodes: int, gpus_per_node: int, processes_per_node: int, cpus_per_node: float
) -> tuple[GangLayout, ...]:
    """All that a job may start on, the one to be tried first in front.

    `stored` is the text of `layouts_to_json`, None for a job of one size; the others are of its largest layout.
    """
    if stored is None:
        return fixed_layout(num_nodes, gpus_per_node, processes_per_node, cpus_per_node)
    return layouts_from_json(stored)
