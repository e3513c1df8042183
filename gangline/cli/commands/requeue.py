"""`gang requeue`: stop jobs at a checkpoint, so that they start again when their turn comes.

Not for: ending jobs (`gang cancel`) or submitting them anew (`gang submit`).
"""

from __future__ import annotations

import click

from gangline.cli.consent import ask
from gangline.cli.each import Failures
from gangline.cli.options import gang_command
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.cli.words import condition
from gangline.client.models import Job
from gangline.protocol.outcomes import ExitCode


@gang_command()
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
@click.option("--reason", default="", metavar="TEXT", help="Shown to whoever looks at the job.")
@click.option("--from-start", is_flag=True, help="Give up its checkpoints: begin anew, on any node.")
@click.option("-y", "--yes", is_flag=True, help="Do not ask before stopping more than one job.")
def requeue(session: Session, jobs: tuple[str, ...], reason: str, from_start: bool, yes: bool) -> ExitCode:
    """Stop JOBs at a checkpoint; they start again from there when their turn comes, at no charge.

    A job that waits for the place of its checkpoints is freed with --from-start.
    """
    client, failures = session.client, Failures()
    with session.busy("Asking"):
        found = list({job.id: job for job in failures.each(jobs, client.job)}.values())
    if len(found) > 1 and not yes:
        ask(session, found, "requeue")
    with session.busy("Requeueing"):
        after = failures.each(found, lambda job: client.requeue(job.id, reason=reason, from_start=from_start))
    if session.is_json:
        failures.print_json(session, [job.raw for job in after])
        return failures.tell(session)
    for job in after:
        session.out(f"{job.id} {clean_inline(job.name)} {_where_from(job, from_start=from_start)}")
    return failures.tell(session)


def _where_from(job: Job, *, from_start: bool) -> str:
    state = clean_inline(condition(job.state))
    if from_start:
        return f"{state}, starts again from the beginning"
    if job.checkpoint is None:
        return f"{state}, starts again from what it saves now"
    return f"{state}, starts again from step {job.checkpoint.step} or what it saves now"
