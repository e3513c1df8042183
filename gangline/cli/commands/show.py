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
from gangline.cli.words import NOTHING, bar, count, duration, gpus, local_time, metric_value
from gangline.client.models import Cause, Job, JobEvent, RankEnd

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
        lines.append(("priority", str(job.priority)))
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
    parts = [f"submitted {local_time(job.submitted_at, now)}"]
    if job.started_at is not None:
        waited = (
            f" (waited {duration((job.started_at - job.submitted_at).total_seconds())})" if job.submitted_at else ""
        )
        parts.append(f"started {local_time(job.started_at, now)}{waited}")
    if job.ended_at is not None:
        ran = f" (ran {duration((job.ended_at - job.started_at).total_seconds())})" if job.started_at else ""
        parts.append(f"ended {local_time(job.ended_at, now)}{ran}")
    elif job.started_at is not None:
        parts.append(f"running for {duration((now - job.started_at).total_seconds())}")
    return ", ".join(parts)


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
    cause = job.cause
    if cause is None or job.state == "succeeded":
        return []
    lines: Lines = [("cause", cause.sentence or cause.outcome)]
    details = _cause_details(cause)
    if details:
        lines.append(("", details))
    if cause.fix:
        lines.append(("fix", cause.fix))
    for index, rank in enumerate(cause.ranks):
        lines.append(("ranks" if index == 0 else "", _rank_end(rank)))
    if cause.error is not None and cause.error.traceback:
        lines.append(("traceback", cause.error.traceback.rstrip()))
    return lines


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
