"""How long nodes have been silent, counted only while somebody watches. Pure: time is an argument.

`SilenceWatch.observe` is called at every sweep. Time between two sweeps counts for at most `largest_gap_seconds`, so a
sweeper that was down, paused or without its database holds none of that against any node.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum, auto

MASS_MIN_NODES = 3
MASS_WINDOW_SECONDS = 60.0


class Verdict(Enum):
    """What a node's silence means."""

    ALIVE = auto()
    UNREACHABLE = auto()
    LOST = auto()


@dataclass
class SilenceWatch:
    """Counts silence per node."""

    unreachable_seconds: float
    lost_seconds: float
    mass_silence_seconds: float
    largest_gap_seconds: float
    _last_heartbeat: dict[int, float] = field(default_factory=dict)
    _silent_for: dict[int, float] = field(default_factory=dict)
    _observed_at: float | None = None

    def forget_time(self) -> None:
        """The time since the last sweep must not count (the database was away)."""
        self._observed_at = None

    def observe(self, heartbeats: Mapping[int, float], monotonic_now: float) -> dict[int, Verdict]:
        """Verdict per node, from the time of each node's last heartbeat (only compared for change)."""
        passed = 0.0
        if self._observed_at is not None:
            passed = min(max(0.0, monotonic_now - self._observed_at), self.largest_gap_seconds)
        self._observed_at = monotonic_now
        for node, heartbeat in heartbeats.items():
            if self._last_heartbeat.get(node) != heartbeat:
                self._silent_for[node] = 0.0
            else:
                self._silent_for[node] += passed
        self._last_heartbeat = dict(heartbeats)
        self._silent_for = {node: self._silent_for[node] for node in heartbeats}
        lost_after = self._lost_after()
        return {node: self._verdict(silent, lost_after) for node, silent in self._silent_for.items()}

    def is_mass_silence(self) -> bool:
        """At least three nodes and over a third of all fell silent within a minute: the network, not the nodes."""
        silent = sorted(s for s in self._silent_for.values() if s >= self.unreachable_seconds)
        num_needed = max(MASS_MIN_NODES, len(self._silent_for) // 3 + 1)
        return any(
            silent[first + num_needed - 1] - silent[first] <= MASS_WINDOW_SECONDS
            for first in range(len(silent) - num_needed + 1)
        )

    def _lost_after(self) -> float:
        return max(self.lost_seconds, self.mass_silence_seconds) if self.is_mass_silence() else self.lost_seconds

    def _verdict(self, silent: float, lost_after: float) -> Verdict:
        if silent >= lost_after:
            return Verdict.LOST
        return Verdict.UNREACHABLE if silent >= self.unreachable_seconds else Verdict.ALIVE
