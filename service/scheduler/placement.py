"""Which nodes and which GPUs a gang takes of what can be given away. Pure and deterministic.

A gang with several layouts takes the first that fits. Nodes: best fit (the fewest free GPUs left over), so that whole
nodes stay free for large gangs; several nodes lie behind one switch where that can be. GPUs of a node: from the
smallest link group that holds them all, else from as few groups as possible.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

from service.domain.gang_layout import GangLayout
from service.scheduler.facts import SWITCH_LABEL, NodeShare, NodeView, PlacedGang, WaitingJob
from service.scheduler.free_index import FreeIndex
from service.scheduler.node import Node

T = TypeVar("T")
Taken = list[tuple[Node, int]]
"""Nodes, and how many GPUs of each."""


def fits(node: Node, job: WaitingJob, layout: GangLayout) -> bool:
    """Whether a node has the rest of what one share needs beside GPUs: CPUs, memory, the checkpoint, solitude."""
    return (
        node.cpus >= layout.cpus_per_node
        and node.memory_bytes >= job.memory_bytes_per_node
        and (job.home is None or job.may_run_on(node.view))
        and (not job.is_exclusive or not (node.runs or node.nominated))
        and (layout.gpus_per_node > 0 or not _is_for_one(node))
    )


def _is_for_one(node: Node) -> bool:
    """Whether somebody has the node, or will have it, to itself."""
    return any(run.job.is_exclusive for run in node.runs.values()) or any(node.nominated.values())


def find_gang(index: FreeIndex, job: WaitingJob, most_gpus: int | None = None) -> PlacedGang | None:
    """The first layout of a gang that fits now, all or nothing: None when none does. Changes nothing.

    `most_gpus`: larger layouts are passed over.
    """
    for layout in job.layouts:
        if layout.num_gpus > index.num_free or (most_gpus is not None and layout.num_gpus > most_gpus):
            continue
        taken = _find(index, job, layout)
        if taken is not None:
            return gang_of(index, layout, taken)
    return None


def _find(index: FreeIndex, job: WaitingJob, layout: GangLayout) -> Taken | None:
    share = layout.gpus_per_node
    if layout.num_nodes == 1 and not layout.rest_gpus and not layout.needs_shared_folder:
        later = None
        for node in index.best_fit(share):
            if fits(node, job, layout):
                if not node.freeing or (index.free_mask(node) & ~node.freeing).bit_count() >= share:
                    return [(node, share)]
                later = later or node
        return None if later is None else [(later, share)]
    able = [node for node in index.best_fit(share) if fits(node, job, layout)]
    able.sort(key=lambda node: (index.free_mask(node) & ~node.freeing).bit_count() < share)
    for nodes in together(able, layout, lambda node: node.view):
        if len(nodes) >= layout.num_nodes:
            chosen = behind_one_switch(nodes, layout.num_nodes, lambda node: node.view)
            taken = [(node, share) for node in chosen]
            if not layout.rest_gpus:
                return taken
            others = {node.id for node in chosen}
            for node in index.best_fit(layout.rest_gpus):
                if node.id not in others and fits(node, job, layout):
                    return [*taken, (node, layout.rest_gpus)]
    return None


def gang_of(index: FreeIndex, layout: GangLayout, taken: Taken, masks: dict[int, int] | None = None) -> PlacedGang:
    """The gang on these nodes. `masks`: where GPUs are chosen from; default: what can be given away."""
    shares = []
    for node, count in sorted(taken, key=lambda one: (-one[1], one[0].view.name)):
        mask = index.free_mask(node) if masks is None else masks[node.id]
        shares.append(NodeShare(node_id=node.id, gpu_indices=node.indices(node.choose(mask, count))))
    return PlacedGang(layout=layout, shares=tuple(shares))


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


def behind_one_switch(nodes: Sequence[T], count: int, view_of: Callable[[T], NodeView]) -> Sequence[T]:
    """`count` of the nodes, which come in order of preference: behind one switch if any has enough, else the first."""
    if count == 1 or not any(SWITCH_LABEL in view_of(node).labels for node in nodes):
        return nodes[:count]
    behind: defaultdict[str, list[T]] = defaultdict(list)
    for node in nodes:
        switch = view_of(node).labels.get(SWITCH_LABEL)
        if switch is not None:
            behind[switch].append(node)
    enough = [group for group in behind.values() if len(group) >= count]
    # The switch with the fewest to spare, so that a larger gang still finds one.
    return min(enough, key=len)[:count] if enough else _fewest_switches(behind, nodes, count)


def _fewest_switches(behind: dict[str, list[T]], nodes: Sequence[T], count: int) -> Sequence[T]:
    ordered: Iterable[list[T]] = sorted(behind.values(), key=len, reverse=True)
    labelled = [node for group in ordered for node in group]
    return (labelled if len(labelled) >= count else nodes)[:count]
