"""The error tree of the service. Each class has a stable code, an HTTP status and a default fix.

A message says what happened with the values; `fix` says what to do next. `service.api.problems` turns them into
`application/problem+json`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, overload


@dataclass(frozen=True, kw_only=True)
class FieldProblem:
    """One problem of a request, at one place of it."""

    pointer: str
    """Key path such as `resources.gpus`."""
    message: str
    suggestion: str = ""
    line: int | None = None
    column: int | None = None


class ServiceError(Exception):
    """Base of every error that a caller may see."""

    code: ClassVar[str] = "error"
    status: ClassVar[int] = 500
    title: ClassVar[str] = "Something went wrong"
    default_fix: ClassVar[str] = "Try again; if it stays, give an admin the request_id."

    def __init__(self, detail: str, *, fix: str | None = None, errors: Sequence[FieldProblem] = (), **extra: Any):
        super().__init__(detail)
        self.detail = detail
        self.fix = self.default_fix if fix is None else fix
        self.errors = tuple(errors)
        self.extra = extra
        """Further members of the problem document, e.g. the `size` of a stream."""


class InvalidRequest(ServiceError):
    """The request itself is malformed."""

    code, status, title = "invalid_request", 422, "The request is not valid"
    default_fix = "Correct the fields named in errors."

    @overload
    def __init__(self, detail: str, *, fix: str, errors: Sequence[FieldProblem] = (), **extra: Any): ...
    @overload
    def __init__(self, detail: str, *, fix: None = None, errors: Sequence[FieldProblem], **extra: Any): ...
    def __init__(self, detail: str, *, fix: str | None = None, errors: Sequence[FieldProblem] = (), **extra: Any):
        """`detail` names the value at fault. The default fix points at `errors`: without any, `fix` must say more."""
        if not fix and not errors:
            raise TypeError(f"an invalid request needs a fix, or the fields at fault: {detail}")
        super().__init__(detail, fix=fix, errors=errors, **extra)


class InvalidJobSpec(ServiceError):
    """The job spec has problems; all of them are listed."""

    code, status, title = "invalid_spec", 422, "The job file is not valid"
    default_fix = "Correct the lines named in errors; the schema is at /api/v1/schemas/job.json."


class DoesNotFitPool(ServiceError):
    """The job can never run on this pool as it stands."""

    code, status, title = "does_not_fit", 422, "The job can never run on this pool"
    default_fix = "Ask for less, or ask an admin to add nodes."


class Unauthorized(ServiceError):
    """No token, or one that is not valid."""

    code, status, title = "unauthorized", 401, "Not logged in"
    default_fix = "Log in: gang login --server URL, or send Authorization: Bearer TOKEN."


class Forbidden(ServiceError):
    """Visible, but not allowed."""

    code, status, title = "forbidden", 403, "Not allowed"
    default_fix = "Ask the owner or an admin."


class NotFound(ServiceError):
    """Does not exist, or must not be seen."""

    code, status, title = "not_found", 404, "Not found"
    default_fix = "Look it up: gang ls."


class Conflict(ServiceError):
    """The state does not allow it."""

    code, status, title = "conflict", 409, "Not possible in this state"
    default_fix = "Look at the present state, then decide again."


class AttemptFenced(ServiceError):
    """The attempt is over for this node: its effects are refused and its ranks must be killed."""

    code, status, title = "attempt_fenced", 409, "This attempt is over"
    default_fix = "Nothing to do: the supervisor ends its ranks."


class NotAssigned(ServiceError):
    """The attempt is not, or no longer, this node's to run."""

    code, status, title = "not_assigned", 409, "Not assigned to this node"
    default_fix = "Nothing to do: the agent forgets the attempt."


class AlreadyClaimed(ServiceError):
    """Another token has claimed this part of the attempt."""

    code, status, title = "already_claimed", 409, "Claimed with another token"
    default_fix = "Nothing to do: the agent forgets the attempt."


class OffsetMismatch(ServiceError):
    """Stream bytes were sent for another offset than the stored size."""

    code, status, title = "offset_mismatch", 409, "Other offset expected"
    default_fix = "Continue at the size given."


class IdempotencyConflict(ServiceError):
    """The key was used for another request."""

    code, status, title = "idempotency_conflict", 422, "Idempotency-Key was used for another request"
    default_fix = "Use a new key for a new request."


class BodyTooLarge(ServiceError):
    """The body is over the limit."""

    code, status, title = "body_too_large", 413, "The body is too large"
    default_fix = "Send less; exclude files with .ganglineignore."


class UnsafeArchive(ServiceError):
    """The bundle could write outside its folder, or unpack without bound."""

    code, status, title = "unsafe_bundle", 422, "The bundle is refused"
    default_fix = "Pack the folder with gang submit."


class DatabaseUnavailable(ServiceError):
    """The database does not answer; nothing was stored."""

    code, status, title = "database_unavailable", 503, "The database does not answer"
    default_fix = "Nothing was stored. Try again in a few seconds."


class ShuttingDown(ServiceError):
    """The server is stopping."""

    code, status, title = "shutting_down", 503, "The server is stopping"
    default_fix = "Try again in a few seconds."


class StorageFull(ServiceError):
    """The data folder cannot be written."""

    code, status, title = "storage_unavailable", 507, "The data folder cannot be written"
    default_fix = "Nothing was stored. An admin must free space in the data folder."


class SettingsError(Exception):
    """The server refuses to start; each line says the rule, the values and the fix."""
