"""From what happened to the exit code of `gang`: two tables. Pure.

Not for: the codes themselves (`gangline.protocol.outcomes.ExitCode`).
"""

from __future__ import annotations

from gangline.client.errors import (
    GanglineError,
    InvalidRequest,
    NotAllowed,
    NotFound,
    Refused,
    ServerFailed,
    TimedOut,
    Unreachable,
)
from gangline.protocol.outcomes import ExitCode, JobState, Outcome

EXIT_CODES_OF_ERRORS: dict[type[GanglineError], ExitCode] = {
    InvalidRequest: ExitCode.USAGE,
    NotFound: ExitCode.NOT_FOUND,
    NotAllowed: ExitCode.NOT_ALLOWED,
    Refused: ExitCode.REFUSED,
    Unreachable: ExitCode.UNREACHABLE,
    TimedOut: ExitCode.WAIT_TIMED_OUT,
    ServerFailed: ExitCode.UNEXPECTED,
}
EXIT_CODES_OF_CODES: dict[str, ExitCode] = {
    "usage": ExitCode.USAGE,
    "cannot_pack": ExitCode.USAGE,
    "bad_url": ExitCode.USAGE,
    "bad_config": ExitCode.NOT_ALLOWED,
}
"""Codes of the client's own errors that have no class."""

EXIT_CODES_OF_STATES: dict[str, ExitCode] = {
    JobState.SUCCEEDED: ExitCode.DONE,
    JobState.CANCELLED: ExitCode.WAIT_CANCELLED,
    JobState.FAILED: ExitCode.WAIT_FAILED,
}
OUTCOMES_LOST: frozenset[str] = frozenset({Outcome.NODE_LOST, Outcome.SUPERVISOR_LOST, Outcome.TIME_LIMIT})
"""Failures whose exit code says that the user's code is not to blame, or ran out of time."""


def of_error(error: GanglineError) -> ExitCode:
    """The exit code for an error."""
    by_class = next((EXIT_CODES_OF_ERRORS[kind] for kind in type(error).__mro__ if kind in EXIT_CODES_OF_ERRORS), None)
    return EXIT_CODES_OF_CODES.get(error.code) or by_class or ExitCode.UNEXPECTED


def of_ended_job(state: str, outcome: str | None) -> ExitCode:
    """The exit code of `wait`, `submit --wait` and `logs -f --exit-status` for a job that has ended."""
    if state == JobState.FAILED and outcome in OUTCOMES_LOST:
        return ExitCode.WAIT_LOST
    return EXIT_CODES_OF_STATES.get(state, ExitCode.UNEXPECTED)
