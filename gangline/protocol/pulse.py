"""The pulse of a rank: a small memory-mapped file in which it notes that it moves on, and in what phase.

A rank writes it at each part of a step (a few hundred nanoseconds, no system call), the supervisor reads it to find
hangs and to name the ranks that are behind. Not for: progress that users see (that goes through the events file).
"""

from __future__ import annotations

import mmap
import os
import struct
from dataclasses import dataclass
from enum import IntEnum
from pathlib import Path
from typing import Final

_LAYOUT: Final = struct.Struct("<QQBxxxxxxxdd")
"""moves, step, phase, floor in seconds, seconds of the slowest recent step."""


class Phase(IntEnum):
    """What a rank is doing. The name, in lower case, is what users see."""

    STARTING = 0
    """Importing, meeting the other ranks, building the model."""
    RESTORING = 1
    COMPILING = 2
    """The first step, which may compile kernels."""
    TRAINING = 3
    EVALUATION = 4
    CHECKPOINT = 5
    STOPPING = 6
    ENDED = 7


@dataclass(frozen=True, kw_only=True)
class PulseReading:
    """What a rank last noted."""

    moves: int
    """Grows by one at each part of a step: in a hang, the ranks with the fewest are the ones the others wait for."""
    step: int
    phase: Phase
    floor_seconds: float
    """The phase may go without a move for this long, whatever the steps took."""
    slowest_step_seconds: float
    """The slowest of the recent steps; 0 before there are any."""


class Pulse:
    """Writes a rank's pulse. `path` None: keeps it in memory only, for runs without a supervisor."""

    def __init__(self, path: Path | None) -> None:
        if path is None:
            self._map: mmap.mmap = mmap.mmap(-1, _LAYOUT.size)
        else:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                os.ftruncate(descriptor, _LAYOUT.size)
                self._map = mmap.mmap(descriptor, _LAYOUT.size)
            finally:
                os.close(descriptor)
        self._moves = 0
        self._step = 0
        self._phase = Phase.STARTING
        self._floor = 0.0
        self._slowest = 0.0

    @property
    def floor_seconds(self) -> float:
        """For how long the phase may go without a move."""
        return self._floor

    def enter(self, phase: Phase, floor_seconds: float) -> None:
        """A phase begins, in which `floor_seconds` without a move are no hang."""
        self._phase, self._floor = phase, floor_seconds
        self.move()

    def allow(self, floor_seconds: float) -> None:
        """The phase may go without a move for this long, or for what was said before where that is more."""
        if floor_seconds > self._floor:
            self._floor = floor_seconds
            self._write()

    def move(self, step: int | None = None, slowest_step_seconds: float | None = None) -> None:
        """Something was done."""
        self._moves += 1
        if step is not None:
            self._step = step
        if slowest_step_seconds is not None:
            self._slowest = slowest_step_seconds
        self._write()

    def _write(self) -> None:
        _LAYOUT.pack_into(self._map, 0, self._moves, self._step, self._phase, self._floor, self._slowest)


def read_pulse(path: Path) -> PulseReading | None:
    """The pulse in `path`; None when the rank has not written one (or the file is not one)."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return None
    if len(data) < _LAYOUT.size:
        return None
    moves, step, phase, floor, slowest = _LAYOUT.unpack_from(data)
    if moves == 0 or phase not in iter(Phase):
        return None
    return PulseReading(moves=moves, step=step, phase=Phase(phase), floor_seconds=floor, slowest_step_seconds=slowest)
