"""The one authorisation function: who may do what, as a table.

Visible to the whole pool: name, owner, state, GPUs, times and reason of a job. To its team: spec, logs, metrics. A
private job does not exist for others. Refusals: 404 for what must not be seen, 403 for what may be seen but not done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from service.auth.principals import Principal
from service.errors import Forbidden, NotFound


class Action(StrEnum):
    """What a route does."""

    JOB_SUBMIT = "job_submit"
    JOB_LIST = "job_list"
    JOB_SEE = "job_see"
    """Its public face: name, owner, state, GPUs, times, reason."""
    JOB_READ = "job_read"
    """Its inside: spec, logs, metrics, traceback."""
    JOB_CANCEL = "job_cancel"
    JOB_REQUEUE = "job_requeue"
    JOB_EXTEND = "job_extend"
    """Change its time limit."""
    JOB_TURN = "job_turn"
    """Hold, release, and change the priority."""
    POOL_SEE = "pool_see"
    BUNDLE_WRITE = "bundle_write"
    OWN_TOKENS = "own_tokens"
    """List, make and revoke one's own tokens."""
    ADMINISTER = "administer"
    """Users, teams, what they may hold, everybody's tokens."""
    ENROL_NODE = "enrol_node"


@dataclass(frozen=True, kw_only=True)
class JobFacts:
    """What authorisation needs to know of a job."""

    job_id: int
    owner_id: int
    team_id: int
    is_private: bool


def _insider(principal: Principal, job: JobFacts | None) -> bool:
    return job is not None and (
        principal.is_admin or principal.user_id == job.owner_id or principal.is_member(job.team_id)
    )


def _owner_or_admin(principal: Principal, job: JobFacts | None) -> bool:
    return job is not None and (principal.is_admin or principal.user_id == job.owner_id)


def _anybody(principal: Principal, job: JobFacts | None) -> bool:
    return True


def _admin(principal: Principal, job: JobFacts | None) -> bool:
    return principal.is_admin


RULES: Final[Mapping[Action, Callable[[Principal, JobFacts | None], bool]]] = {
    Action.JOB_SUBMIT: _anybody,
    Action.JOB_LIST: _anybody,
    Action.JOB_SEE: _anybody,
    Action.JOB_READ: _insider,
    Action.JOB_CANCEL: _owner_or_admin,
    Action.JOB_REQUEUE: _owner_or_admin,
    Action.JOB_EXTEND: _owner_or_admin,
    Action.JOB_TURN: _owner_or_admin,
    Action.POOL_SEE: _anybody,
    Action.BUNDLE_WRITE: _anybody,
    Action.OWN_TOKENS: _anybody,
    Action.ADMINISTER: _admin,
    Action.ENROL_NODE: _anybody,
}


WORDS: Final[Mapping[Action, str]] = {
    Action.JOB_SUBMIT: "submit jobs",
    Action.JOB_LIST: "list jobs",
    Action.JOB_SEE: "see {job}",
    Action.JOB_READ: "read the spec, the logs and the metrics of {job}",
    Action.JOB_CANCEL: "cancel {job}",
    Action.JOB_REQUEUE: "requeue {job}",
    Action.JOB_EXTEND: "change the time limit of {job}",
    Action.JOB_TURN: "hold or release {job}, or change its priority",
    Action.POOL_SEE: "see the pool",
    Action.BUNDLE_WRITE: "upload code",
    Action.OWN_TOKENS: "list, make or revoke tokens",
    Action.ADMINISTER: "administer the pool",
    Action.ENROL_NODE: "enrol nodes",
}
"""What a refused person may not do, in their words: "may not ...". The names of actions mean nothing to them."""


def words_of(action: Action, job: JobFacts | None = None) -> str:
    """What `action` (on `job`) is, in users' words."""
    return WORDS[action].format(job="jobs" if job is None else f"job {job.job_id}")


def authorise(principal: Principal, action: Action, job: JobFacts | None = None) -> None:
    """Return if `principal` may do `action` (on `job`). Raises NotFound or Forbidden."""
    is_enrolment = principal.token_kind == "enrolment"
    if is_enrolment is not (action is Action.ENROL_NODE):
        raise Forbidden(
            f"a token of kind {principal.token_kind} may not {words_of(action)}",
            fix="Use a token of kind enrolment to enrol nodes, and one of kind user for everything else.",
        )
    if job is not None and job.is_private and not _insider(principal, job):
        raise NotFound(f"there is no job {job.job_id}")
    if not RULES[action](principal, job):
        if job is not None and _insider(principal, job):
            raise Forbidden(f"only its owner or an admin may {words_of(action, job)}; {principal.name} is neither")
        if job is not None:
            raise Forbidden(
                f"job {job.job_id} belongs to another team; {principal.name} may not {words_of(action, job)}"
            )
        raise Forbidden(f"{principal.name} is not an admin")


def may_read(principal: Principal, job: JobFacts) -> bool:
    """Whether the inside of the job may be shown; for leaving it out of an answer instead of refusing."""
    return _insider(principal, job)
