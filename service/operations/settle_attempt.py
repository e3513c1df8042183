"""End an attempt's share of a node, and end the attempt once all its nodes have ended.

The outcome comes from `decide_outcome`, what follows from it from the outcomes table; here they are applied.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any

from sqlalchemy import Row, func, select, update

from gangline.protocol.launch import NodeReport, decode
from gangline.protocol.outcomes import JobState, Outcome, StopIntent
from service.db.session import Write
from service.db.tables import allocations, attempt_nodes, attempts, gpus, jobs, nodes
from service.db.transitions import move_attempt, move_attempt_node, move_job
from service.domain.decide_outcome import Cause, NodeEnding, decide_outcome
from service.domain.outcomes import OUTCOME_RULES, RetryVerdict, fix_told, retry_verdict
from service.domain.progress import Progress
from service.domain.run_accounts import EndedRun, RunAccounts, account_run
from service.domain.spec import JobSpec
from service.domain.states import AttemptNodeState, AttemptState
from service.scheduler.estimates import REPORT_COUNTS_AFTER_SECONDS


def end_attempt_node(
    tx: Write,
    attempt_node: Row[Any],
    *,
    report: NodeReport | None,
    is_lost: bool = False,
    quarantine: str | None = None,
) -> None:
    """End an attempt on one node and free its GPUs; `quarantine` sets them aside instead, with that reason."""
    columns: dict[str, Any] = {"ended_at": tx.now, "is_lost": is_lost}
    if report is not None:
        columns["report"] = json.dumps(dataclasses.asdict(report), ensure_ascii=False)
    move_attempt_node(tx, attempt_node.id, AttemptNodeState.ENDED, columns=columns)
    held = tx.connection.execute(
        update(allocations)
        .where(allocations.c.attempt_node_id == attempt_node.id, allocations.c.released_at.is_(None))
        .values(released_at=tx.now)
        .returning(allocations.c.gpu_index)
    ).all()
    if quarantine and held:
        tx.connection.execute(
            update(gpus)
            .where(gpus.c.node_id == attempt_node.node_id, gpus.c.gpu_index.in_([row.gpu_index for row in held]))
            .values(quarantine_reason=quarantine)
        )
    tx.connection.execute(
        update(jobs)
        .where(jobs.c.id == select(attempts.c.job_id).where(attempts.c.id == attempt_node.attempt_id).scalar_subquery())
        .values(gpu_seconds=jobs.c.gpu_seconds + len(held) * (tx.now - attempt_node.created_at))
    )
    tx.wake("schedule")


def settle_attempt(tx: Write, attempt_id: int) -> None:
    """End the attempt and move its job on, if all its nodes have ended; else do nothing."""
    num_open = tx.connection.execute(
        select(func.count())
        .select_from(attempt_nodes)
        .where(attempt_nodes.c.attempt_id == attempt_id, attempt_nodes.c.state != AttemptNodeState.ENDED)
    ).scalar_one()
    attempt = tx.connection.execute(select(attempts).where(attempts.c.id == attempt_id)).one()
    if num_open or attempt.state == AttemptState.ENDED:
        return
    job = tx.connection.execute(select(jobs).where(jobs.c.id == attempt.job_id)).one()
    spec = JobSpec.from_json(job.spec)
    endings = load_endings(tx, attempt_id)
    cause = _stored_cause(attempt) or decide(attempt, endings, spec)
    if job.is_cancel_wished and cause.outcome is not Outcome.CANCELLED:
        # An acknowledged cancel wins over whatever was reported after it.
        cause = Cause(outcome=Outcome.CANCELLED, detail=job.cancel_detail, note=cause.note)
    verdict = retry_verdict(
        cause.outcome,
        cause.exit_code,
        spec.retry,
        num_charged=job.num_charged_retries,
        num_pool_retries=job.num_pool_retries,
        num_same=_num_ended_as(tx, job.id, cause.outcome),
        is_unasked=cause.is_unasked,
        goes_on_at_limit=job.on_time_limit == "requeue",
        has_checkpoint=attempt.checkpointed_at is not None,
    )
    told = {**describe_cause(cause, job.id, endings), "stop_reason": _stop_reason(attempt, endings)}
    told["fix"] = fix_told(cause.outcome, told["fix"], is_retried=verdict.is_due)
    accounts = _accounts(tx, attempt, is_last=not verdict.is_due)
    move_attempt(
        tx,
        attempt_id,
        AttemptState.ENDED,
        columns={
            "ended_at": tx.now,
            "outcome": str(cause.outcome),
            "cause": json.dumps(told, ensure_ascii=False),
            "lost_gpu_seconds": accounts.lost_gpu_seconds if cause.outcome is Outcome.PREEMPTED else 0.0,
        },
        new_directive=True,
    )
    _move_on(tx, job, attempt, cause.outcome, told, verdict, accounts)
    tx.wake(f"log:{attempt_id}", "schedule")


def _accounts(tx: Write, attempt: Row[Any], *, is_last: bool) -> RunAccounts:
    """What is kept of the attempt. Of one whose progress was given up, nothing is."""
    is_forgotten = attempt.forgotten_at is not None
    run = EndedRun(
        created_at=attempt.created_at,
        running_at=attempt.running_at,
        ended_at=tx.now,
        checkpointed_at=None if is_forgotten else attempt.checkpointed_at,
        num_gpus=attempt.num_nodes * attempt.gpus_per_node,
        progress=None if is_forgotten or not attempt.progress else Progress.from_json(json.loads(attempt.progress)),
        is_last=is_last,
    )
    return account_run(run, least_report_seconds=REPORT_COUNTS_AFTER_SECONDS)


def _num_ended_as(tx: Write, job_id: int, outcome: Outcome) -> int:
    """How many earlier attempts of the job ended with this outcome; counted only where the table bounds them."""
    if OUTCOME_RULES[outcome].retry_limit is None:
        return 0
    return tx.connection.execute(
        select(func.count())
        .select_from(attempts)
        .where(attempts.c.job_id == job_id, attempts.c.outcome == str(outcome), attempts.c.state == AttemptState.ENDED)
    ).scalar_one()


def decide(attempt: Row[Any], endings: Sequence[NodeEnding], spec: JobSpec) -> Cause:
    """The cause of an attempt's end from its row and its nodes' endings."""
    intent = StopIntent(attempt.stop_intent) if attempt.stop_intent else None
    return decide_outcome(endings, intent, intent_detail=attempt.stop_detail, kind=spec.run.kind)


def load_endings(tx: Write, attempt_id: int) -> tuple[NodeEnding, ...]:
    """How each node of an attempt ended, as far as it is known."""
    rows = tx.connection.execute(
        select(attempt_nodes, nodes.c.name.label("node_name"))
        .join(nodes, nodes.c.id == attempt_nodes.c.node_id, isouter=True)
        .where(attempt_nodes.c.attempt_id == attempt_id)
        .order_by(attempt_nodes.c.node_rank)
    )
    return tuple(
        NodeEnding(
            node_name=row.node_name or f"removed node {row.node_id}",
            node_rank=row.node_rank,
            report=decode(NodeReport, json.loads(row.report)) if row.report else None,
            is_lost=row.is_lost,
            clock_offset_seconds=row.clock_offset_seconds,
        )
        for row in rows
    )


def describe_cause(cause: Cause, job_id: int, endings: Sequence[NodeEnding]) -> dict[str, Any]:
    """The cause as stored and as the API shows it: sentence, fix, first failing rank, and every rank's end."""
    rule = OUTCOME_RULES[cause.outcome]
    sentence = rule.sentence.format(detail=cause.detail)
    fix = cause.fix or rule.fix.format(job=job_id, rank=cause.rank or 0)
    return {
        "outcome": str(cause.outcome),
        "sentence": sentence[:1].upper() + sentence[1:],
        "fix": fix,
        "fault": str(rule.fault),
        "rank": cause.rank,
        "node": cause.node_name,
        "exit_code": cause.exit_code,
        "signal": cause.signal,
        "error": dataclasses.asdict(cause.error) if cause.error else None,
        "note": cause.note,
        "ranks": [
            {
                "rank": rank.rank,
                "node": ending.node_name,
                "exit_code": rank.exit_code,
                "signal": rank.signal,
                "stopped_by_us": rank.stopped_by_us,
                "killed_after_grace": rank.killed_after_grace,
            }
            for ending in endings
            if ending.report
            for rank in ending.report.ranks
        ],
    }


def _stop_reason(attempt: Row[Any], endings: Sequence[NodeEnding]) -> str | None:
    """The `StopIntent` that its ranks could read: the service's, else a supervisor's own; None: nobody stopped it."""
    own = (ending.report.stop_intent for ending in endings if ending.report and ending.report.stop_intent)
    return attempt.stop_intent or next(own, None)


def _stored_cause(attempt: Row[Any]) -> Cause | None:
    """The cause that the settle deadline fixed before all nodes had ended."""
    if attempt.cause is None:
        return None
    stored = json.loads(attempt.cause)["fixed"]
    return Cause(**{**stored, "outcome": Outcome(stored["outcome"])})


def _move_on(
    tx: Write,
    job: Row[Any],
    attempt: Row[Any],
    outcome: Outcome,
    told: dict[str, Any],
    verdict: RetryVerdict,
    accounts: RunAccounts,
) -> None:
    cause = json.dumps(told, ensure_ascii=False)
    if verdict.is_due:
        to = JobState.WAITING
        text = f"Attempt {attempt.number} ended: {told['sentence']} ({verdict.text})"
        columns = {
            "cause": cause,
            "outcome": None,
            "start_reason": str(outcome),
            "not_before": tx.now + verdict.delay_seconds if verdict.delay_seconds else None,
            **_waits_again(tx, job, attempt, outcome, accounts),
            "num_charged_retries": job.num_charged_retries + verdict.is_charged,
            "num_pool_retries": job.num_pool_retries + verdict.is_pool_retry,
            "reason": json.dumps(
                # Everybody sees why a job waits; the sentence may quote the job's own exception.
                {
                    "code": "submitted",
                    "text": f"It starts again: attempt {attempt.number} ended as {outcome}.",
                    "fix": "Nothing to do.",
                }
            ),
        }
    else:
        to = OUTCOME_RULES[outcome].job_state
        text = told["sentence"] + (f" ({verdict.text})" if verdict.text else "")
        served = job.served_seconds + accounts.useful_seconds
        columns = {
            "cause": cause,
            "outcome": str(outcome),
            "ended_at": tx.now,
            "reason": None,
            "served_seconds": served,
        }
    move_job(
        tx,
        job.id,
        to,
        actor="service",
        text=text,
        data={"outcome": str(outcome), "fix": told["fix"]},
        attempt_number=attempt.number,
        columns=columns,
    )


def _waits_again(
    tx: Write, job: Row[Any], attempt: Row[Any], outcome: Outcome, accounts: RunAccounts
) -> dict[str, Any]:
    """The columns of a job's wait for its next attempt: since when, and what it has behind and before it.

    A limit counts anew after it was reached, and after the job's progress was given up.
    """
    is_anew = attempt.forgotten_at is not None
    measured = accounts.measured_left_seconds
    if measured is None and job.measured_left_seconds is not None and not is_anew:
        measured = max(0.0, job.measured_left_seconds - accounts.useful_seconds)
    is_preempted = attempt.stop_intent == StopIntent.PREEMPT and attempt.nominated_for is not None
    return {
        "wait_began_at": tx.now,
        "num_stops": job.num_stops + is_preempted,
        "served_seconds": (
            0.0 if is_anew or outcome is Outcome.TIME_LIMIT else job.served_seconds + accounts.useful_seconds
        ),
        "measured_left_seconds": measured,
    }
