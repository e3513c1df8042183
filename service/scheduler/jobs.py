"""Jobs while the pool is scheduled: `Entry` of the queue and `Run` on nodes, and what follows. Pure."""

from __future__ import annotations

from typing import Final

from service.scheduler.estimates import Ratios, left_of_running, limit_end
from service.scheduler.facts import PlacedGang, RunningJob, WaitingJob

FOREVER: Final = float("inf")
MAX_STOPS: Final = 15
"""After so many preemptions a job is left alone."""
FIRST_PROTECTION_SECONDS: Final = 600.0
LONGEST_PROTECTION_SECONDS: Final = 12 * 3600.0
PROMOTION_SECONDS: Final = 24 * 3600.0
PROMOTION_LIMITS: Final = 4.0
"""A job is promoted after so many times what is left of its limit, and never before PROMOTION_SECONDS."""
PATIENCE_SECONDS: Final = 300.0
PATIENCE_SHARE: Final = 0.1


def protection_seconds(num_stops: int) -> float:
    """How long a run cannot be stopped for others: it doubles with each time that the job was."""
    return min(LONGEST_PROTECTION_SECONDS, FIRST_PROTECTION_SECONDS * 2.0 ** min(num_stops, 16))


def promotion_time(job: WaitingJob) -> float:
    """When the job is promoted if it still waits in the same wait."""
    if job.promoted_at is not None:
        return job.promoted_at
    limit_left = 0.0 if job.limit_seconds is None else job.limit_seconds - job.served_seconds
    return job.waits_since + max(PROMOTION_SECONDS, PROMOTION_LIMITS * limit_left)


class Entry:
    """A waiting job in the queue."""

    __slots__ = ("id", "is_promoted", "job", "lane", "left", "num_gpus", "patient_at", "promoted_at", "turn")

    def __init__(self, job: WaitingJob, left: float, now: float):
        self.id = job.id
        self.job = job
        self.left = left
        """Seconds of run that it needs, as when its wait began."""
        self.num_gpus = job.least.num_gpus
        self.patient_at = job.waits_since + min(PATIENCE_SECONDS, left * PATIENCE_SHARE)
        """From then on others may be stopped for it."""
        self.promoted_at = promotion_time(job)
        self.is_promoted = self.promoted_at <= now
        self.turn: tuple[float, ...] = ()
        """Its place in the order of the policy: the smallest comes first."""
        self.lane: object = None


class Run:
    """A job that holds GPUs."""

    __slots__ = (
        "checkpointed_at",
        "counted",
        "gang",
        "id",
        "is_leaving",
        "is_promoted",
        "is_stopping",
        "job",
        "limit_end",
        "masks",
        "measured",
        "num_gpus",
        "open_at",
        "restore_seconds",
        "started_at",
        "useful_since",
    )

    def __init__(self, facts: RunningJob, masks: tuple[tuple[int, int], ...]):
        job = facts.job
        self.id = job.id
        self.job = job
        self.gang: PlacedGang = facts.gang
        self.masks = masks
        """(node id, mask of the GPUs held there)."""
        self.num_gpus = facts.gang.layout.num_gpus
        self.counted = (self.num_gpus, 0)
        """GPUs and whole nodes that it takes from others, as counted for its team."""
        self.started_at = facts.started_at
        self.restore_seconds = facts.restore_seconds
        self.useful_since = facts.started_at + facts.restore_seconds
        self.is_stopping = facts.is_stopping
        self.is_leaving = facts.is_leaving
        self.measured = facts.measured
        self.checkpointed_at = facts.checkpointed_at
        self.is_promoted = job.promoted_at is not None
        self.limit_end = limit_end(job, self.useful_since)
        may_be_asked = not (self.is_promoted or self.is_leaving)
        can_be_stopped = job.is_preemptible and job.num_stops < MAX_STOPS and may_be_asked
        self.open_at = facts.started_at + protection_seconds(job.num_stops) if can_be_stopped else FOREVER
        """From then on it may be stopped for others."""

    def left(self, ratios: Ratios, now: float) -> float:
        """Seconds of run that it still needs."""
        return left_of_running(self.job, self.measured, self.useful_since, ratios, now)

    def loss(self, now: float) -> float:
        """GPU-seconds that stopping it now would lose: since its last durable checkpoint, and the next restore."""
        since = self.useful_since if self.checkpointed_at is None else self.checkpointed_at
        return self.num_gpus * (max(0.0, now - since) + self.restore_seconds)

    def mask_on(self, node_id: int) -> int:
        """The GPUs that it holds on a node."""
        for held_on, mask in self.masks:
            if held_on == node_id:
                return mask
        return 0

    def facts(self) -> RunningJob:
        """As a record."""
        return RunningJob(
            job=self.job,
            gang=self.gang,
            started_at=self.started_at,
            is_stopping=self.is_stopping,
            is_leaving=self.is_leaving,
            restore_seconds=self.restore_seconds,
            measured=self.measured,
            checkpointed_at=self.checkpointed_at,
        )
