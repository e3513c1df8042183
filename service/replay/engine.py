"""The production scheduler as the engine of a replay: its `World` on made-up nodes, and its `decide`. Pure.

Not for: events (`service.replay.simulate`).
"""

from __future__ import annotations

import dataclasses

from service.replay.run_record import Surroundings
from service.scheduler.facts import GPUView, NodeView, WaitingJob
from service.scheduler.plan import Plan, PolicyOptions, decide
from service.scheduler.policies import POLICIES
from service.scheduler.world import World


class ProductionEngine:
    """See `service.replay.simulate.Engine`."""

    def __init__(self, surroundings: Surroundings, policy: str, options: PolicyOptions):
        self.world = World(nodes=nodes_of(surroundings), order=POLICIES[policy].order)
        self._policy = policy
        self._options = dataclasses.replace(options, restore_seconds=surroundings.restore_seconds)

    def arrived(self, job: WaitingJob, now: float) -> None:
        """See `Engine`."""
        self.world.add_waiting(job, now)

    def ended(self, job_id: int, now: float, ratio: float | None) -> None:
        """See `Engine`."""
        self.world.ended(job_id, ratio)

    def stopped(self, job_id: int, job: WaitingJob, now: float) -> None:
        """See `Engine`."""
        self.world.stopped(job_id, job, now)

    def measured(self, job_id: int, left_seconds: float, now: float, rate: float) -> None:
        """See `Engine`."""
        self.world.measured(job_id, left_seconds, now, rate)

    def decide(self, now: float) -> Plan:
        """See `Engine`."""
        return decide(self.world, now, self._policy, self._options)

    def next_timer(self, now: float) -> float | None:
        """See `Engine`."""
        return self.world.next_timer(now)


def nodes_of(surroundings: Surroundings) -> list[NodeView]:
    """Nodes that are alike, numbered from 1."""
    gpus = tuple(
        GPUView(index=index, model="GPU", link_group=None, numa_node=None, is_free=True)
        for index in range(surroundings.gpus_per_node)
    )
    return [
        NodeView(
            id=number,
            name=f"node-{number:05d}",
            blocked_by=None,
            gpus=gpus,
            cpus=0.0,
            memory_bytes=0,
            free_cpus=0.0,
            free_memory_bytes=0,
        )
        for number in range(1, surroundings.nodes + 1)
    ]
