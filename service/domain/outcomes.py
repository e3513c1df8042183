"""What follows from an outcome: one table from outcome to job state, retry, budget, fault, sentence and fix.

Retry is never an `if` elsewhere. Not for: finding the outcome (`service.domain.decide_outcome`).
"""

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Final

from gangline.protocol.outcomes import JobState, Outcome
from service.domain.spec import RetrySpec


class Fault(StrEnum):
    """Whose fault an ending is; decides which budget a retry is charged to."""

    NOBODY = "nobody"
    USER = "user"
    POOL = "pool"


@dataclass(frozen=True, kw_only=True)
class OutcomeRule:
    """One row of the table."""

    job_state: JobState
    """Where the job goes when no new attempt is due."""
    is_retried: bool
    """Retried without being asked for; other outcomes only where the job's `retry.on` names them."""
    is_charged: bool
    """Whether a retry counts against the job's own `retry.max`."""
    fault: Fault
    sentence: str
    """What happened, for the user; `{detail}` is filled by the cause."""
    fix: str
    fix_if_retried: str | None = None
    """What to do where another attempt follows; None: the same."""
    retry_limit: int | None = None
    """How many attempts of a job that ended so are tried again unasked; None: bounded by nothing of its own."""


def _user(sentence: str, fix: str, fix_if_retried: str | None = None) -> OutcomeRule:
    return OutcomeRule(
        job_state=JobState.FAILED,
        is_retried=False,
        is_charged=True,
        fault=Fault.USER,
        sentence=sentence,
        fix=fix,
        fix_if_retried=fix_if_retried,
    )


def _pool(sentence: str, fix: str, retry_limit: int | None = None) -> OutcomeRule:
    return OutcomeRule(
        job_state=JobState.FAILED,
        is_retried=True,
        is_charged=False,
        fault=Fault.POOL,
        sentence=sentence,
        fix=fix,
        retry_limit=retry_limit,
    )


OUTCOME_RULES: Final[Mapping[Outcome, OutcomeRule]] = {
    Outcome.SUCCEEDED: OutcomeRule(
        job_state=JobState.SUCCEEDED,
        is_retried=False,
        is_charged=False,
        fault=Fault.NOBODY,
        sentence="All ranks ended with exit code 0.",
        fix="",
    ),
    Outcome.USER_ERROR: _user("{detail}", "Read the traceback and the end of the log: gang logs {job} --rank {rank}."),
    Outcome.CONFIG_ERROR: _user("The job cannot run as written: {detail}", "Correct the job file and submit again."),
    Outcome.ENVIRONMENT_ERROR: _user(
        "Something is missing on the node: {detail}",
        "Install it in the interpreter that the job names (`python:`), or bring it with the code, then submit again.",
    ),
    Outcome.OUT_OF_MEMORY: _user(
        "The job ran out of memory: {detail}",
        "Ask for more (resources.memory), use smaller batches, or spread the model over more GPUs.",
    ),
    Outcome.NAN_LOSS: _user(
        "The loss became NaN: {detail}", "Lower the learning rate, clip gradients, or check the data."
    ),
    Outcome.TIME_LIMIT: _user(
        "The job reached its time limit: {detail}",
        "Raise resources.time, or save checkpoints and let new attempts go on from them: retry.max, and retry.on: "
        "[time_limit].",
        fix_if_retried="Nothing to do: it goes on in another attempt.",
    ),
    Outcome.CANCELLED: OutcomeRule(
        job_state=JobState.CANCELLED,
        is_retried=False,
        is_charged=False,
        fault=Fault.NOBODY,
        sentence="The job was cancelled{detail}.",
        fix="",
    ),
    Outcome.PREEMPTED: OutcomeRule(
        job_state=JobState.FAILED,
        is_retried=True,
        is_charged=False,
        fault=Fault.NOBODY,
        sentence="The job was stopped and starts again: {detail}",
        fix="Nothing to do: it starts again by itself.",
    ),
    Outcome.HANG: _pool(
        "The job made no progress any more: {detail}",
        "The stacks of all ranks at that moment are in their logs: gang logs {job} --rank {rank}.",
        retry_limit=1,  # a second hang is the code's: trying again would only hold the GPUs
    ),
    Outcome.COMMUNICATION_ERROR: _pool(
        "The ranks lost each other: {detail}", "If it happens again, look at the network between the nodes named."
    ),
    Outcome.GPU_FAULT: _pool("A GPU failed: {detail}", "The GPU is set aside; an admin should look at it."),
    Outcome.STORAGE_FULL: _user("A disk is full: {detail}", "Free space, or write less, then submit again."),
    Outcome.NODE_LOST: _pool(
        "A node stopped answering: {detail}", "Nothing to do: the job is placed again on other nodes."
    ),
    Outcome.LAUNCH_FAILED: _pool(
        "The ranks could not be started: {detail}", "Nothing to do unless it happens again; then ask an admin."
    ),
    Outcome.SUPERVISOR_LOST: _pool(
        "The process that watched the ranks died: {detail}", "Nothing to do: the job starts again."
    ),
}


@dataclass(frozen=True, kw_only=True)
class RetryVerdict:
    """Whether a new attempt is due, and why or why not in the job's events."""

    is_due: bool
    is_charged: bool
    """Counts against the job's `retry.max`."""
    is_pool_retry: bool
    """Counts against the bound on attempts that end by the pool's fault."""
    delay_seconds: float
    text: str


RETRIED_BY_DEFAULT: Final = (Outcome.USER_ERROR, Outcome.OUT_OF_MEMORY, Outcome.NAN_LOSS, Outcome.STORAGE_FULL)
"""What `retry.max` covers when `retry.on` is not given: failures that another try may not meet again."""
POOL_RETRY_LIMIT: Final = 10
"""Attempts that may end by the pool's fault before a job stops trying: a finite bound, far above bad luck."""
POOL_RETRY_BACKOFF_SECONDS: Final = (0.0, 1.0, 5.0, 15.0, 60.0, 300.0)
"""Wait before the n-th retry for the pool's fault, so that a node that breaks every start is not fed."""


def retry_verdict(
    outcome: Outcome,
    exit_code: int | None,
    retry: RetrySpec,
    *,
    num_charged: int,
    num_pool_retries: int,
    num_same: int = 0,
    is_unasked: bool = False,
    goes_on_at_limit: bool = False,
    has_checkpoint: bool = False,
) -> RetryVerdict:
    """Whether an attempt that ended with `outcome` is followed by another one. Pure.

    `exit_code` is that of the first failing rank; `num_charged` and `num_pool_retries` count the retries so far,
    `num_same` the job's earlier attempts with this very outcome. `is_unasked`: somebody other than the service stopped
    it, which may go on for ever, so that it counts as the pool's fault does. `goes_on_at_limit`: the job asks to go on
    after its time limit; it does if it `has_checkpoint` of this attempt, so that it gets on each time.
    """
    rule = OUTCOME_RULES[outcome]
    if outcome is Outcome.TIME_LIMIT and goes_on_at_limit:
        if not has_checkpoint:
            return _no_retry("on_time_limit: requeue, but it saved no checkpoint that it could go on from")
        text = "it goes on from its checkpoint when its turn comes, as on_time_limit: requeue says"
        return RetryVerdict(is_due=True, is_charged=False, is_pool_retry=False, delay_seconds=0.0, text=text)
    if rule.is_retried:
        is_pool_retry = rule.fault is Fault.POOL or is_unasked
        if is_pool_retry and num_pool_retries >= POOL_RETRY_LIMIT:
            return _no_retry(f"{num_pool_retries} attempts ended by the pool's fault: giving up")
        if rule.retry_limit is not None and num_same >= rule.retry_limit:
            return _no_retry(f"attempts that ended as {outcome} before: {num_same}; giving up")
        delay = POOL_RETRY_BACKOFF_SECONDS[min(num_pool_retries, len(POOL_RETRY_BACKOFF_SECONDS) - 1)]
        return RetryVerdict(
            is_due=True,
            is_charged=False,
            is_pool_retry=is_pool_retry,
            delay_seconds=delay if is_pool_retry else 0.0,
            text=f"retried after {outcome}, not charged",
        )
    if rule.job_state is not JobState.FAILED or not retry.max_retries:
        return _no_retry("")
    if outcome not in (retry.outcomes or RETRIED_BY_DEFAULT):
        return _no_retry(f"{outcome} is not in retry.on")
    if retry.exit_codes and exit_code not in retry.exit_codes:
        return _no_retry(f"exit code {exit_code} is not in retry.exit_codes")
    if num_charged >= retry.max_retries:
        return _no_retry(f"all {retry.max_retries} retries are used")
    text = f"retry {num_charged + 1} of {retry.max_retries} after {outcome}"
    return RetryVerdict(is_due=True, is_charged=True, is_pool_retry=False, delay_seconds=0.0, text=text)


def fix_told(outcome: Outcome, fix: str, *, is_retried: bool) -> str:
    """What its owner reads to do about an attempt that ended with `outcome`: `fix`, unless another attempt does it."""
    other = OUTCOME_RULES[outcome].fix_if_retried
    return other if is_retried and other is not None else fix


def _no_retry(text: str) -> RetryVerdict:
    return RetryVerdict(is_due=False, is_charged=False, is_pool_retry=False, delay_seconds=0.0, text=text)
