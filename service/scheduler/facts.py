"""What the scheduler knows of nodes, jobs, teams and users: frozen records, in the words of the database. Pure.

Not for: what is derived from them and kept up to date (`service.scheduler.world`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final

from service.domain.checkpoints import CheckpointHome
from service.domain.gang_layout import GangLayout
from service.domain.reasons import Reason

SWITCH_LABEL: Final = "switch"
"""Label of a node that names its network switch."""


@dataclass(frozen=True, kw_only=True, slots=True)
class GPUView:
    """One GPU (or CPU slot) of a node."""

    index: int
    model: str
    link_group: str | None
    numa_node: int | None
    is_free: bool
    """Neither quarantined nor allocated to anything but the running jobs of the same world."""
    memory_bytes: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
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
    """Held by nothing but the running jobs of the same world."""
    free_memory_bytes: int
    shared_folder_id: str | None = None
    """The shared folder that it sees: nodes with the same id see the same one."""
    labels: Mapping[str, str] = field(default_factory=dict)
    changed_at: float = 0.0
    """When something last started or ended on it, epoch seconds."""
    blocked_until: float | None = None
    """When it is to get new work again, epoch seconds; None: nobody can tell, or it does now."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WaitingJob:
    """One job: what it asks of each node of its gang, and what is known of its time. Also of a running one."""

    id: int
    user_id: int = 0
    team_id: int = 0
    priority: int
    """Order within its team only; above TOP_PRIORITY it goes before all teams."""
    submitted_at: float
    layouts: tuple[GangLayout, ...]
    """All that it may start on, at least one; those in front are tried first: the largest."""
    gpu_type: str | None
    memory_bytes_per_node: int
    not_before: float | None = None
    """It does not start before: back-off after a failed start, or the date that it was given; epoch seconds."""
    home: CheckpointHome | None = None
    """Where its newest checkpoint lies: it resumes only there. None: it has none, any node will do."""
    gpu_memory_bytes: int | None = None
    """Least memory of each of its GPUs."""
    labels: tuple[tuple[str, str], ...] = ()
    """Labels that its nodes must have, sorted."""
    is_exclusive: bool = False
    """Nothing else runs on its nodes."""
    limit_seconds: float | None = None
    """Hard limit of its useful run, all attempts that count against it together."""
    served_seconds: float = 0.0
    """Useful run of its earlier attempts."""
    wait_began_at: float | None = None
    """Start of its present wait; None: at its submission."""
    is_preemptible: bool = False
    """It resumes from a checkpoint, so that stopping it loses little."""
    may_borrow: bool = False
    """It says that it resumes, though it may not have shown it yet: a script before its first checkpoint."""
    num_stops: int = 0
    """How often it was preempted or moved."""
    will_report: bool = False
    """It trains with our loop, which reports its progress."""
    measured_left: float | None = None
    """Seconds left by its last report, as of the end of its last run."""
    promoted_at: float | None = None
    """Since when it goes before all that are not promoted."""
    held_by: Reason | None = None
    """Why it must not start at all now: held, a dependency, a date."""

    @property
    def least(self) -> GangLayout:
        """The layout that asks least of the pool."""
        return self.layouts[-1]

    @property
    def waits_since(self) -> float:
        """Start of its present wait, epoch seconds."""
        return self.submitted_at if self.wait_began_at is None else self.wait_began_at

    @property
    def shape(self) -> Shape:
        """What decides whether it fits; equal shapes fit or do not fit alike."""
        asks_for_gpus = self.layouts[0].num_gpus > 0  # of no GPU, neither type nor memory matters
        return Shape(
            layouts=self.layouts,
            gpu_type=self.gpu_type if asks_for_gpus else None,
            gpu_memory_bytes=self.gpu_memory_bytes if asks_for_gpus else None,
            labels=self.labels,
            memory_bytes_per_node=self.memory_bytes_per_node,
            is_exclusive=self.is_exclusive,
            home=self.home,
        )

    def may_run_on(self, node: NodeView) -> bool:
        """Whether it finds its newest checkpoint there."""
        return self.home is None or self.home.is_seen_by(node.name, node.shared_folder_id)


TOP_PRIORITY: Final = 100
"""A priority above it goes before the jobs of all teams; an admin grants it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What a job asks of the pool."""

    layouts: tuple[GangLayout, ...]
    gpu_type: str | None
    gpu_memory_bytes: int | None
    labels: tuple[tuple[str, str], ...]
    memory_bytes_per_node: int
    is_exclusive: bool
    home: CheckpointHome | None

    @property
    def least_needs_shared_folder(self) -> bool:
        """Whether the nodes of its smallest layout must see one shared folder."""
        return self.layouts[-1].needs_shared_folder


@dataclass(frozen=True, kw_only=True)
class NodeShare:
    """What a gang takes of one node."""

    node_id: int
    gpu_indices: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class PlacedGang:
    """What a whole gang takes."""

    layout: GangLayout
    shares: tuple[NodeShare, ...]
    """One of each of its nodes, in the order of their node ranks."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Measured:
    """What a run last reported of itself."""

    left_seconds: float
    at: float
    """When, epoch seconds."""
    rate: float = 1.0
    """Seconds by which it shrinks in a second of run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EndedRatio:
    """Of a job that has ended: its real time over its limit, and whose it was."""

    ratio: float
    user_id: int
    team_id: int


@dataclass(frozen=True, kw_only=True, slots=True)
class RunningJob:
    """A job with GPUs, from its placement until all of them are free again."""

    job: WaitingJob
    gang: PlacedGang
    started_at: float
    """When it got its GPUs."""
    is_stopping: bool = False
    """It was asked to leave for another job: its GPUs can be promised, and come free by themselves."""
    is_leaving: bool = False
    """It was asked to leave for any other reason: it keeps its GPUs until it has gone, and may be first to get them
    back."""
    restore_seconds: float = 0.0
    """Of its run, what goes by before it is where its last one ended."""
    measured: Measured | None = None
    checkpointed_at: float | None = None
    """When its last durable checkpoint of this run was written."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Nomination:
    """A gang that is promised GPUs which are still being freed for it."""

    job_id: int
    gang: PlacedGang
    after: frozenset[int]
    """The jobs that have to leave first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Team:
    """A team's part of the pool. None: nothing is promised or forbidden."""

    id: int
    name: str
    quota_gpus: int | None = None
    """GPUs that it gets back whenever it asks for them."""
    quota_nodes: int | None = None
    """Whole nodes likewise, for gangs that take whole nodes."""
    cap_gpus: int | None = None
    """The most GPUs that it may hold."""


@dataclass(frozen=True, kw_only=True, slots=True)
class User:
    """A user's bounds."""

    id: int
    name: str = "USER"
    cap_gpus: int | None = None
    """The most GPUs that they may hold."""
