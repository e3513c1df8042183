"""How many nodes a trace is replayed on. Pure.

Not for: what a job takes of them (`service.replay.gangs`).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

from service.replay.traces import Trace

MOST_LOAD: Final = 0.9
"""Offered load of a pool whose size nobody gave."""

KNOWN_NODES: Final = {
    "itp03.csv": 20,
    "itp04.csv": 68,
    "itp06.csv": 12,
    "itp07.csv": 36,
    "itp-pool-2w.csv": 144,
    "philly-3w.csv": 72,
}
"""Nodes of 8 GPUs for the public traces by which policies are compared, so that figures stay comparable."""
KNOWN_GPUS_PER_NODE: Final = 8


@dataclass(frozen=True)
class PoolShape:
    """The nodes of a pool by their GPUs."""

    sizes: tuple[tuple[int, int], ...]
    """(GPUs of a node, how many such nodes), the largest first; at least one."""

    @property
    def gpus_per_node(self) -> int:
        """GPUs of most of its nodes; of as many nodes of two sizes, the larger one."""
        return max(self.sizes, key=lambda size: size[1])[0]

    @property
    def is_even(self) -> bool:
        """Whether all nodes have as many GPUs."""
        return len(self.sizes) == 1

    def nodes_of(self, gpus_per_node: int) -> int:
        """How many nodes of `gpus_per_node` GPUs have as many GPUs as the pool, rounded; at least one."""
        return max(1, round(sum(gpus * count for gpus, count in self.sizes) / gpus_per_node))

    @property
    def text(self) -> str:
        """`8 x 8 + 2 x 4 GPUs`."""
        return " + ".join(f"{count} x {gpus}" for gpus, count in self.sizes) + " GPUs"


def offered_gpus(trace: Trace) -> float:
    """GPUs that the trace would keep busy, on average of its window, on a cluster without bounds."""
    end = trace.last_submission
    window = end - trace.first_submission
    if window <= 0:
        return 0.0
    return sum(job.gpus * min(job.duration, end - job.submitted_at) for job in trace.jobs) / window


def offered_load(trace: Trace, nodes: int, gpus_per_node: int) -> float:
    """Offered GPUs over those of the pool."""
    return offered_gpus(trace) / (nodes * gpus_per_node)


def least_nodes(trace: Trace, gpus_per_node: int) -> int:
    """Nodes below which the largest job of the trace could never start."""
    return max(-(-job.gpus // gpus_per_node) for job in trace.jobs)


def default_nodes(trace: Trace, gpus_per_node: int) -> int:
    """The published size for a public trace, else the fewest nodes with an offered load of at most 90 %."""
    known = KNOWN_NODES.get(trace.name.removesuffix(".gz"))
    if known is not None and gpus_per_node == KNOWN_GPUS_PER_NODE:
        return known
    return max(least_nodes(trace, gpus_per_node), math.ceil(offered_gpus(trace) / (MOST_LOAD * gpus_per_node)), 1)
