"""When and where a blocked job will fit by the hard limits of those who run, and who may pass it meanwhile. Pure.

Promises read hard limits alone: a job that may run past the reserved moment is kept off the reserved GPUs.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from service.scheduler.facts import PlacedGang, WaitingJob
from service.scheduler.free_index import FreeIndex
from service.scheduler.jobs import FOREVER, Run
from service.scheduler.node import Node
from service.scheduler.placement import fits, gang_of, together
from service.scheduler.world import World


@dataclass
class Reservation:
    """A moment and the GPUs of some nodes that a job is to have then."""

    at: float
    """Epoch seconds."""
    kept: dict[int, int]
    """GPUs reserved, by node."""
    free_then: dict[int, int]
    """GPUs that will be free at that moment on the reserved nodes."""

    def leaves_room(self, node: Node, count: int) -> bool:
        """Whether `count` GPUs of the node may be taken beyond the moment."""
        return node.id not in self.kept or self.free_then[node.id] - count >= self.kept[node.id]

    def take(self, gang: PlacedGang) -> None:
        """A gang holds its GPUs beyond the moment."""
        for share in gang.shares:
            if share.node_id in self.kept:
                self.free_then[share.node_id] -= len(share.gpu_indices)


def latest_end(world: World, run: Run, now: float) -> float:
    """When a run ends by its hard limit; without one by the estimate, as nothing better is known."""
    return now + run.left(world.ratios, now) if run.limit_end == FOREVER else run.limit_end


def reserve(
    world: World, index: FreeIndex, job: WaitingJob, now: float, end_of: Callable[[Run], float]
) -> Reservation | None:
    """The first moment at which the job's least layout fits if all runs end when `end_of` says; None: never."""
    layout = job.least
    share, num_nodes, rest = layout.gpus_per_node, layout.num_nodes, layout.rest_gpus
    free = {node.id: index.free_mask(node).bit_count() for node in index.nodes.values() if _is_home(job, node)}
    num_able = sum(count >= share for count in free.values())
    runs = sorted(
        (
            (end_of(run), run.started_at, run.id, run)
            for run in world.runs.values()
            if not run.is_stopping  # what they leave can be given away already
        ),
        key=lambda item: item[:3],
    )
    place = 0
    while True:
        if num_able >= num_nodes:
            kept = _kept(index, free, share, num_nodes, rest)
            if kept is not None:
                at = now if place == 0 else max(now, runs[place - 1][0])
                return Reservation(at=at, kept=kept, free_then={node_id: free[node_id] for node_id in kept})
        if place == len(runs) or runs[place][0] == float("inf"):
            return None
        end = runs[place][0]
        while place < len(runs) and (runs[place][0] <= end or runs[place][0] <= now):
            for node_id, mask in runs[place][3].masks:
                if node_id in free:
                    before = free[node_id]
                    free[node_id] = before + (mask & index.mask_of(index.nodes[node_id])).bit_count()
                    num_able += before < share <= free[node_id]
            place += 1


def _kept(index: FreeIndex, free: dict[int, int], share: int, num_nodes: int, rest: int) -> dict[int, int] | None:
    """Whole nodes by lowest order; a part of a node by best fit."""
    able = [index.nodes[node_id] for node_id, count in free.items() if count >= share]
    if num_nodes == 1 and not rest:
        best = min(able, key=lambda node: (free[node.id], node.order))
        return {best.id: share}
    able.sort(key=lambda node: node.order)
    kept = {node.id: share for node in able[:num_nodes]}
    if rest:
        others = [node_id for node_id, count in free.items() if node_id not in kept and count >= rest]
        if not others:
            return None
        kept[min(others, key=lambda node_id: (free[node_id], index.nodes[node_id].order))] = rest
    return kept


def _is_home(job: WaitingJob, node: Node) -> bool:
    return job.home is None or job.may_run_on(node.view)


def find_beside(index: FreeIndex, job: WaitingJob, reservation: Reservation) -> PlacedGang | None:
    """A place that leaves the reserved GPUs free at their moment, for a job that may run beyond it."""
    layout = job.least
    share, rest = layout.gpus_per_node, layout.rest_gpus
    able = [node for node in index.best_fit(share) if fits(node, job, layout) and reservation.leaves_room(node, share)]
    for nodes in together(able, layout, lambda node: node.view):
        if len(nodes) >= layout.num_nodes:
            taken = [(node, share) for node in nodes[: layout.num_nodes]]
            if not rest:
                return gang_of(index, layout, taken)
            used = {node.id for node, _ in taken}
            for node in index.best_fit(rest):
                if node.id not in used and fits(node, job, layout) and reservation.leaves_room(node, rest):
                    return gang_of(index, layout, [*taken, (node, rest)])
    return None
