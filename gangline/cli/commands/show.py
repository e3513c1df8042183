"""`gang show`: all about one job, with its history.

Not for: logs and curves.
"""

from __future__ import annotations

from datetime import datetime

import click

from gangline.cli.options import gang_command, job_argument
from gangline.cli.sanitise import clean, clean_inline
from gangline.cli.session import Session
from gangline.cli.text_width import pad
from gangline.cli.words import NOTHING, bar, count, duration, gpus, local_time, metric_value, priority
from gangline.client.models import Cause, EndedAttempt, Job, JobEvent, RankEnd

LABEL_WIDTH = 11
MAX_METRICS_SHOWN = 8
Lines = list[tuple[str, str]]
"""Label and text; an empty label continues the one before."""


@gang_command()
@job_argument
@click.option("--events", "with_events", is_flag=True, help="Also the job's history.")
def show(session: Session, job: str, with_events: bool) -> None:
    """Show all about one JOB: state, gang, progress, cause of its end."""
    with session.busy("Asking"):
        found = session.client.job(job)
        events = list(session.client.events(found)) if with_events else []
    if session.is_json:
        answer = dict(found.raw)
        if with_events:
            answer["events"] = [event.raw for event in events]
        session.json(answer)
        return
    now = session.now()
    session.out(f"{found.id}  {clean_inline(found.name)}  {session.paint(found.state, found.state)}")
    for label, text in [*_facts(found, now), *_ending(found), *_history(events, now)]:
        head, *rest = clean(text).split("\n")
        session.out(f"  {pad(label, LABEL_WIDTH)}{head}".rstrip())
        for line in rest:
            session.out(f"  {' ' * LABEL_WIDTH}{line}".rstrip())


def _facts(job: Job, now: datetime) -> Lines:
    team = f" (team {job.team}{', private' if job.private else ''})" if job.team else ""
    lines: Lines = [
        ("owner", f"{job.owner}{team}"),
        ("resources", gpus(job)),
        ("times", _times(job, now)),
    ]
    if job.reason is not None:
        lines.append(("reason", job.reason.text))
        if job.reason.fix:
            lines.append(("fix", job.reason.fix))
    if job.attempt is not None:
        nodes = [f"{node.name or 'a removed node'} {list(node.gpus)} {node.state}" for node in job.attempt.nodes]
        lines.append(("attempt", f"{job.attempt.number}, {job.attempt.state}, on {', '.join(nodes) or 'no node'}"))
    if job.progress is not None:
        lines.append(("progress", _progress(job)))
    if job.checkpoint is not None:
        lines.append(("checkpoint", f"step {job.checkpoint.step}, {local_time(job.checkpoint.accepted_at, now)}"))
    if job.tags:
        lines.append(("tags", ", ".join(f"{name}={value}" for name, value in job.tags.items())))
    if job.priority:
        lines.append(("priority", priority(job.priority)))
    if job.held is not None:
        why = f": {job.held.why}" if job.held.why else ""
        lines.append(("held", f"by {'admin ' if job.held.is_by_admin else ''}{job.held.by}{why}"))
    if job.start_after is not None and not job.is_terminal:
        lines.append(("not before", job.start_after.isoformat()))
    seconds = job.cost.get("gpu_seconds")
    if isinstance(seconds, int | float) and seconds:
        lines.append(("used", f"{duration(seconds)} of GPU time"))
    return lines


def _times(job: Job, now: datetime) -> str:
    """When it was submitted, ran and ended; how long it waited before the first attempt and before the present one."""
    last = job.last_attempt
    parts = [f"submitted {local_time(job.submitted_at, now)}"]
    if job.started_at is not None:
        first = "first started" if last is not None and last.number + (job.attempt is not None) > 1 else "started"
        parts.append(f"{first} {local_time(job.started_at, now)}{_waited(job.submitted_at, job.started_at)}")
    if job.ended_at is not None:
        parts.append(f"ended {local_time(job.ended_at, now)}{_ran(job)}")
    elif job.state == "waiting":
        parts += [] if last is None else [f"ran before: {_ended_attempt(last, now)}"]
    else:
        parts += _going(job, now)
    return ", ".join(parts)


def _going(job: Job, now: datetime) -> list[str]:
    """Since when the present attempt runs; nothing while its ranks do not run yet."""
    attempt, last = job.attempt, job.last_attempt
    if attempt is None or attempt.started_at is None:
        return []
    running = f"running for {_length(attempt.started_at, now)}"
    if attempt.number == 1:
        return [running]
    waited = "" if last is None else _waited(last.ended_at, attempt.started_at)
    return [f"attempt {attempt.number} started {local_time(attempt.started_at, now)}{waited}", running]


def _ran(job: Job) -> str:
    """How long the attempt ran with which a job ended; of one that was cancelled while it waited, the one before."""
    last = job.last_attempt
    if last is None or last.started_at is None:
        return ""
    which = "" if last.number == 1 else f"attempt {last.number} "
    return f" ({which}ran {_length(last.started_at, last.ended_at)})"


def _ended_attempt(last: EndedAttempt, now: datetime) -> str:
    """`attempt 1, 4m36s, until 18:45:21`."""
    ran = "not started" if last.started_at is None else _length(last.started_at, last.ended_at)
    return f"attempt {last.number}, {ran}, until {local_time(last.ended_at, now)}"


def _waited(since: datetime | None, until: datetime) -> str:
    return "" if since is None else f" (waited {_length(since, until)})"


def _length(start: datetime, end: datetime | None) -> str:
    return NOTHING if end is None else duration((end - start).total_seconds())


def _progress(job: Job) -> str:
    progress = job.progress
    assert progress is not None
    parts = []
    if progress.fraction is not None:
        parts.append(f"{bar(progress.fraction)} {progress.fraction * 100:.0f}%")
    if progress.step is not None:
        parts.append(f"step {progress.step}" + (f" of {progress.total_steps}" if progress.total_steps else ""))
    if progress.phase:
        parts.append(progress.phase)
    names = list(progress.metrics)[:MAX_METRICS_SHOWN]
    parts += [f"{name} {metric_value(progress.metrics[name])}" for name in names]
    if len(progress.metrics) > len(names):
        parts.append(f"and {count(len(progress.metrics) - len(names), 'more metric')}")
    if progress.eta_seconds is not None and not job.is_terminal:
        parts.append(f"left about {duration(progress.eta_seconds)}")
    return "  ".join(parts) or NOTHING


def _ending(job: Job) -> Lines:
    """Why it ended; of a job that goes on, why the attempt before ended, told as what it is."""
    cause = job.cause
    if cause is None or job.state == "succeeded":
        return []
    if not job.is_terminal:
        return _last_attempt(job, cause)
    lines: Lines = [("cause", cause.sentence or cause.outcome), *_detail_lines(cause)]
    if cause.fix:
        lines.append(("fix", cause.fix))
    for index, rank in enumerate(cause.ranks):
        lines.append(("ranks" if index == 0 else "", _rank_end(rank)))
    if cause.error is not None and cause.error.traceback:
        lines.append(("traceback", cause.error.traceback.rstrip()))
    return lines


def _last_attempt(job: Job, cause: Cause) -> Lines:
    """Without a fix, since the job goes on, and without the ranks that were asked to stop, since all were."""
    number = "" if job.last_attempt is None else f" ({job.last_attempt.number})"
    ranks = [rank for rank in cause.ranks if not rank.stopped_by_us]
    return [
        ("before", f"last attempt{number}: {cause.sentence or cause.outcome}"),
        *_detail_lines(cause),
        *(("", f"rank {_rank_end(rank)}") for rank in ranks),
    ]


def _detail_lines(cause: Cause) -> Lines:
    details = _cause_details(cause)
    return [("", details)] if details else []


def _cause_details(cause: Cause) -> str:
    parts = []
    if cause.rank is not None:
        parts.append(f"rank {cause.rank}" + (f" on {cause.node}" if cause.node else ""))
    if cause.signal:
        parts.append(f"signal {cause.signal}")
    elif cause.exit_code is not None:
        parts.append(f"exit code {cause.exit_code}")
    if cause.note:
        parts.append(cause.note)
    return ", ".join(parts)


def _rank_end(rank: RankEnd) -> str:
    how = f"signal {rank.signal}" if rank.signal else f"exit code {rank.exit_code}"
    if rank.signal is None and rank.exit_code is None:
        how = "did not start"
    ours = ", killed after grace" if rank.killed_after_grace else ", stopped by Gangline" if rank.stopped_by_us else ""
    return f"{rank.rank}" + (f" on {rank.node}" if rank.node else "") + f": {how}{ours}"


def _history(events: list[JobEvent], now: datetime) -> Lines:
    lines: Lines = []
    for index, event in enumerate(events):
        where = "".join(f"  {word}" for word in (event.node, event.actor) if word)
        text = clean_inline(f"{event.text or event.kind}{where}")
        lines.append(("events" if index == 0 else "", f"{local_time(event.at, now)}  {text}"))
    return lines
