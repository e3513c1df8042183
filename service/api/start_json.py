"""Start ranges, what-ifs and faces of jobs as the API shows them.

Not for: working them out (`service.scheduler`).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from sqlalchemy import Connection, Row, select

from service.api.deps import JOB_ROW, AppState, job_facts
from service.api.job_json import least_gpus
from service.auth.permissions import may_read
from service.auth.principals import Principal
from service.clock import rfc3339
from service.db.tables import attempts, jobs
from service.domain.gang_layout import fixed_layout
from service.domain.limit_advice import LimitAdvice, advise_limit, words_of
from service.domain.reasons import REASON_MEANINGS, Reason, ReasonCode
from service.domain.states import AttemptState
from service.operations.explain_job import look
from service.operations.load_limit_history import load_limit_history
from service.operations.submit_job import Submission
from service.scheduler.facts import WaitingJob
from service.scheduler.forecast import Forecast
from service.scheduler.holds import HoldFacts, hold_of
from service.scheduler.what_if import Outlook, Variant

NEWCOMER_ID = 2**62
"""Stands for a job that has no id yet: the last of equals."""


def start_json(forecast: Forecast, at: float) -> dict[str, Any]:
    """A start range: times, and seconds from `at`; all null and `why_unknown` where it is not known."""
    return {
        "low": _time(forecast.low, at),
        "p50": _time(forecast.p50, at),
        "p90": _time(forecast.p90, at),
        "low_seconds": forecast.low,
        "p50_seconds": forecast.p50,
        "p90_seconds": forecast.p90,
        "why_unknown": forecast.why_unknown,
    }


def _time(seconds: float | None, at: float) -> str | None:
    return None if seconds is None else rfc3339(at + seconds)


def dry_run_json(state: AppState, principal: Principal, submission: Submission) -> dict[str, Any]:
    """What would become of the job if it were submitted now. Stores nothing."""
    with state.database.read() as connection:
        now = state.database.now(connection)
        history = load_limit_history(
            connection, principal.user_id, submission.gang.num_nodes * submission.gang.gpus_per_node
        )
    advice = advise_limit(history, submission.spec.resources.time_limit_seconds)
    newcomer = newcomer_of(submission, principal.user_id, now)
    outlook, variants = look(state.held, newcomer, None if advice is None else advice.limit_seconds)
    with state.database.read() as connection:
        stops = faces(connection, principal, outlook.stops)
        others = {
            job_id: face
            for variant in variants
            for job_id, face in zip(
                variant.outlook.stops, faces(connection, principal, variant.outlook.stops), strict=False
            )
        }
    return {
        "reason": None if outlook.reason is None else outlook.reason.to_json(),
        "starts_now": outlook.starts_in == 0.0,
        "starts_in_seconds": outlook.starts_in,
        "would_stop": stops,
        "start": start_json(outlook.forecast, now),
        "variants": [_variant_json(variant, outlook, others, now) for variant in variants],
        "advice": advice_json(advice, outlook, variants),
    }


def newcomer_of(submission: Submission, user_id: int, now: float) -> WaitingJob:
    """A submission as a job that waits from now on."""
    gang, spec = submission.gang, submission.spec
    held, not_before = None, None
    if spec.hold:
        held = Reason(code=ReasonCode.HELD, text="It would be held since its submission.", fix="Release it.")
    elif spec.after:
        held = Reason(code=ReasonCode.DEPENDENCY, text="It would wait for the jobs that it needs.", fix="")
    elif spec.start_after is not None:
        facts = HoldFacts(job_id=NEWCOMER_ID, start_after=spec.starts_after, start_zone=spec.zone)
        held, not_before = hold_of(facts, now) or (None, None)
    return WaitingJob(
        id=NEWCOMER_ID,
        user_id=user_id,
        team_id=submission.team_id,
        priority=spec.priority,
        submitted_at=now,
        layouts=gang.layouts
        or fixed_layout(gang.num_nodes, gang.gpus_per_node, gang.processes_per_node, gang.cpus_per_node),
        gpu_type=spec.resources.gpu_type,
        gpu_memory_bytes=spec.resources.gpu_memory_bytes,
        labels=tuple(sorted(spec.resources.labels.items())),
        is_exclusive=spec.resources.exclusive,
        memory_bytes_per_node=gang.memory_bytes_per_node,
        limit_seconds=spec.resources.time_limit_seconds,
        is_preemptible=spec.preemptible,
        will_report=submission.training is not None,
        not_before=not_before,
        held_by=held,
    )


def variants_json(variants: Iterable[Variant], base: Outlook, now: float) -> list[dict[str, Any]]:
    """What the job could ask for to start sooner."""
    return [_variant_json(variant, base, {}, now) for variant in variants]


def _variant_json(variant: Variant, base: Outlook, others: dict[int, dict[str, Any]], now: float) -> dict[str, Any]:
    outlook = variant.outlook
    return {
        "kind": variant.kind,
        "value": variant.value,
        "text": _variant_text(variant, base),
        "starts_in_seconds": outlook.starts_in,
        "would_stop": [others[job_id] for job_id in outlook.stops if job_id in others],
        "start": start_json(outlook.forecast, now),
    }


def _variant_text(variant: Variant, base: Outlook) -> str:
    what = {
        "gpus": f"With {variant.value} GPU{'' if variant.value == '1' else 's'}",
        "limit": f"With a limit of {words_of(float(variant.value)) if variant.kind == 'limit' else ''}",
        "gpu_type": f"On {variant.value}",
    }[variant.kind]
    seconds = variant.outlook.seconds or 0.0
    if seconds == 0.0:
        return f"{what} it would start now."
    gained = "" if base.seconds is None else f", about {words_of(base.seconds - seconds)} sooner"
    return f"{what} it would start in about {words_of(seconds)}{gained}."


def advice_json(advice: LimitAdvice | None, base: Outlook | None, variants: Iterable[Variant]) -> dict[str, Any] | None:
    """What the user's own history says of the limit."""
    if advice is None:
        return None
    gained = None
    for variant in variants:
        if variant.kind == "limit" and base is not None and base.seconds is not None:
            gained = base.seconds - (variant.outlook.seconds or 0.0)
    return {
        "text": advice.sentence(gained),
        "limit_seconds": advice.limit_seconds,
        "used_share": round(advice.used_share, 3),
        "jobs": advice.num_jobs,
        "gained_seconds": gained,
    }


def faces(connection: Connection, principal: Principal, ids: Iterable[int]) -> list[dict[str, Any]]:
    """Jobs as this principal may see them, in the order of `ids`; those that are gone are left out."""
    wanted = list(ids)
    if not wanted:
        return []
    rows = {row.id: row for row in connection.execute(JOB_ROW.where(jobs.c.id.in_(wanted)))}
    held = {
        attempt.job_id: attempt.num_nodes * attempt.gpus_per_node
        for attempt in connection.execute(
            select(attempts.c.job_id, attempts.c.num_nodes, attempts.c.gpus_per_node).where(
                attempts.c.job_id.in_(wanted), attempts.c.state != AttemptState.ENDED
            )
        )
    }
    return [face(principal, rows[job_id], held.get(job_id)) for job_id in wanted if job_id in rows]


def reason_json(principal: Principal, row: Row[Any], reason: dict[str, str] | None) -> dict[str, str] | None:
    """Why a job waits, as anybody may see it: of a private one what kind of reason it is, and no word of its own."""
    if reason is None or not row.is_private or may_read(principal, job_facts(row)):
        return reason
    # A code of another version of the service means nothing to this one.
    meaning = REASON_MEANINGS[ReasonCode(reason["code"])] if reason["code"] in list(ReasonCode) else "It waits."
    return {"code": reason["code"], "text": meaning, "fix": ""}


def face(principal: Principal, row: Row[Any], held: int | None) -> dict[str, Any]:
    """A job as anybody may see it: a private one only as such. `held`: the GPUs that it has now, None: it waits."""
    if held is not None:
        facts = {"state": row.state, "gpus": held, "min_gpus": None}
    else:
        facts = {"state": row.state, "gpus": row.num_nodes * row.gpus_per_node, "min_gpus": least_gpus(row.layouts)}
    if row.is_private and not may_read(principal, job_facts(row)):
        return {"id": None, "name": f"a private job of team {row.team}", "owner": None, **facts}
    return {"id": row.id, "name": row.name, "owner": row.owner, **facts}
