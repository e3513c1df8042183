"""When a job may start that needs others to have ended, and what becomes of it when that can never be. Pure.

Terminal states are final, so a condition that holds once holds for good, and so does one that cannot hold any more.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from gangline.protocol.outcomes import JobState, Outcome
from service.domain.outcomes import OUTCOME_RULES
from service.domain.spec import Condition

MET_BY: Final[Mapping[Condition, frozenset[JobState]]] = {
    Condition.OK: frozenset({JobState.SUCCEEDED}),
    Condition.ANY: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED}),
    Condition.NOT_OK: frozenset({JobState.FAILED, JobState.CANCELLED}),
}
_WISHES: Final[Mapping[Condition, str]] = {
    Condition.OK: "to succeed",
    Condition.ANY: "to end",
    Condition.NOT_OK: "to fail or be cancelled",
}
_ENDED: Final[Mapping[JobState, str]] = {
    JobState.SUCCEEDED: "succeeded",
    JobState.FAILED: "failed",
    JobState.CANCELLED: "was cancelled",
}


@dataclass(frozen=True, kw_only=True)
class Need:
    """A job that another one needs, and its state."""

    job_id: int
    condition: Condition
    state: JobState
    is_private: bool = False
    """Then it is not named where everybody reads."""

    @property
    def is_met(self) -> bool:
        """Whether it has ended as needed."""
        return self.state in MET_BY[self.condition]

    @property
    def is_hopeless(self) -> bool:
        """Whether it has ended otherwise: the condition can never hold any more."""
        return self.state.is_terminal and not self.is_met

    @property
    def wish(self) -> str:
        """As the end of a sentence: `to succeed`."""
        return _WISHES[self.condition]

    @property
    def hopeless_text(self) -> str:
        """Why it is hopeless: `it needs job 12 to succeed, and job 12 failed`."""
        return f"it needs job {self.job_id} {self.wish}, and job {self.job_id} {_ENDED[self.state]}"


def hopeless_cause(need: Need) -> dict[str, Any]:
    """The cause of a job's end because of this need, with the members that every stored cause has."""
    rule = OUTCOME_RULES[Outcome.CANCELLED]
    return {
        "outcome": str(Outcome.CANCELLED),
        "sentence": rule.sentence.format(detail=f": {need.hopeless_text}"),
        "fix": f"See what became of job {need.job_id} (gang show {need.job_id}), then submit this one again.",
        "fault": str(rule.fault),
        "rank": None,
        "node": None,
        "exit_code": None,
        "signal": None,
        "error": None,
        "note": "",
        "ranks": [],
    }
