"""Tells failures of ranks from good ends, with the help of what the trainer left: its result and its last pulse.

Reads files. Not for: the rule itself (`worker.endings`, pure) or the report (`worker.node_report`).
"""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Final

from gangline.protocol import names
from gangline.protocol.launch import LaunchPlan
from gangline.protocol.pulse import read_pulse
from worker.endings import Ending, is_trainer, judge_ending
from worker.node_report import RankRun, read_result

OPEN_LOOK_SECONDS: Final = 0.1
"""Between looks for the result, while the end of a rank waits for it."""


class RankJudge:
    """Of one attempt on one node. For anything but the trainer it looks at the wait status alone."""

    def __init__(self, attempt_folder: Path, plan: LaunchPlan) -> None:
        self._folder = attempt_folder
        self._is_trainer = is_trainer(plan.run)
        self._result: str | None = None

    @property
    def result(self) -> str | None:
        """How the training ended (`succeeded`, …); None as long as it has not, and for scripts and commands."""
        if self._is_trainer and self._result is None:
            self._result = read_result(self._folder)
        return self._result

    def has_failure(self, runs: Iterable[RankRun]) -> bool:
        """Whether a rank ended in a way that must end the others."""
        return any(self._ending(run) is Ending.FAILED for run in runs)

    def is_waiting(self, runs: Iterable[RankRun]) -> bool:
        """Whether the end of a rank is open until the result is there: look again after `OPEN_LOOK_SECONDS`."""
        return any(self._ending(run) is Ending.OPEN for run in runs)

    def _ending(self, run: RankRun) -> Ending | None:
        """None as long as it runs."""
        if run.status is None:
            return None
        if run.status == 0 or run.stopped_by_us:
            return Ending.FINE
        pulse = read_pulse(self._folder / names.pulse_file(run.rank)) if self._is_trainer else None
        return judge_ending(
            run.status,
            stopped_by_us=run.stopped_by_us,
            is_trainer=self._is_trainer,
            result=self.result,
            phase=None if pulse is None else pulse.phase,
            waited_seconds=time.monotonic() - run.reaped_at,
        )
