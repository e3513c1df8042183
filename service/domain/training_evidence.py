"""What a rank of the trainer says of its own end: by exit code, and by the result it wrote before teardown. Pure.

Read for recipes and entries alone: a script's 65 or 75 is just its code. Not for: choosing the cause among ranks
(`service.domain.decide_outcome`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gangline.protocol.launch import NodeReport, RankReport
from gangline.protocol.outcomes import Outcome, TrainerExit

TRAINED_KINDS: Final = frozenset({"recipe", "entry"})

_EXIT_OUTCOMES: Final[Mapping[int, Outcome]] = {
    TrainerExit.CONFIG_ERROR: Outcome.CONFIG_ERROR,
    TrainerExit.OUT_OF_MEMORY: Outcome.OUT_OF_MEMORY,
    TrainerExit.NAN_LOSS: Outcome.NAN_LOSS,
    TrainerExit.COMMUNICATION_ERROR: Outcome.COMMUNICATION_ERROR,
    TrainerExit.PREEMPTED: Outcome.PREEMPTED,
}
"""Codes that say the outcome. A user error (65) does not: a missing package or a full disk raises too, so its error is
looked at as that of a script. 76 answers a cancel, which is the cause by itself."""


def outcome_of_exit(exit_code: int | None) -> Outcome | None:
    """The outcome that an exit code of the trainer states; None when its error must say."""
    return None if exit_code is None else _EXIT_OUTCOMES.get(exit_code)


def common_result(reports: Sequence[NodeReport | None]) -> str | None:
    """The result that every node has written (`succeeded`, `preempted`, …); None when one has not, or they differ."""
    results = {None if report is None else report.result for report in reports}
    return results.pop() if len(results) == 1 else None


def is_end_of_teardown(rank: RankReport, result: str | None) -> bool:
    """Whether a rank died by a signal after its node had written the result: an abort in teardown, not a failure."""
    return rank.signal is not None and result is not None
