"""One node while the pool is scheduled: which GPUs are held, leaving, promised and free, as bit masks. Pure.

A mask has bit i for the GPU at place i of the node's list. Not for: which node a gang takes (`placement`).
"""

from __future__ import annotations

import functools
from collections import defaultdict
from collections.abc import Iterable
from typing import TYPE_CHECKING

from service.domain.spec import gpu_type_matches
from service.scheduler.facts import GPUView, NodeView, Shape, WaitingJob

if TYPE_CHECKING:
    from service.scheduler.jobs import Run


class Node:
    """The state of one node. Changed by `World` alone."""

    __slots__ = (
        "available",
        "cpus",
        "freeing",
        "groups",
        "held",
        "id",
        "leaving",
        "memory_bytes",
        "nominated",
        "order",
        "promised",
        "runs",
        "size",
        "stamp",
        "usable",
        "view",
    )

    def __init__(self, view: NodeView, order: int, stamp: int):
        self.id = view.id
        self.view = view
        self.order = order
        """Place among all nodes, by name: ties go to the lowest."""
        self.size = len(view.gpus)
        self.usable = _mask(gpu.is_free for gpu in view.gpus)
        self.held = 0
        """By runs, those that are stopping included."""
        self.freeing = 0
        """Of those held: by runs that were told to stop."""
        self.promised = 0
        """To nominated jobs."""
        self.nominated: dict[int, bool] = {}
        """Jobs that are promised something here, also if it is no GPU, and whether they are to be alone."""
        self.available = self.usable
        """What can be given away now, if need be once those who are stopping have left."""
        self.cpus = view.free_cpus
        self.memory_bytes = view.free_memory_bytes
        """CPUs and memory that can be given away likewise."""
        self.runs: dict[int, Run] = {}
        """Runs that hold something here, by job, without those that are stopping."""
        self.leaving: dict[int, Run] = {}
        """Those that are stopping."""
        self.stamp = stamp
        """Rises with each change of what is available."""
        self.groups = _groups(view.gpus)

    @property
    def num_in_use(self) -> int:
        """GPUs held by runs that stay."""
        return (self.held & ~self.freeing).bit_count()

    def refresh(self) -> None:
        """Work out what is available."""
        self.available = self.usable & ~(self.held & ~self.freeing) & ~self.promised

    def choose(self, candidates: int, count: int) -> int:
        """`count` of the `candidates`, kept close together, those that nobody holds first."""
        if count == 0:
            return 0
        free = candidates & ~self.freeing
        if free != candidates and free.bit_count() >= count:
            candidates = free
        if candidates.bit_count() == count:
            return candidates
        if len(self.groups) == 1:
            return lowest_bits(candidates, count)
        return _choose_close(self.groups, candidates, count)

    def indices(self, mask: int) -> tuple[int, ...]:
        """The GPU indices of a mask."""
        if self.size and self.view.gpus[-1].index == self.size - 1:
            return _places(mask)
        return tuple(self.view.gpus[place].index for place in _places(mask))

    def mask_of(self, indices: tuple[int, ...]) -> int:
        """The mask of GPU indices; those that the node no longer has are left out."""
        if self.size and self.view.gpus[-1].index == self.size - 1:
            mask = 0
            for index in indices:
                mask |= 1 << index
            return mask & ((1 << self.size) - 1)
        places = {gpu.index: place for place, gpu in enumerate(self.view.gpus)}
        return _mask_of_places([places[index] for index in indices if index in places])


def matching_mask(view: NodeView, gpu_type: str | None, gpu_memory_bytes: int | None) -> int:
    """The GPUs of a node that are of the type and have the memory asked for."""
    if gpu_type is None and gpu_memory_bytes is None:
        return (1 << len(view.gpus)) - 1
    least = gpu_memory_bytes or 0
    return _mask(_matches(gpu_type, gpu.model) and gpu.memory_bytes >= least for gpu in view.gpus)


def has_labels(view: NodeView, shape: Shape | WaitingJob) -> bool:
    """Whether the node has all labels asked for."""
    return all(view.labels.get(name) == value for name, value in shape.labels)


@functools.lru_cache(maxsize=4096)
def _matches(gpu_type: str | None, model: str) -> bool:
    return gpu_type_matches(gpu_type, frozenset({model}))


def lowest_bits(mask: int, count: int) -> int:
    """The `count` lowest set bits of a mask that has at least as many."""
    chosen = 0
    for _ in range(count):
        bit = mask & -mask
        chosen |= bit
        mask ^= bit
    return chosen


@functools.lru_cache(maxsize=65_536)
def _places(mask: int) -> tuple[int, ...]:
    return tuple(place for place in range(mask.bit_length()) if mask >> place & 1)


def _mask(flags: Iterable[bool]) -> int:
    mask = 0
    for place, flag in enumerate(flags):
        if flag:
            mask |= 1 << place
    return mask


def _mask_of_places(places: list[int]) -> int:
    return sum(1 << place for place in places)


def _groups(gpus: tuple[GPUView, ...]) -> tuple[int, ...]:
    """The mask of each link group; GPUs without one are grouped by NUMA node."""
    groups: defaultdict[str, int] = defaultdict(int)
    for place, gpu in enumerate(gpus):
        groups[gpu.link_group or f"numa {gpu.numa_node}"] |= 1 << place
    return tuple(groups.values())


def _choose_close(groups: tuple[int, ...], candidates: int, count: int) -> int:
    """From the smallest group that holds them all, else from as few groups as possible."""
    parts = [part for group in groups if (part := group & candidates)]
    fitting = [part for part in parts if part.bit_count() >= count]
    if fitting:
        return lowest_bits(min(fitting, key=lambda part: (part.bit_count(), part & -part)), count)
    chosen = 0
    for part in sorted(parts, key=lambda part: (-part.bit_count(), part & -part)):
        missing = count - chosen.bit_count()
        chosen |= part if part.bit_count() <= missing else lowest_bits(part, missing)
        if chosen.bit_count() == count:
            break
    return chosen
