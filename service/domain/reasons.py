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
    BACK_OFF = "back_off"
    # Shares of the pool
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


# Also what others read of a private job, so each must be true of every job that has the code.
REASON_MEANINGS: Final[Mapping[ReasonCode, str]] = {
    ReasonCode.SUBMITTED: "Not looked at yet: the next pass of the scheduler replaces it within moments.",
    ReasonCode.HELD: "Its owner or an admin holds it back until it is released.",
    ReasonCode.NOT_YET: "It must not start before a time that is still to come.",
    ReasonCode.DEPENDENCY: "It needs other jobs to have ended first.",
    ReasonCode.BACK_OFF: "Its last attempt failed: it takes its turn again after a pause.",
    ReasonCode.CAP: "Its user's or team's cap does not allow it now.",
    ReasonCode.NO_NODES: "The pool has no nodes.",
    ReasonCode.NEEDS_GPUS: "Too few GPUs are free where it may run.",
    ReasonCode.NEEDS_NODES: "Too few nodes have all free together that it needs: GPUs, CPUs and memory.",
    ReasonCode.NODES_NOT_READY: "It would fit on nodes that get no new work now.",
    ReasonCode.SCATTERED: "Enough GPUs are free in all, but scattered over nodes.",
    ReasonCode.PINNED: "Its newest checkpoint lies where it cannot run now.",
    ReasonCode.NEVER_FITS: "The pool as it is now can never run it.",
    ReasonCode.BEHIND: "Jobs ahead of it in the queue take what is free, or go first.",
    ReasonCode.RESERVED: "What is free is kept for a job ahead of it, which this one could delay.",
    ReasonCode.NOMINATED: "GPUs are being freed for it: it starts on them as soon as they are.",
    ReasonCode.PATIENCE: "Running jobs get a few minutes to end before anything is stopped for it.",
    ReasonCode.NOT_RESUMABLE: "The jobs that hold what it needs do not resume or may not be stopped again; or it does "
    "not resume itself, and may not borrow.",
    ReasonCode.PROTECTED: "Of the jobs that hold what it needs, some started too recently to be stopped, and stopping "
    "others does not pay.",
    ReasonCode.TOO_COSTLY: "The jobs that hold what it needs have too little time left beside its own to be stopped, "
    "or stopping them costs more than it gains.",
    ReasonCode.QUORUM: "Stopping a large job would free far more GPUs than the waiting jobs can use.",
    ReasonCode.STOP_UNCONFIRMED: "Not of waiting but of stopping: a node that holds the job does not answer.",
}


NOT_FOR_GPUS: Final = frozenset(
    {
        ReasonCode.HELD,
        ReasonCode.NOT_YET,
        ReasonCode.DEPENDENCY,
        ReasonCode.BACK_OFF,
        ReasonCode.CAP,
        ReasonCode.NO_NODES,
        ReasonCode.NEVER_FITS,
    }
)
"""Of a job that waits for one of these it does not matter who holds the pool's GPUs."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One reason: code, sentence, next step."""

    code: ReasonCode
    text: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """As stored and as the API shows it."""
        return {"code": self.code, "text": self.text, "fix": self.fix}
