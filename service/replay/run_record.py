"""What is written down of one replay: when each job started and ended, every run, and GPU-seconds used and left idle.

Pure. Not for: figures made from it (`service.replay.metrics`).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple, Self

from service.replay.traces import Trace
from service.scheduler.facts import NodeShare


@dataclass(frozen=True, kw_only=True)
class Surroundings:
    """The pool of a replay, and what stopping a job costs there."""

    nodes: int
    gpus_per_node: int = 8
    grace_seconds: int = 0
    """How long a preempted job runs on before its GPUs are free; its work of that time counts."""
    restore_seconds: int = 60
    """At the beginning of each run but a job's first, in which nothing gets done."""

    @property
    def gpus(self) -> int:
        """Of the whole pool."""
        return self.nodes * self.gpus_per_node


class RunInterval(NamedTuple):
    """One run of a job, from its start until its GPUs are free."""

    place: int
    """Place of the job in the trace."""
    started_at: float
    left_at: float
    restore_seconds: float
    shares: tuple[NodeShare, ...]


@dataclass(kw_only=True)
class RunRecord:
    """Filled by the event loop; lists have one entry per job, in the order of the trace."""

    trace: Trace
    surroundings: Surroundings
    first_started_at: list[float | None]
    ended_at: list[float | None]
    num_stops: list[int]
    """Preemptions of each job, moves included."""
    runs: list[RunInterval] = field(default_factory=list)
    window_gpu_seconds: float = 0.0
    """GPU-seconds run, restores included. This and what follows: between the first and the last submission."""
    idle_gpu_seconds: float = 0.0
    """GPU-seconds that were free and that waiting jobs asked for."""
    waiting_seconds: float = 0.0
    """Time during which at least one job waited."""
    held_gpus: int = 0
    waiting_gpus: int = 0
    at: float = 0.0

    @classmethod
    def of(cls, trace: Trace, surroundings: Surroundings) -> Self:
        """An empty record."""
        count = len(trace.jobs)
        return cls(
            trace=trace,
            surroundings=surroundings,
            first_started_at=[None] * count,
            ended_at=[None] * count,
            num_stops=[0] * count,
            at=trace.first_submission,
        )

    @property
    def free_gpus(self) -> int:
        """GPUs that no job holds now."""
        return self.surroundings.gpus - self.held_gpus

    def advance(self, now: float) -> None:
        """Time passes until `now`, with what is held and waiting as it is."""
        seconds = min(now, self.trace.last_submission) - self.at
        if seconds > 0:
            self.window_gpu_seconds += self.held_gpus * seconds
            if self.waiting_gpus:
                self.waiting_seconds += seconds
                self.idle_gpu_seconds += min(self.free_gpus, self.waiting_gpus) * seconds
        self.at = now

    def waits(self, gpus: int) -> None:
        """A job of so many GPUs waits, for the first time or again."""
        self.waiting_gpus += gpus

    def starts(self, place: int, gpus: int, now: float) -> None:
        """A job got its GPUs."""
        if self.first_started_at[place] is None:
            self.first_started_at[place] = now
        self.waiting_gpus -= gpus
        self.held_gpus += gpus

    def ends(self, place: int, gpus: int, now: float) -> None:
        """A job is done and gives its GPUs back."""
        self.ended_at[place] = now
        self.held_gpus -= gpus

    def stops(self, place: int, gpus: int) -> None:
        """A job gives its GPUs back and waits again."""
        self.num_stops[place] += 1
        self.held_gpus -= gpus
        self.waits(gpus)
