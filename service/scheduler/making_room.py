"""Making room for gangs of whole nodes where stopping for them does not pay: small jobs move, idle nodes are cleared.

Free GPUs that are scattered over nodes are gathered by moving the small jobs beside them to other nodes; nodes that
are three quarters idle are cleared. Pure.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from service.domain.gang_layout import GangLayout
from service.scheduler.facts import NodeShare, PlacedGang
from service.scheduler.jobs import Entry, Run
from service.scheduler.node import Node, has_labels, matching_mask
from service.scheduler.placement import together
from service.scheduler.queue import Lane
from service.scheduler.quota import Standing, are_borrowed, largest_node, may_stop
from service.scheduler.victims import Room, room_of
from service.scheduler.world import World

LEAST_LEFT_TO_MOVE_SECONDS: Final = 1800.0
CLEAR_SHARE: Final = 0.25
"""Of a gang's GPUs, how many may be in use where it is cleared a place."""


@dataclass(frozen=True, kw_only=True)
class Moves:
    """A place for a gang once small jobs have gone to other nodes."""

    gang: PlacedGang
    moves: tuple[tuple[Run, PlacedGang], ...]


def find_moves(world: World, lane: Lane, entry: Entry, now: float) -> Moves | None:
    """Empty just enough nodes by moving all that runs there to other nodes. All fit elsewhere, or nothing moves."""
    layout = entry.job.least
    index = lane.index
    if index.num_free < layout.num_gpus or world.num_freeing:
        return None
    size = largest_node(lane)
    eligible = [
        node
        for node in index.nodes.values()
        if index.free_mask(node)
        and all(_is_movable(world, run, size, now) for run in node.runs.values())
        and _fits_empty(lane, node, entry)
    ]
    chosen = _emptiest(eligible, layout)
    if not chosen:
        return None
    targets = _Targets(lane, {node.id for node in chosen})
    moves: list[tuple[Run, PlacedGang]] = []
    residents = {run.id: run for node in chosen for run in node.runs.values()}
    for run in sorted(residents.values(), key=lambda run: (-run.num_gpus, run.id)):
        gang = targets.take(run)
        if gang is None:
            return None
        moves.append((run, gang))
    room = room_of(lane, entry, list(zip(chosen, layout.shares, strict=True)), tuple(residents.values()))
    return Moves(gang=room.gang, moves=tuple(moves))


def find_cleared(world: World, lane: Lane, entry: Entry, standing: Standing, now: float) -> Room | None:
    """The nodes with fewest GPUs in use, if those in use are at most a quarter of the gang's and can all be stopped."""
    layout = entry.job.least
    size = largest_node(lane)
    index = lane.index
    if _least_in_use(lane, len(layout.shares)) > CLEAR_SHARE * layout.num_gpus:
        return None
    eligible = [
        node
        for node in index.nodes.values()
        if all(
            run.open_at <= now and run.num_gpus <= size and may_stop(world, lane, standing, run)
            for run in node.runs.values()
        )
        and _fits_empty(lane, node, entry)
    ]
    chosen = _emptiest(eligible, layout)
    if not chosen:
        return None
    victims = {run.id: run for node in chosen for run in node.runs.values()}
    if sum(run.num_gpus for run in victims.values()) > CLEAR_SHARE * layout.num_gpus:
        return None
    if not are_borrowed(world, lane, victims.values()):
        return None
    return room_of(lane, entry, list(zip(chosen, layout.shares, strict=True)), tuple(victims.values()))


def _least_in_use(lane: Lane, count: int) -> int:
    """GPUs in use on the `count` nodes with the most to give away: a bound that costs nothing."""
    size = largest_node(lane)
    in_use = 0
    for free in range(size, -1, -1):
        num_nodes = min(count, len(lane.index.buckets[free]))
        in_use += num_nodes * (size - free)
        count -= num_nodes
        if not count:
            return in_use
    return in_use


def _emptiest(nodes: list[Node], layout: GangLayout) -> list[Node]:
    """A node for each share of the gang, those with the fewest GPUs in use; none where there are not enough."""
    count = len(layout.shares)
    in_order = sorted(nodes, key=lambda node: (node.num_in_use, node.order))
    groups = [list(group[:count]) for group in together(in_order, layout, lambda node: node.view)]
    return next((group for group in groups if len(group) == count), [])


class _Targets:
    """Where small jobs may go: what is free on the other nodes, as moves use it up."""

    def __init__(self, lane: Lane, chosen: set[int]):
        self._nodes = [node for node in lane.index.nodes.values() if node.id not in chosen and node.available]
        self._free = {node.id: node.available for node in self._nodes}
        self._cpus = {node.id: node.cpus for node in self._nodes}
        self._memory = {node.id: node.memory_bytes for node in self._nodes}

    def take(self, run: Run) -> PlacedGang | None:
        """The fullest other node with room."""
        layout, job = run.gang.layout, run.job
        if layout.num_nodes != 1 or job.is_exclusive:
            return None
        count = layout.gpus_per_node
        able = [
            node
            for node in self._nodes
            if self._free[node.id].bit_count() >= count
            and self._cpus[node.id] >= layout.cpus_per_node
            and self._memory[node.id] >= job.memory_bytes_per_node
            and _same_kind(run, node)
            and (job.home is None or job.may_run_on(node.view))
        ]
        if not able:
            return None
        node = min(able, key=lambda node: (self._free[node.id].bit_count(), node.order))
        mask = node.choose(self._free[node.id], count)
        self._free[node.id] &= ~mask
        self._cpus[node.id] -= layout.cpus_per_node
        self._memory[node.id] -= job.memory_bytes_per_node
        return PlacedGang(layout=layout, shares=(NodeShare(node_id=node.id, gpu_indices=node.indices(mask)),))


def _same_kind(run: Run, node: Node) -> bool:
    """Whether the job may use any GPU of the node."""
    job = run.job
    may_use = matching_mask(node.view, job.gpu_type, job.gpu_memory_bytes)
    return has_labels(node.view, job) and may_use & node.usable == node.usable


def _is_movable(world: World, run: Run, size: int, now: float) -> bool:
    return (
        run.num_gpus < size
        and len(run.masks) == 1
        and run.open_at <= now
        and run.left(world.ratios, now) >= LEAST_LEFT_TO_MOVE_SECONDS
    )


def _fits_empty(lane: Lane, node: Node, entry: Entry) -> bool:
    job, layout = entry.job, entry.job.least
    return (
        not node.promised
        and lane.index.usable_count(node) >= layout.gpus_per_node
        and (job.home is None or job.may_run_on(node.view))
        and node.view.free_cpus >= layout.cpus_per_node
        and node.view.free_memory_bytes >= job.memory_bytes_per_node
    )
