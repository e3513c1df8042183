"""When and where a blocked job will fit by the hard limits of those who run, and who may pass it meanwhile. Pure.

All that it needs counts: GPUs, CPUs, memory, one shared folder, nodes for itself. Promises read hard limits alone: a
job that may run past the reserved moment is kept off what is reserved.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from service.domain.gang_layout import GangLayout
from service.scheduler.facts import PlacedGang, WaitingJob
from service.scheduler.free_index import FreeIndex
from service.scheduler.jobs import FOREVER, Run
from service.scheduler.node import Node
from service.scheduler.placement import fits, gang_of, together
from service.scheduler.world import World

SLACK_CPUS: Final = 1e-6
"""What sums of CPUs may be off."""


class _Room:
    """What a node has to give at some moment."""

    __slots__ = ("cpus", "gpus", "memory_bytes", "node", "num_alone", "num_others", "unsure")

    def __init__(self, node: Node, gpus: int):
        self.node = node
        self.gpus = gpus
        self.cpus = node.cpus
        self.memory_bytes = node.memory_bytes
        self.num_others = len(node.runs) + len(node.nominated)
        self.num_alone = sum(run.job.is_exclusive for run in node.runs.values()) + sum(node.nominated.values())
        """Of the others: those that have the node to themselves."""
        self.unsure: list[tuple[Run, int]] = []
        """Runs without a limit that are taken to have left it, and their GPUs."""

    def leave(self, run: Run, gpus: int) -> None:
        """A run has left it."""
        if run.limit_end == FOREVER:
            self.unsure.append((run, gpus))
        self.gpus += gpus
        self.cpus += run.gang.layout.cpus_per_node
        self.memory_bytes += run.job.memory_bytes_per_node
        self.num_others -= 1
        self.num_alone -= run.job.is_exclusive

    def holds(self, job: WaitingJob, layout: GangLayout, count: int) -> bool:
        """Whether there is room for one share of the job, of `count` GPUs."""
        return (
            self.gpus >= count
            and self.cpus + SLACK_CPUS >= layout.cpus_per_node
            and self.memory_bytes >= job.memory_bytes_per_node
            and not (self.num_others if job.is_exclusive else self.num_alone)
        )

    def take(self, job: WaitingJob, layout: GangLayout, count: int) -> None:
        """A share of a job is there from now on."""
        self.gpus -= count
        self.cpus -= layout.cpus_per_node
        self.memory_bytes -= job.memory_bytes_per_node
        self.num_others += 1
        self.num_alone += job.is_exclusive

    def keep(self, job: WaitingJob, layout: GangLayout, count: int) -> None:
        """A share of a job is to be there. Runs that may go on for ever leave nothing to anybody else."""
        self.take(job, layout, count)
        for run, gpus in self.unsure:
            self.take(run.job, run.gang.layout, gpus)


@dataclass
class Reservation:
    """A moment, and what some nodes have to give then beside the job that it is made for."""

    at: float
    """Epoch seconds."""
    kept: dict[int, _Room]
    """The reserved nodes: what others may take of them beyond the moment."""

    def leaves_room(self, node: Node, job: WaitingJob, count: int) -> bool:
        """Whether a share of the job, of `count` GPUs, may be on the node beyond the moment."""
        room = self.kept.get(node.id)
        return room is None or room.holds(job, job.least, count)

    def take(self, gang: PlacedGang, job: WaitingJob) -> None:
        """The job has this gang beyond the moment."""
        for share in gang.shares:
            if (room := self.kept.get(share.node_id)) is not None:
                room.take(job, gang.layout, len(share.gpu_indices))


def latest_end(world: World, run: Run, now: float) -> float:
    """When a run ends by its hard limit; without one by the estimate, as nothing better is known."""
    return now + run.left(world.ratios, now) if run.limit_end == FOREVER else run.limit_end


def reserve(
    world: World, index: FreeIndex, job: WaitingJob, now: float, end_of: Callable[[Run], float]
) -> Reservation | None:
    """The first moment at which the job's least layout fits if all runs end when `end_of` says; None: never."""
    layout = job.least
    rooms = {
        node.id: _Room(node, index.free_mask(node).bit_count()) for node in index.nodes.values() if _is_home(job, node)
    }
    able = {node_id for node_id, room in rooms.items() if room.holds(job, layout, layout.gpus_per_node)}
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
        if len(able) >= layout.num_nodes:
            kept = _kept(rooms, [rooms[node_id] for node_id in able], job)
            if kept is not None:
                for room, count in kept:
                    room.keep(job, layout, count)
                at = now if place == 0 else max(now, runs[place - 1][0])
                return Reservation(at=at, kept={room.node.id: room for room, _ in kept})
        if place == len(runs) or runs[place][0] == float("inf"):
            return None
        end = runs[place][0]
        while place < len(runs) and (runs[place][0] <= end or runs[place][0] <= now):
            run = runs[place][3]
            for node_id, mask in run.masks:
                if (room_left := rooms.get(node_id)) is not None:
                    room_left.leave(run, (mask & index.mask_of(room_left.node)).bit_count())
                    if room_left.holds(job, layout, layout.gpus_per_node):
                        able.add(node_id)
            place += 1


def _kept(rooms: dict[int, _Room], able: list[_Room], job: WaitingJob) -> list[tuple[_Room, int]] | None:
    """The rooms that are reserved, and how many GPUs of each; None: of those that are able there are too few together.

    Whole nodes by lowest order; a part of a node by best fit.
    """
    layout = job.least
    share, num_nodes, rest = layout.gpus_per_node, layout.num_nodes, layout.rest_gpus
    if num_nodes == 1 and not rest and not layout.needs_shared_folder:
        return [(_best_fit(able), share)]
    able.sort(key=lambda room: room.node.order)
    groups = together(able, layout, lambda room: room.node.view)
    group = next((group for group in groups if len(group) >= num_nodes), None)
    if group is None:
        return None
    kept = [(room, share) for room in group[:num_nodes]]
    if rest:
        used = {room.node.id for room, _ in kept}
        others = [room for room in rooms.values() if room.node.id not in used and room.holds(job, layout, rest)]
        if not others:
            return None
        kept.append((_best_fit(others), rest))
    return kept


def _best_fit(rooms: Iterable[_Room]) -> _Room:
    return min(rooms, key=lambda room: (room.gpus, room.node.order))


def _is_home(job: WaitingJob, node: Node) -> bool:
    return job.home is None or job.may_run_on(node.view)


def find_beside(index: FreeIndex, job: WaitingJob, reservation: Reservation) -> PlacedGang | None:
    """A place that leaves what is reserved free at its moment, for a job that may run beyond it."""
    layout = job.least
    share, rest = layout.gpus_per_node, layout.rest_gpus

    def may_take(node: Node, count: int) -> bool:
        return fits(node, job, layout) and reservation.leaves_room(node, job, count)

    able = [node for node in index.best_fit(share) if may_take(node, share)]
    for nodes in together(able, layout, lambda node: node.view):
        if len(nodes) >= layout.num_nodes:
            taken = [(node, share) for node in nodes[: layout.num_nodes]]
            if not rest:
                return gang_of(index, layout, taken)
            used = {node.id for node, _ in taken}
            for node in index.best_fit(rest):
                if node.id not in used and may_take(node, rest):
                    return gang_of(index, layout, [*taken, (node, rest)])
    return None
