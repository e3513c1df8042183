"""Records about the pool: machines, usage, idle holders, the overview. Frozen, with the field names of REST.

Not for: jobs (`gangline.client.models`, whose `build` makes these too).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gangline.client.models import Progress
from gangline.client.queue_models import QueuedJob


@dataclass(frozen=True, kw_only=True)
class NodeGPU:
    """One device of a node. `job_id`: the job that holds it, None also for a private job of another team, which only
    `held` tells of; `quarantined`: why it is kept out of use.
    """

    index: int
    uuid: str = ""
    kind: str = "gpu"
    model: str | None = None
    memory_bytes: int | None = None
    job_id: int | None = None
    owner: str | None = None
    held: bool = False
    quarantined: str | None = None
    utilisation: float | None = None
    """Share of the time in which it works, 0 to 1; None: not known."""
    memory_used_bytes: int | None = None
    idle_since: datetime | None = None
    """None: it works, or nobody knows. A held one: no earlier than the ranks of its holder began to run."""

    @property
    def is_free(self) -> bool:
        """Whether a job could take it."""
        return self.job_id is None and not self.held and not self.quarantined


@dataclass(frozen=True, kw_only=True)
class Node:
    """A machine of the pool."""

    name: str
    state: str
    address: str = ""
    cpus: float = 0.0
    memory_bytes: int | None = None
    gpus: tuple[NodeGPU, ...] = ()
    cordoned: str | None = None
    """Why it gets no new work; None: it does."""
    cordon_until: datetime | None = None
    draining: bool = False
    labels: dict[str, Any] = field(default_factory=dict)
    last_heartbeat_at: datetime | None = None
    version: str | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class UsageRow:
    """GPU-hours of one user, team or week; what it was not asked by is None. CPU slots count as GPUs."""

    user: str | None = None
    team: str | None = None
    week: str | None = None
    """ISO week in UTC, such as `2026-W48`."""
    held_gpu_hours: float = 0.0
    busy_gpu_hours: float = 0.0
    """Of those held: GPU-hours in which the GPUs worked."""
    lost_gpu_hours: float = 0.0
    """Of those held: GPU-hours whose work a preemption threw away."""
    jobs: int = 0


@dataclass(frozen=True, kw_only=True)
class Usage:
    """Usage of a span of time: of all teams for an admin, else of one's own."""

    by: tuple[str, ...] = ()
    since: datetime | None = None
    until: datetime | None = None
    items: tuple[UsageRow, ...] = ()
    total: UsageRow = UsageRow()
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class GPUsOfNode:
    """GPUs by their indexes on one machine."""

    name: str
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True)
class IdleHolder:
    """A running job none of whose GPUs works. A private job of another team has neither id nor owner."""

    job_id: int | None = None
    name: str = ""
    owner: str | None = None
    team: str = ""
    gpus: int = 0
    nodes: tuple[GPUsOfNode, ...] = ()
    since: datetime | None = None
    idle_seconds: float = 0.0
    wasted_gpu_hours: float = 0.0
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class GoingJob:
    """A job that holds GPUs. A private job of another team has neither id nor owner; progress is for the team."""

    id: int | None = None
    name: str = ""
    owner: str | None = None
    team: str = ""
    state: str = ""
    gpus: int = 0
    started_at: datetime | None = None
    progress: Progress | None = None


@dataclass(frozen=True, kw_only=True)
class TeamShare:
    """What a team holds, is guaranteed, and may hold at most; None: nothing said."""

    name: str
    held_gpus: int = 0
    quota_gpus: int | None = None
    quota_nodes: int | None = None
    cap_gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class Overview:
    """The pool at a glance. `running` and `waiting` are the first few of `num_running` and `num_waiting`."""

    at: datetime | None = None
    nodes: tuple[Node, ...] = ()
    running: tuple[GoingJob, ...] = ()
    num_running: int = 0
    waiting: tuple[QueuedJob, ...] = ()
    num_waiting: int = 0
    num_gpus_waited_for: int = 0
    teams: tuple[TeamShare, ...] = ()
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
