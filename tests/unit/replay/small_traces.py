"""Small traces and a small scheduler for the tests of a replay, written short."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from service.replay.gangs import layout_of
from service.replay.limits import Assumptions
from service.replay.run_record import RunRecord, Surroundings
from service.replay.simulate import simulate
from service.replay.traces import Trace, TraceJob, trace_of
from service.scheduler.facts import NodeShare, PlacedGang, WaitingJob
from service.scheduler.plan import Place, Plan, Stop

TRUE = Assumptions(limits="true", reporting_share=0.0)


def trace(*jobs: tuple[int, ...], teams: Sequence[str] = ()) -> Trace:
    """A trace of (submitted, duration, GPUs), named a, b, c …, each of the team at the same place in `teams`."""
    return trace_of(
        "small",
        [
            TraceJob(row, chr(ord("a") + row % 26), submitted, duration, gpus, teams[row] if teams else "")
            for row, (submitted, duration, gpus) in enumerate(jobs)
        ],
    )


class Fifo:
    """First come, first served on nodes of `size` GPUs; stops jobs only as told: {when: the rows to stop}."""

    def __init__(self, nodes: int = 1, size: int = 8, stops: Mapping[float, Sequence[int]] | None = None):
        self.size = size
        self.free = {(node, index) for node in range(1, nodes + 1) for index in range(size)}
        self.waiting: dict[int, WaitingJob] = {}
        self.running: dict[int, PlacedGang] = {}
        self.stops = dict(stops or {})
        self.told: list[tuple[Any, ...]] = []
        """What the engine was told, in order, with the time."""

    def arrived(self, job: WaitingJob, now: float) -> None:
        self.told.append((now, "arrived", job.id - 1))
        self.waiting[job.id] = job

    def ended(self, job_id: int, now: float, ratio: float | None) -> None:
        self.told.append((now, "ended", job_id - 1, ratio))
        self._release(job_id)

    def stopped(self, job_id: int, job: WaitingJob, now: float) -> None:
        self.told.append((now, "stopped", job_id - 1))
        self._release(job_id)
        self.waiting[job_id] = job

    def measured(self, job_id: int, left_seconds: float, now: float, rate: float) -> None:
        self.told.append((now, "measured", job_id - 1, left_seconds, rate))

    def next_timer(self, now: float) -> float | None:
        return min((at for at in self.stops if at > now), default=None)

    def decide(self, now: float) -> Plan:
        places = []
        for job_id, job in sorted(self.waiting.items()):
            gang = self._find(job)
            if gang is None:
                break
            del self.waiting[job_id]
            self.running[job_id] = gang
            places.append(Place(job_id=job_id, gang=gang))
        stops = [Stop(job_id=row + 1, for_job_id=0, why="told") for row in self.stops.pop(now, ())]
        return Plan(stops=stops, places=places, nominations=())

    def _find(self, job: WaitingJob) -> PlacedGang | None:
        layout = job.layouts[0]
        if layout.num_gpus > len(self.free):
            return None
        taken = sorted(self.free)[: layout.num_gpus]
        self.free -= set(taken)
        nodes = sorted({node for node, _ in taken})
        shares = tuple(NodeShare(node_id=at, gpu_indices=tuple(i for node, i in taken if node == at)) for at in nodes)
        return PlacedGang(layout=layout, shares=shares)

    def _release(self, job_id: int) -> None:
        gang = self.running.pop(job_id)
        self.free |= {(share.node_id, index) for share in gang.shares for index in share.gpu_indices}


def gang(*shares: tuple[int, tuple[int, ...]]) -> PlacedGang:
    """A gang of (node, GPU indices)."""
    count = sum(len(indices) for _, indices in shares)
    parts = tuple(NodeShare(node_id=node, gpu_indices=indices) for node, indices in shares)
    return PlacedGang(layout=layout_of(count, 8), shares=parts)


def run(
    jobs: Trace, engine: Any = None, *, nodes: int = 1, assumptions: Assumptions = TRUE, **surroundings: int
) -> RunRecord:
    """A replay under `engine`, by default first come, first served."""
    pool = Surroundings(nodes=nodes, **surroundings)
    return simulate(jobs, engine or Fifo(nodes), pool, assumptions, seed=1)
