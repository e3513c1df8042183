"""`gang why`: why a job is not running, what is ahead of it, and what would help.

Not for: the whole job (`gang show`).
"""

from __future__ import annotations

from datetime import datetime

from gangline.cli.options import gang_command, job_argument
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.cli.start_words import blocking, quota_lines, start_sentence, variant_line
from gangline.cli.words import condition, count, local_time
from gangline.client.models import Job
from gangline.client.queue_models import Why


@gang_command()
@job_argument
def why(session: Session, job: str) -> None:
    """Say why JOB waits (or ended), who is ahead of it or holds GPUs, and what would help."""
    with session.busy("Asking"):
        client = session.client
        answer = client.why(job, variants=True)
        found = client.job(answer.id) if not session.is_json else None
    if found is None:
        session.json(answer.raw)
        return
    for line in lines(answer, found, session.now()):
        session.out(clean_inline(line))


def lines(why: Why, job: Job, now: datetime) -> list[str]:
    """The answer in sentences."""
    head = f"{job.id} {job.name}"
    if why.reason is None:
        return [f"{head} {_ended_or_going(job)}", *_cause(job)]
    verb = "waits" if why.state == "waiting" else f"is {why.state}"
    result = [f"{head} {verb}.", f"  {why.reason.text}"]
    if why.state == "waiting":
        if why.can_ever_start is False:
            result.append("  It can never start as it is.")
        result += [f"  {line}" for line in _others(why)]
        if why.start is not None:
            result.append(f"  {start_sentence(why.start, now)}")
        elif why.estimated_start is not None:
            result.append(f"  Starts at about {local_time(why.estimated_start, now)}.")
        if why.quota is not None:
            result += [f"  {line}" for line in quota_lines(why.quota)]
    if why.reason.fix:
        result.append(f"  fix: {why.reason.fix}")
    result += [f"  sooner: {variant_line(variant)}" for variant in why.variants]
    if why.advice is not None:
        result.append(f"  limit: {why.advice.text}")
    return result


def _others(why: Why) -> list[str]:
    """Who is ahead in the queue, and who holds what it needs. A job without a place in the queue has nobody ahead."""
    names = [blocking(job) for job in why.ahead.jobs]
    if why.ahead.count > len(names):
        names.append(f"{why.ahead.count - len(names)} more")
    lines = []
    if names:
        lines.append(f"Ahead of it: {count(why.ahead.count, 'job')}: {', '.join(names)}.")
    elif why.position is not None:
        lines.append("Ahead of it: nothing.")
    if why.holders:
        lines.append(f"Holding GPUs: {', '.join(blocking(job) for job in why.holders)}.")
    return lines


def _ended_or_going(job: Job) -> str:
    return f"{condition(job.state)}." if job.is_terminal else f"{condition(job.state)}; nothing holds it up."


def _cause(job: Job) -> list[str]:
    if job.cause is None or not job.is_terminal or job.state == "succeeded":
        return []
    fix = [f"  fix: {job.cause.fix}"] if job.cause.fix else []
    return [f"  {job.cause.sentence or job.cause.outcome}", *fix]
