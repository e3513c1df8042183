"""The scheduler's view of the pool as frozen data: nodes with their free GPUs, and the waiting jobs in order. Pure."""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

from service.domain.checkpoints import CheckpointHome
from service.domain.gang_layout import GangLayout


@dataclass(frozen=True, kw_only=True)
class GPUView:
    """One GPU (or CPU slot) of a node."""

    index: int
    model: str
    link_group: str | None
    numa_node: int | None
    is_free: bool
    """Neither allocated nor quarantined."""


@dataclass(frozen=True, kw_only=True)
class NodeView:
    """One node as the scheduler sees it."""

    id: int
    name: str
    blocked_by: str | None
    """Why it gets no new work (`unreachable`, `cordoned: …`), or None."""
    gpus: tuple[GPUView, ...]
    cpus: float
    memory_bytes: int
    free_cpus: float
    free_memory_bytes: int
    shared_folder_id: str | None = None
    """The shared folder that it sees: nodes with the same id see the same one."""


@dataclass(frozen=True, kw_only=True)
class WaitingJob:
    """One waiting job: what it asks of each node of its gang."""

    id: int
    team_id: int = 0
    priority: int
    """Order within its team only."""
    submitted_at: float
    layouts: tuple[GangLayout, ...]
    """All that it may start on, at least one; those in front are tried first: the largest."""
    gpu_type: str | None
    memory_bytes_per_node: int
    not_before: float | None = None
    """Back-off after a failed start, epoch seconds."""
    home: CheckpointHome | None = None
    """Where its newest checkpoint lies: it resumes only there. None: it has none, any node will do."""

    @property
    def least(self) -> GangLayout:
        """The layout that asks least of the pool."""
        return self.layouts[-1]

    @property
    def shape(self) -> tuple[tuple[GangLayout, ...], str | None, int, CheckpointHome | None]:
        """What decides whether it fits; equal shapes fit or do not fit alike."""
        return (self.layouts, self.gpu_type, self.memory_bytes_per_node, self.home)

    def may_run_on(self, node: NodeView) -> bool:
        """Whether it finds its newest checkpoint there."""
        return self.home is None or self.home.is_seen_by(node.name, node.shared_folder_id)


@dataclass(frozen=True, kw_only=True)
class World:
    """Everything `plan` may look at."""

    nodes: tuple[NodeView, ...]
    waiting: tuple[WaitingJob, ...]


def queue_order(jobs: Sequence[WaitingJob]) -> list[WaitingJob]:
    """First come, first served over the whole pool; within a team its priorities decide who takes the team's next turn.

    So a priority moves a job ahead of its own team's others and never ahead of another team. Ties go by id: the same
    world gives the same plan.
    """
    turns = sorted(jobs, key=lambda job: (job.submitted_at, job.id))
    by_team: defaultdict[int, list[WaitingJob]] = defaultdict(list)
    for job in turns:
        by_team[job.team_id].append(job)
    next_of = {team: iter(sorted(own, key=lambda job: -job.priority)) for team, own in by_team.items()}
    return [next(next_of[job.team_id]) for job in turns]
