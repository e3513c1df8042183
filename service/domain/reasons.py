"""Why a job waits: reason codes, each with its sentence and what the user can do. No waiting job is without one."""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class ReasonCode(StrEnum):
    """Codes of waiting. The set is part of the API; `REASON_MEANINGS` says what each means."""

    SUBMITTED = "submitted"
    # Its owner, an admin, its job file
    HELD = "held"
    NOT_YET = "not_yet"
    DEPENDENCY = "dependency"
    LIMIT_NEEDED = "limit_needed"
    BACK_OFF = "back_off"
    # Shares of the pool
    QUOTA = "quota"
    CAP = "cap"
    # The pool itself
    NO_NODES = "no_nodes"
    NEEDS_GPUS = "needs_gpus"
    NEEDS_NODES = "needs_nodes"
    NODES_NOT_READY = "nodes_not_ready"
    SCATTERED = "scattered"
    PINNED = "pinned"
    NEVER_FITS = "never_fits"
    # Jobs before it
    BEHIND = "behind"
    LESS_TIME_LEFT = "less_time_left"
    RESERVED = "reserved"
    NOMINATED = "nominated"
    # Why nothing is stopped for it
    PATIENCE = "patience"
    NOT_RESUMABLE = "not_resumable"
    PROTECTED = "protected"
    TOO_COSTLY = "too_costly"
    QUORUM = "quorum"
    # Of stopping
    STOP_UNCONFIRMED = "stop_unconfirmed"


REASON_MEANINGS: Final[Mapping[ReasonCode, str]] = {
    ReasonCode.SUBMITTED: "Not looked at yet: the next pass of the scheduler replaces it within moments.",
    ReasonCode.HELD: "Its owner or an admin holds it back until it is released.",
    ReasonCode.NOT_YET: "It must not start before a time that is still to come.",
    ReasonCode.DEPENDENCY: "It needs other jobs to have ended first.",
    ReasonCode.LIMIT_NEEDED: "It would start only where its end is known, and it has no time limit.",
    ReasonCode.BACK_OFF: "Its last attempt failed: it starts again after a pause.",
    ReasonCode.QUOTA: "What is free is guaranteed to other teams, whose jobs wait for it.",
    ReasonCode.CAP: "Its user or team holds as many GPUs as it may hold at once.",
    ReasonCode.NO_NODES: "The pool has no nodes.",
    ReasonCode.NEEDS_GPUS: "No node, or not enough of them, has the GPUs free that it needs.",
    ReasonCode.NEEDS_NODES: "Nodes have the GPUs free, but not the CPUs or the memory.",
    ReasonCode.NODES_NOT_READY: "It would fit on nodes that get no new work now.",
    ReasonCode.SCATTERED: "Enough GPUs are free in all, but scattered over nodes, and nothing can be moved yet.",
    ReasonCode.PINNED: "Its newest checkpoint lies where it cannot run now.",
    ReasonCode.NEVER_FITS: "The pool as it is now can never run it.",
    ReasonCode.BEHIND: "Jobs ahead of it in the queue take what is free.",
    ReasonCode.LESS_TIME_LEFT: "Jobs with less time left go first.",
    ReasonCode.RESERVED: "What is free is kept for a job that has waited longer, and this one would not end in time.",
    ReasonCode.NOMINATED: "GPUs are being freed for it: it starts on them as soon as they are.",
    ReasonCode.PATIENCE: "Running jobs get a few minutes to end before anything is stopped for it.",
    ReasonCode.NOT_RESUMABLE: "The jobs that hold what it needs do not resume, so they are not stopped.",
    ReasonCode.PROTECTED: "The jobs that hold what it needs started a short while ago, or were stopped often enough.",
    ReasonCode.TOO_COSTLY: "The jobs that hold what it needs have too little time left beside its own to be stopped.",
    ReasonCode.QUORUM: "Stopping a large job would free far more GPUs than the waiting jobs can use.",
    ReasonCode.STOP_UNCONFIRMED: "Not of waiting but of stopping: a node that holds the job does not answer.",
}


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One reason: code, sentence, next step."""

    code: ReasonCode
    text: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """As stored and as the API shows it."""
        return {"code": self.code, "text": self.text, "fix": self.fix}
