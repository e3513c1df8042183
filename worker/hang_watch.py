"""Looks at the pulses of this node's ranks, and in a hang gets their stacks into their logs before they are ended.

The supervisor calls `tick` in its loop and stops the ranks when a failure comes back. Not for: the rule of what a hang
is (`worker.watchdog`, pure).
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gangline.protocol import names
from gangline.protocol.launch import LaunchPlan, NodeFailure
from gangline.protocol.outcomes import Outcome
from gangline.protocol.pulse import PulseReading, read_pulse
from worker.agent_log import log
from worker.node_report import RankRun
from worker.state import process_facts
from worker.watchdog import LOOK_SECONDS, Hang, Watchdog, describe_hang, find_hang

CAPTURE_SECONDS: Final = 2.0
"""The stacks get at most this long to reach the logs."""
CAPTURE_LOOK_SECONDS: Final = 0.1
QUIET_LOOKS: Final = 3
"""Logs that did not grow for so many looks hold the stacks."""
DUMP_SIGNAL: Final = signal.SIGUSR2
"""The trainer answers it with the stacks of all its threads."""


class HangWatch:
    """Of one attempt on one node. One thread only: the supervisor's main one."""

    def __init__(self, attempt_folder: Path, plan: LaunchPlan, now: float) -> None:
        self._folder = attempt_folder
        self._job_id = plan.job_id
        self._watchdog = Watchdog(now)
        self._look_at = now + LOOK_SECONDS
        self._capture: _Capture | None = None

    @property
    def is_capturing(self) -> bool:
        """Whether a hang was found, and the ranks write their stacks."""
        return self._capture is not None

    @property
    def due_at(self) -> float:
        """Monotonic time of the next `tick` that has something to do."""
        return self._look_at

    def tick(self, now: float, runs: Iterable[RankRun]) -> NodeFailure | None:
        """Look, where a look is due. The failure of a hang, once the stacks are captured."""
        if now < self._look_at:
            return None
        if self._capture is None:
            self._look(now, _living(runs))
            return None
        self._look_at = now + CAPTURE_LOOK_SECONDS
        if not _living(runs):
            self._capture = None  # they ended after all
            return None
        return self._capture.failure if self._capture.is_done(now) else None

    def join_peer(self, now: float, runs: Iterable[RankRun]) -> None:
        """The service stops us for the failure of a peer: if we were about to find a hang, it is the same one, and the
        rank that is furthest behind may be ours."""
        living = _living(runs)
        readings = self._readings(living)
        if self._capture is None and self._watchdog.is_nearly_hung(readings, now):
            self._begin_capture(now, living, readings)

    def _look(self, now: float, living: list[RankRun]) -> None:
        self._look_at = now + LOOK_SECONDS
        readings = self._readings(living)
        if self._watchdog.look(readings, now):
            self._begin_capture(now, living, readings)

    def _readings(self, living: list[RankRun]) -> dict[int, PulseReading | None]:
        return {run.rank: read_pulse(self._folder / names.pulse_file(run.rank)) for run in living}

    def _begin_capture(self, now: float, living: list[RankRun], readings: dict[int, PulseReading | None]) -> None:
        states = {run.rank: facts.state for run in living if (facts := process_facts(run.pid)) is not None}
        hang = find_hang(readings, states, still_seconds=self._watchdog.still_seconds(now))
        failure = _failure_of(hang, self._job_id)
        log("hang", seconds=round(hang.seconds, 1), behind=",".join(str(one.rank) for one in hang.behind))
        logs = [self._folder / names.log_file(run.rank) for run in living]
        self._capture = _Capture(failure, logs, now)
        for run in living:
            # Not yet reaped, so the pid is still its own. One that does not catch the signal would die of it.
            if _catches(run.pid, DUMP_SIGNAL):
                os.kill(run.pid, DUMP_SIGNAL)
        self._look_at = now + CAPTURE_LOOK_SECONDS


class _Capture:
    """Waits for logs to stop growing."""

    def __init__(self, failure: NodeFailure, logs: list[Path], now: float) -> None:
        self.failure = failure
        self._logs = logs
        self._deadline = now + CAPTURE_SECONDS
        self._sizes = self._read_sizes()
        self._has_grown = False
        self._num_quiet = 0

    def is_done(self, now: float) -> bool:
        sizes = self._read_sizes()
        if sizes != self._sizes:
            self._sizes, self._has_grown, self._num_quiet = sizes, True, 0
        else:
            self._num_quiet += 1
        return now >= self._deadline or (self._has_grown and self._num_quiet >= QUIET_LOOKS)

    def _read_sizes(self) -> list[int]:
        return [path.stat().st_size if path.exists() else 0 for path in self._logs]


def _failure_of(hang: Hang, job_id: int) -> NodeFailure:
    first = hang.behind[0]
    return NodeFailure(
        outcome=Outcome.HANG,
        message=describe_hang(hang),
        fix=f"gang logs {job_id} --rank {first.rank} shows the stacks of its threads, at the end. If it was only slow, "
        "raise train.hang_after.",
        at=time.time(),
        rank=first.rank,
        moves=0 if first.reading is None else first.reading.moves,
    )


def _living(runs: Iterable[RankRun]) -> list[RankRun]:
    return [run for run in runs if not run.has_ended]


def _catches(pid: int, number: signal.Signals) -> bool:
    """Whether a process handles a signal, so that it does not die of it."""
    try:
        lines = Path(f"/proc/{pid}/status").read_text(encoding="ascii", errors="replace").splitlines()
    except (FileNotFoundError, ProcessLookupError):
        return False
    mask = next((line.split()[1] for line in lines if line.startswith("SigCgt:")), "0")
    return bool(int(mask, 16) >> (number - 1) & 1)
