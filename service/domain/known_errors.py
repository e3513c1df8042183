"""Errors of user code that are known well enough to print the fix itself: a table of patterns.

Matched against the exception of the first failing rank, never against log text, so that a log which merely mentions an
error changes nothing.
"""

import re
from dataclasses import dataclass
from typing import Final

from gangline.protocol.launch import ErrorRecord


@dataclass(frozen=True, kw_only=True)
class KnownError:
    """A pattern over `Type: message`, and what the user should change."""

    pattern: re.Pattern[str]
    fix: str


KNOWN_ERRORS: Final = (
    KnownError(
        pattern=re.compile(
            r"DistributedDataParallel device_ids and output_device arguments only work with single-device"
            r"|device_ids can only be None or contain a single element",
        ),
        fix=(
            "Each rank drives one device. Write DistributedDataParallel(model) on CPU, or "
            "DistributedDataParallel(model, device_ids=[int(os.environ['LOCAL_RANK'])]) on GPUs, instead of "
            "device_ids=[0, 1]."
        ),
    ),
    KnownError(
        pattern=re.compile(r"Expected to have finished reduction in the prior iteration"),
        fix=(
            "Some parameters got no gradient. Remove them, or write DistributedDataParallel(model, "
            "find_unused_parameters=True)."
        ),
    ),
)


def recognise_error(error: ErrorRecord) -> str | None:
    """The fix for a known error, or None."""
    text = f"{error.type}: {error.message}"
    return next((known.fix for known in KNOWN_ERRORS if known.pattern.search(text)), None)
