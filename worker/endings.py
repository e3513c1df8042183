"""What the end of a rank's process says: fine, a failure, or not known until the training's result is there. Pure.

A rank of the trainer can die in its teardown after all is done (gloo aborts at times), and ranks that were asked to
make room end with 75 one after another: both are no failures, and must not get their peers killed. Not for: what a
failure means for the job (the service decides).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Final

from gangline.protocol.launch import RunPlan
from gangline.protocol.outcomes import Outcome, TrainerExit
from gangline.protocol.pulse import Phase
from worker.evidence import exit_of

TRAINER_KINDS: Final = frozenset({"recipe", "entry"})
"""Kinds of jobs whose ranks are our trainer: exit codes, result and pulse mean something there, and only there."""
RESULTS: Final = frozenset({Outcome.SUCCEEDED, Outcome.PREEMPTED, Outcome.CANCELLED})
"""What the trainer writes as its result."""
RESULT_PATIENCE_SECONDS: Final = 5.0
"""A rank can end a little before the one that writes the result."""

_AGREED_EXITS: Final = frozenset({int(TrainerExit.PREEMPTED), int(TrainerExit.CANCELLED)})


class Ending(StrEnum):
    """How the end of a rank is to be taken."""

    FINE = "fine"
    FAILED = "failed"
    OPEN = "open"
    """Ask again a little later."""


def is_trainer(run: RunPlan) -> bool:
    """Whether the ranks are our trainer."""
    return run.kind in TRAINER_KINDS


def judge_ending(
    status: int,
    *,
    stopped_by_us: bool,
    is_trainer: bool,
    result: str | None,
    phase: Phase | None,
    waited_seconds: float,
) -> Ending:
    """How to take the wait status of a rank. `phase`: of its last pulse; `waited_seconds`: since it ended."""
    if status == 0 or stopped_by_us:
        return Ending.FINE
    if not is_trainer:
        return Ending.FAILED
    if result is not None:
        return Ending.FINE
    exit_code, _ = exit_of(status)
    is_last_part = exit_code in _AGREED_EXITS or phase is Phase.ENDED
    if is_last_part and waited_seconds < RESULT_PATIENCE_SECONDS:
        return Ending.OPEN
    return Ending.FAILED
