"""What samples of a GPU's utilisation add up to: seconds in which it worked, and since when it has been idle. Pure.

Utilisation is a share of time, 0 to 1. Times are epoch seconds. Not for: reading devices (the node's agent).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

IDLE_UTILISATION: Final = 0.05
"""Below this a GPU counts as idle."""
COUNTED_INTERVALS: Final = 3
"""A sample stands for the time since the one before, but for no more than so many heartbeat intervals."""


@dataclass(frozen=True, kw_only=True)
class GPUSample:
    """What a heartbeat says of one GPU."""

    index: int
    utilisation: float
    memory_bytes: int


@dataclass(frozen=True, kw_only=True)
class LastSample:
    """What is known of a GPU before a sample comes."""

    at: float
    idle_since: float | None


def busy_seconds(
    sample: GPUSample, last: LastSample | None, *, held_since: float, now: float, longest_seconds: float
) -> float:
    """Seconds of work that a sample adds to the attempt that holds the GPU since `held_since`.

    The first sample of a GPU adds nothing: nobody knows of what time it tells.
    """
    if last is None:
        return 0.0
    since = max(last.at, held_since, now - longest_seconds)
    return sample.utilisation * max(0.0, now - since)


def idle_since(sample: GPUSample, last: LastSample | None, *, now: float, longest_seconds: float) -> float | None:
    """Since when the GPU has been idle without a break; None: it works. Time without samples is not idle time."""
    if sample.utilisation >= IDLE_UTILISATION:
        return None
    if last is None or last.idle_since is None or now - last.at > longest_seconds:
        return now
    return last.idle_since


def idle_while_held(idle_since: float | None, held_since: float | None) -> float | None:
    """Since when a GPU has been idle in the hands of those who hold it; None: it works, or their ranks do not run yet.

    That it was idle before they had it is not theirs.
    """
    if idle_since is None or held_since is None:
        return None
    return max(idle_since, held_since)


@dataclass(frozen=True, kw_only=True)
class HeldGPU:
    """One GPU of a running attempt, with the latest that is known of its use."""

    attempt_id: int
    held_since: float
    """When the attempt's ranks began to run."""
    sampled_at: float | None
    """None: it is not known how much it works."""
    idle_since: float | None


@dataclass(frozen=True, kw_only=True)
class IdleHolding:
    """An attempt none of whose GPUs works."""

    attempt_id: int
    num_gpus: int
    since: float
    idle_seconds: float
    """Up to the latest sample that tells of all its GPUs."""

    @property
    def wasted_gpu_seconds(self) -> float:
        """GPU-seconds held without work."""
        return self.idle_seconds * self.num_gpus


def idle_holdings(gpus: Iterable[HeldGPU], *, least_seconds: float) -> tuple[IdleHolding, ...]:
    """Attempts whose GPUs have all been idle for at least `least_seconds`, those that waste most first.

    One GPU that works, or of which nothing is known, clears the whole attempt.
    """
    by_attempt: defaultdict[int, list[HeldGPU]] = defaultdict(list)
    for gpu in gpus:
        by_attempt[gpu.attempt_id].append(gpu)
    found = [holding for held in by_attempt.values() if (holding := _holding(held)) is not None]
    long = [holding for holding in found if holding.idle_seconds >= least_seconds]
    return tuple(sorted(long, key=lambda one: (-one.wasted_gpu_seconds, one.attempt_id)))


def _holding(gpus: list[HeldGPU]) -> IdleHolding | None:
    starts = [since for gpu in gpus if (since := idle_while_held(gpu.idle_since, gpu.held_since)) is not None]
    looks = [gpu.sampled_at for gpu in gpus if gpu.sampled_at is not None]
    if len(starts) < len(gpus) or len(looks) < len(gpus):
        return None
    since = max(starts)
    return IdleHolding(
        attempt_id=gpus[0].attempt_id, num_gpus=len(gpus), since=since, idle_seconds=max(0.0, min(looks) - since)
    )
