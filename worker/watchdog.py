"""When ranks of the trainer hang: none of this node's moved on for longer than their phase and their steps allow. Pure.

Times are monotonic seconds, given. Time in which nobody looked (the machine or the supervisor stood still) does not
count. Not for: reading pulses or ending ranks (`worker.hang_watch`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from gangline.protocol.pulse import Phase, PulseReading

LOOK_SECONDS: Final = 1.0
"""Between two looks at the pulses."""
LONGEST_GAP_SECONDS: Final = 5 * LOOK_SECONDS
"""A look that comes later than this says that we stood still, and perhaps the ranks with us."""
SLOW_STEPS: Final = 5.0
"""So many of the slowest recent steps may pass without a move."""
START_FLOOR_SECONDS: Final = 600.0
"""A rank that has no pulse yet imports its packages, from a slow disk perhaps."""
NEARLY: Final = 0.8
"""A peer's hang is also ours when we stood still for this part of the time allowed, or for all but a few looks."""

_STOPPED_STATES: Final = frozenset("Tt")
_KERNEL_STATE: Final = "D"


@dataclass(frozen=True, kw_only=True)
class BehindRank:
    """A rank that the others wait for."""

    rank: int
    is_stopped: bool
    """By SIGSTOP or a debugger."""
    reading: PulseReading | None
    text: str
    """For the user, such as `rank 2 (stopped by a signal)`."""


@dataclass(frozen=True, kw_only=True)
class Hang:
    """None of this node's ranks moves on."""

    seconds: float
    """Since the last move."""
    allowed_seconds: float
    phase: Phase
    """Of the rank furthest behind."""
    step: int
    behind: tuple[BehindRank, ...]
    """The rank at fault first."""
    num_ranks: int
    """Ranks that live."""


class Watchdog:
    """Remembers the last move of any rank of this node."""

    def __init__(self, now: float) -> None:
        self._moves: dict[int, int] = {}
        self._moved_at = now
        self._looked_at = now

    def look(self, readings: Mapping[int, PulseReading | None], now: float) -> bool:
        """Take in the pulses of the living ranks. True: they hang."""
        gap = now - self._looked_at
        if gap > LONGEST_GAP_SECONDS:
            self._moved_at += gap - LOOK_SECONDS
        self._looked_at = now
        moves = {rank: reading.moves for rank, reading in readings.items() if reading is not None}
        if moves != self._moves:  # the end of a rank, or its first pulse, is a move as well
            self._moves = moves
            self._moved_at = now
        return bool(readings) and self.still_seconds(now) > allowed_seconds(readings)

    def still_seconds(self, now: float) -> float:
        """Since any rank moved, as of the last look."""
        return now - self._moved_at

    def is_nearly_hung(self, readings: Mapping[int, PulseReading | None], now: float) -> bool:
        """Whether a peer that calls its ranks hung speaks of ours as well: nodes see a hang a little apart."""
        allowed = allowed_seconds(readings)
        nearly = max(NEARLY * allowed, allowed - 3 * LOOK_SECONDS)
        return bool(readings) and self.still_seconds(now) >= nearly


def allowed_seconds(readings: Mapping[int, PulseReading | None]) -> float:
    """How long these ranks may go without a move: the largest floor of theirs, and five slow steps."""
    floors = [START_FLOOR_SECONDS if one is None else one.floor_seconds for one in readings.values()]
    slowest = max((one.slowest_step_seconds for one in readings.values() if one is not None), default=0.0)
    return max([*floors, SLOW_STEPS * slowest])


def find_hang(readings: Mapping[int, PulseReading | None], states: Mapping[int, str], *, still_seconds: float) -> Hang:
    """Who is behind in a hang of these ranks (at least one). `states`: letters of /proc/<pid>/stat, by rank."""
    stopped = [rank for rank in readings if states.get(rank, "") in _STOPPED_STATES]
    fewest = min(_moves(reading) for reading in readings.values())
    behind = stopped or [rank for rank, reading in readings.items() if _moves(reading) == fewest]
    first = readings[min(behind)]
    return Hang(
        seconds=still_seconds,
        allowed_seconds=allowed_seconds(readings),
        phase=Phase.STARTING if first is None else first.phase,
        step=0 if first is None else first.step,
        behind=tuple(_behind(rank, readings[rank], states.get(rank, "")) for rank in sorted(behind)),
        num_ranks=len(readings),
    )


def describe_hang(hang: Hang) -> str:
    """One sentence or two for the user: who, where, since when."""
    where = f"in {hang.phase.name.lower()} at step {hang.step}"
    text = f"No rank of this node moved on for {hang.seconds:.0f} s {where}; {hang.allowed_seconds:.0f} s were allowed."
    names = ", ".join(one.text for one in hang.behind)
    if len(hang.behind) == hang.num_ranks and not any(one.is_stopped for one in hang.behind):
        return text if hang.num_ranks == 1 else f"{text} All {hang.num_ranks} came equally far: {names}."
    return f"{text} Behind: {names}."


def _behind(rank: int, reading: PulseReading | None, state: str) -> BehindRank:
    is_stopped = state in _STOPPED_STATES
    notes = [
        *(["stopped by a signal"] if is_stopped else []),
        *(["waiting in the kernel"] if state == _KERNEL_STATE else []),
        *(["no sign of life yet"] if reading is None else []),
    ]
    text = f"rank {rank}" + (f" ({', '.join(notes)})" if notes else "")
    return BehindRank(rank=rank, is_stopped=is_stopped, reading=reading, text=text)


def _moves(reading: PulseReading | None) -> int:
    return 0 if reading is None else reading.moves
