"""How many nodes a trace is replayed on. Pure.

Not for: what a job takes of them (`service.replay.gangs`).
"""

from __future__ import annotations

import math
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
