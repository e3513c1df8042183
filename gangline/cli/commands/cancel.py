"""`gang cancel`: stop jobs.

Not for: waiting until they have stopped (`gang wait`).
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
@click.option("-y", "--yes", is_flag=True, help="Do not ask before stopping more than one job.")
def cancel(session: Session, jobs: tuple[str, ...], reason: str, yes: bool) -> ExitCode:
    """Stop JOBs: they are asked to stop, and killed after their grace. An ended job stays as it is."""
    client, failures = session.client, Failures()

    def stop(job: Job) -> tuple[Job, Job]:
        return job, job if job.is_terminal else client.cancel(job.id, reason=reason)

    with session.busy("Asking"):
        # Each once, in the order given: `gang cancel -1 12` may name one job twice.
        found = list({job.id: job for job in failures.each(jobs, client.job)}.values())
    going = [job for job in found if not job.is_terminal]
    if len(going) > 1 and not yes:
        ask(session, going, "stop")
    with session.busy("Cancelling"):
        done = failures.each(found, stop)
    if session.is_json:
        failures.print_json(session, [job.raw for _, job in done])
        return failures.tell(session)
    for before, job in done:
        already = " already: nothing to stop" if before.is_terminal else ""
        state = session.paint(job.state, clean_inline(condition(job.state)))
        session.out(f"{job.id} {clean_inline(job.name)} {state}{already}")
    return failures.tell(session)
