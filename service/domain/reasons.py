"""Why a job waits: reason codes, each with its sentence and what the user can do. No waiting job is without one."""

from dataclasses import dataclass
from enum import StrEnum


class ReasonCode(StrEnum):
    """Codes of waiting. The set is part of the API."""

    SUBMITTED = "submitted"
    """Not looked at yet: the next pass of the scheduler replaces it within moments."""
    NO_NODES = "no_nodes"
    NEEDS_GPUS = "needs_gpus"
    NEEDS_NODES = "needs_nodes"
    NODES_NOT_READY = "nodes_not_ready"
    BEHIND = "behind"
    PINNED = "pinned"
    """Its newest checkpoint lies where it cannot run now."""
    BACK_OFF = "back_off"
    NEVER_FITS = "never_fits"
    STOP_UNCONFIRMED = "stop_unconfirmed"
    """Not of waiting but of stopping: a node that holds the job does not answer."""


@dataclass(frozen=True, kw_only=True)
class Reason:
    """One reason: code, sentence, next step."""

    code: ReasonCode
    text: str
    fix: str = ""

    def to_json(self) -> dict[str, str]:
        """As stored and as the API shows it."""
        return {"code": self.code, "text": self.text, "fix": self.fix}
