"""What goes wrong with checkpoints, and which of several ranks' errors is the cause.

Not for: what of it is retried or whose fault it is (that follows from the exit code and `trainer.failure`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Final

from gangline.protocol.peer_loss import is_peer_loss_text
from gangline.protocol.storage_full import is_storage_full_text
from trainer.failure import ConfigError

_MAX_KEYS_TOLD: Final = 8


class CheckpointFailed(RuntimeError):
    """A checkpoint could not be written. The older ones are as they were."""

    def __init__(self, step: int, cause: str) -> None:
        self.step = step
        self.cause = cause
        """Of the rank that failed first: `rank 1: OSError: …`."""
        fix = (
            " Free space below the checkpoint folder, or keep fewer (checkpoint.keep)." if self.is_storage_full else ""
        )
        super().__init__(f"the checkpoint of step {step} could not be written: {cause}{fix}")

    @property
    def is_storage_full(self) -> bool:
        """Whether the file system had no room (or a quota was used up)."""
        return is_storage_full_text(self.cause)

    @property
    def is_peer_loss(self) -> bool:
        """Whether another rank was gone: then this is secondary to whatever ended that rank."""
        return is_peer_loss_text(self.cause)


class NoUsableCheckpoint(RuntimeError):
    """The job has checkpoints, but none can be loaded. Starting from nothing instead would be a silent reset."""

    def __init__(self, reasons: list[str]) -> None:
        super().__init__(
            f"none of the job's {len(reasons)} checkpoints can be used: {' '.join(reasons)} "
            "Restore one of them, or start from nothing: gang requeue JOB --from-start, or submit the job anew."
        )


class CheckpointMismatch(ConfigError):
    """A checkpoint is whole, but belongs to another model or optimizer."""


def mismatch_text(stored: Mapping[str, str], wanted: Mapping[str, str]) -> str | None:
    """How what a checkpoint holds (descriptions by name) differs from what the model needs; None: it does not."""
    different = [
        f"{name} (checkpoint {stored[name]}, model {wanted[name]})"
        for name in stored
        if name in wanted and stored[name] != wanted[name]
    ]
    parts = [
        f"{title}: {some_of(names)}"
        for title, names in (
            ("missing in the checkpoint", [name for name in wanted if name not in stored]),
            ("unexpected in the checkpoint", [name for name in stored if name not in wanted]),
            ("of another shape or type", different),
        )
        if names
    ]
    return "; ".join(parts) or None


def root_cause(errors: Mapping[int, str]) -> str:
    """The error, with its rank, that the others follow from: ranks that only saw a peer go come last."""
    rank = min(errors, key=lambda one: (is_peer_loss_text(errors[one]), one))
    return f"rank {rank}: {errors[rank]}"


def describe(error: BaseException) -> str:
    """An exception in one line, with what it came from: torch wraps the system's error in its own."""
    texts = []
    seen: BaseException | None = error
    while seen is not None:
        texts.append(f"{type(seen).__name__}: {seen}")
        seen = seen.__cause__ or (None if seen.__suppress_context__ else seen.__context__)
    return " ← ".join(dict.fromkeys(texts))


def some_of(names: Sequence[str]) -> str:
    """The first few names, and how many there are more."""
    more = f" and {len(names) - _MAX_KEYS_TOLD} more" if len(names) > _MAX_KEYS_TOLD else ""
    return ", ".join(names[:_MAX_KEYS_TOLD]) + more
