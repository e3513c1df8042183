"""Which nodes and which GPUs a gang takes. Pure and deterministic.

A gang with several layouts takes the first that fits. Nodes: best fit (the fewest free GPUs left over), so that whole
nodes stay free for large gangs. GPUs of a node: from the smallest link group that holds them all, else from as few
groups as possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

from service.domain.gang_layout import GangLayout
from service.domain.spec import gpu_type_matches
from service.scheduler.world import GPUView, NodeView, WaitingJob

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """What a gang takes of one node."""

    node_id: int
    gpu_indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlacedGang:
    """What a whole gang takes."""

    layout: GangLayout
    shares: tuple[NodeShare, ...]
    """One of each of its nodes, in the order of their node ranks."""


@dataclass
class FreeNode:
    """What is left of a node while a plan is being made."""

    view: NodeView
    gpus: list[GPUView]
    cpus: float
    memory_bytes: int

    @classmethod
    def of(cls, view: NodeView) -> FreeNode:
        """The free part of a node."""
        return cls(view, [gpu for gpu in view.gpus if gpu.is_free], view.free_cpus, view.free_memory_bytes)

    def matching(self, gpu_type: str | None) -> list[GPUView]:
        """Free GPUs of a type; None: of any."""
        return [gpu for gpu in self.gpus if matches(gpu, gpu_type)]

    def holds(self, job: WaitingJob, layout: GangLayout) -> bool:
        """Whether one node's part of the gang fits here now."""
        return (
            job.may_run_on(self.view)
            and self.cpus >= layout.cpus_per_node
            and self.memory_bytes >= job.memory_bytes_per_node
            and len(self.matching(job.gpu_type)) >= layout.gpus_per_node
        )

    def take(self, job: WaitingJob, layout: GangLayout) -> NodeShare:
        """Take one node's part of the gang."""
        chosen = choose_gpus(self.matching(job.gpu_type), layout.gpus_per_node)
        self.gpus = [gpu for gpu in self.gpus if gpu.index not in chosen]
        self.cpus -= layout.cpus_per_node
        self.memory_bytes -= job.memory_bytes_per_node
        return NodeShare(node_id=self.view.id, gpu_indices=chosen)


def matches(gpu: GPUView, gpu_type: str | None) -> bool:
    """Whether a GPU is of the type asked for; None: any."""
    return gpu_type_matches(gpu_type, frozenset({gpu.model}))


def place_gang(free: Sequence[FreeNode], job: WaitingJob) -> PlacedGang | None:
    """The first layout of a gang that fits now, all or nothing: None when none does. Takes its shares from `free`."""
    holding: dict[tuple[int, float], list[FreeNode]] = {}  # many layouts ask the same of a node
    for layout in job.layouts:
        part = (layout.gpus_per_node, layout.cpus_per_node)
        if part not in holding:
            holding[part] = [node for node in free if node.view.blocked_by is None and node.holds(job, layout)]
        for nodes in together(holding[part], layout, lambda node: node.view):
            if len(nodes) >= layout.num_nodes:
                best = sorted(nodes, key=lambda node: (len(node.gpus), node.cpus, node.view.name))
                chosen = sorted(best[: layout.num_nodes], key=lambda node: node.view.name)
                return PlacedGang(layout=layout, shares=tuple(node.take(job, layout) for node in chosen))
    return None


def together(nodes: Sequence[T], layout: GangLayout, view_of: Callable[[T], NodeView]) -> list[Sequence[T]]:
    """Nodes that may be parts of one gang: all of them, or those that see the same shared folder where it needs one."""
    if not layout.needs_shared_folder:
        return [nodes]
    seeing: defaultdict[str, list[T]] = defaultdict(list)
    for node in nodes:
        folder = view_of(node).shared_folder_id
        if folder is not None:
            seeing[folder].append(node)
    return [seeing[folder] for folder in sorted(seeing)]


def choose_gpus(free: Sequence[GPUView], count: int) -> tuple[int, ...]:
    """`count` GPU indices out of `free`, kept close together."""
    groups: defaultdict[str, list[int]] = defaultdict(list)
    for gpu in sorted(free, key=lambda gpu: gpu.index):
        groups[gpu.link_group or f"numa {gpu.numa_node}"].append(gpu.index)
    fitting = [group for group in groups.values() if len(group) >= count]
    if fitting:
        return tuple(min(fitting, key=lambda group: (len(group), group[0]))[:count])
    by_size = sorted(groups.values(), key=lambda group: (-len(group), group[0]))
    return tuple(sorted([index for group in by_size for index in group][:count]))
