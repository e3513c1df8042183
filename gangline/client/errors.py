"""Errors of the client: one tree, each with `.problem` (the server's answer), `.code` and `.fix`.

The table at the end maps the server's codes to classes. Not for: how an error is printed (`gangline.cli.errors`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, kw_only=True)
class SpecProblem:
    """One fault of a job file: where (dotted key; line and column from 1 when known), what, and the likely key."""

    pointer: str
    message: str
    line: int | None = None
    column: int | None = None
    suggestion: str | None = None


class GanglineError(Exception):
    """Something went wrong between this client and the server, or the server said no."""

    default_code = "error"

    def __init__(
        self,
        detail: str,
        *,
        code: str | None = None,
        fix: str = "",
        status: int | None = None,
        problem: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__(detail)
        self.detail = detail
        self.code = code or self.default_code
        self.fix = fix
        """What to do about it; empty when nobody knows."""
        self.status = status
        """HTTP status of the answer; None when there was none."""
        self.problem = dict(problem or {})
        """The server's `application/problem+json` object as it came; empty when the error is the client's own."""

    @property
    def errors(self) -> tuple[SpecProblem, ...]:
        """The faults of a job file, one by one; empty for any other error."""
        items = self.problem.get("errors")
        if not isinstance(items, list):
            return ()
        return tuple(_spec_problem(item) for item in items if isinstance(item, dict))


class InvalidRequest(GanglineError):
    """The server cannot read the request: a value of a filter, a key, a reference is malformed."""

    default_code = "invalid_request"


class InvalidSpec(InvalidRequest):
    """The job file is not valid; `.errors` lists every fault."""

    default_code = "invalid_spec"


class NotFound(GanglineError):
    """No such job, node, user, team or token, or none that you may see."""

    default_code = "not_found"


class NotAllowed(GanglineError):
    """Not logged in, or not allowed."""

    default_code = "forbidden"


class Refused(GanglineError):
    """Understood and refused: does not fit the pool, a limit, or a conflict with the present state."""

    default_code = "conflict"


class Unreachable(GanglineError):
    """No answer from the server: not running, wrong address, network cut, or it answers that it cannot work now."""

    default_code = "unreachable"


class ServerFailed(GanglineError):
    """The server answered with an error of its own, or with something that is not an answer of Gangline."""

    default_code = "server_error"


class TimedOut(GanglineError):
    """The wait ran out. The job goes on."""

    default_code = "wait_timed_out"


CLASSES_BY_CODE: dict[str, type[GanglineError]] = {
    "invalid_spec": InvalidSpec,
    "invalid_request": InvalidRequest,
    "not_found": NotFound,
    "forbidden": NotAllowed,
    "unauthorized": NotAllowed,
    "does_not_fit": Refused,
    "conflict": Refused,
    "idempotency_conflict": Refused,
    "idempotency_in_progress": Refused,
    "body_too_large": Refused,
    "unsafe_bundle": Refused,
    "database_unavailable": Unreachable,
}

CLASSES_BY_STATUS: dict[int, type[GanglineError]] = {
    400: Refused,
    401: NotAllowed,
    403: NotAllowed,
    404: NotFound,
    405: ServerFailed,
    409: Refused,
    413: Refused,
    422: Refused,
    429: Refused,
    502: Unreachable,
    503: Unreachable,
    504: Unreachable,
}
"""For codes that this release does not know, and for answers of a proxy."""


def from_problem(status: int, problem: Mapping[str, Any]) -> GanglineError:
    """The error for a problem object the server answered with."""
    code = str(problem.get("code") or "")
    error_class = CLASSES_BY_CODE.get(code) or CLASSES_BY_STATUS.get(status, ServerFailed)
    detail = str(problem.get("detail") or problem.get("title") or f"the server answered {status}")
    return error_class(detail, code=code or None, fix=str(problem.get("fix") or ""), status=status, problem=problem)


def _spec_problem(item: dict[str, Any]) -> SpecProblem:
    line, column = item.get("line"), item.get("column")
    suggestion = item.get("suggestion")
    return SpecProblem(
        pointer=str(item.get("pointer") or ""),
        message=str(item.get("message") or ""),
        line=line if isinstance(line, int) else None,
        column=column if isinstance(column, int) else None,
        suggestion=str(suggestion) if suggestion else None,
    )
