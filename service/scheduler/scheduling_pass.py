"""One pass over the pool: what was decided so far, and the one place that changes the world for it. Pure.

Not for: the order of the queue and who is stopped (`service.scheduler.policies`).
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Final

from service.scheduler.facts import PlacedGang, WaitingJob
from service.scheduler.jobs import FOREVER, Entry, Run
from service.scheduler.queue import Lane
from service.scheduler.world import World

PREEMPTION_KINDS: Final = ("all", "reclaim_only", "none")


@dataclass(frozen=True, kw_only=True)
class PolicyOptions:
    """What an admin sets of a policy."""

    preemption: str = "all"
    """`all`: jobs are stopped where it pays; `reclaim_only`: only to give a team its quota back; `none`: never."""
    restore_seconds: float = 0.0
    """What a stopped job is taken to need at its next start before it goes on."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Stop:
    """Ask this running job to write a checkpoint and leave."""

    job_id: int
    for_job_id: int
    why: str
    """`less_time_left`, `promoted`, `reclaim`, `clear` or `move`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Start this job with this gang."""

    job_id: int
    gang: PlacedGang


@dataclass(frozen=True, kw_only=True, slots=True)
class Nominate:
    """Keep these GPUs for this job: it starts on exactly them once the jobs of `after` have left."""

    job_id: int
    gang: PlacedGang
    after: frozenset[int]


@dataclass(frozen=True, kw_only=True, slots=True)
class Refusal:
    """Why the jobs of a lane do not start now: a code of `service.domain.reasons` and its numbers."""

    lane: Lane
    code: str
    entry: Entry
    """The job that was looked at; those behind it in the lane wait for the same."""
    numbers: dict[str, Any]
    num_given: tuple[int, int] = (0, 0)
    """How many places and nominations had been given before: to jobs ahead of it."""


@dataclass
class Pass:
    """A pass in the making."""

    world: World
    now: float
    options: PolicyOptions
    stops: list[Stop] = field(default_factory=list)
    places: list[Place] = field(default_factory=list)
    nominations: list[Nominate] = field(default_factory=list)
    refusals: list[Refusal] = field(default_factory=list)

    @functools.cached_property
    def num_protected(self) -> int:
        """Runs that cannot be stopped yet, and could later; without those that this pass has started."""
        return sum(self.now < run.open_at < FOREVER and run.started_at < self.now for run in self._runs_that_stay)

    @functools.cached_property
    def num_open(self) -> int:
        """Runs that could be stopped now."""
        return sum(run.open_at <= self.now for run in self._runs_that_stay)

    @property
    def _runs_that_stay(self) -> Iterator[Run]:
        return (run for run in self.world.runs.values() if not run.is_stopping)

    def give(self, entry: Entry, gang: PlacedGang) -> None:
        """Let a waiting job have this gang: at once, or when those who hold it have left."""
        after = self.holders_of(gang, entry.job)
        if after:
            self._nominate(entry.id, gang, after)
        else:
            self._start(entry, gang)

    def start_ready(self) -> None:
        """Start the nominated jobs whose GPUs have come free."""
        for nomination in self.world.ready_nominations():
            self._start(self.world.nominated[nomination.job_id], nomination.gang)

    def stop(self, run: Run, entry: Entry, why: str) -> None:
        """Ask a running job to leave for a waiting one."""
        self.world.begin_stop(run.id)
        self.stops.append(Stop(job_id=run.id, for_job_id=entry.id, why=why))

    def move(self, run: Run, entry: Entry, gang: PlacedGang) -> None:
        """Ask a running job to go on elsewhere, to make room for a waiting one."""
        self.stop(run, entry, "move")
        self._nominate(run.id, gang, self.holders_of(gang, run.job) | {run.id})

    def refuse(self, lane: Lane, entry: Entry, code: str, **numbers: Any) -> None:
        """Note why a lane's next job does not start."""
        num_given = (len(self.places), len(self.nominations))
        self.refusals.append(Refusal(lane=lane, code=code, entry=entry, numbers=numbers, num_given=num_given))

    def holders_of(self, gang: PlacedGang, job: WaitingJob) -> frozenset[int]:
        """The jobs that have to leave before this one can start there."""
        holders: set[int] = set()
        if not self.world.num_freeing:
            return frozenset()
        layout = gang.layout
        for share in gang.shares:
            node = self.world.nodes[share.node_id]
            if not node.leaving:
                continue
            mask = node.mask_of(share.gpu_indices)
            cpus_kept = sum(run.gang.layout.cpus_per_node for run in node.leaving.values())
            memory_kept = sum(run.job.memory_bytes_per_node for run in node.leaving.values())
            needs_all = (
                job.is_exclusive
                or node.cpus - cpus_kept < layout.cpus_per_node
                or node.memory_bytes - memory_kept < job.memory_bytes_per_node
            )
            for run in node.leaving.values():
                if (
                    needs_all
                    or run.job.is_exclusive
                    or any(node_id == node.id and held & mask for node_id, held in run.masks)
                ):
                    holders.add(run.id)
        return frozenset(holders)

    def _start(self, entry: Entry, gang: PlacedGang) -> None:
        restore_seconds = self.options.restore_seconds if entry.job.num_stops else 0.0
        self.world.start(entry.id, gang, self.now, restore_seconds=restore_seconds)
        self.places.append(Place(job_id=entry.id, gang=gang))

    def _nominate(self, job_id: int, gang: PlacedGang, after: frozenset[int]) -> None:
        self.world.nominate(job_id, gang, after)
        self.nominations.append(Nominate(job_id=job_id, gang=gang, after=after))
