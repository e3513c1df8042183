"""`gang release`: let held jobs take their turn.

Not for: machines that do not answer (`gang node release`).
"""

from __future__ import annotations

import click

from gangline.cli.each import Failures
from gangline.cli.options import gang_command
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.cli.words import condition
from gangline.protocol.outcomes import ExitCode


@gang_command()
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
def release(session: Session, jobs: tuple[str, ...]) -> ExitCode:
    """Let held JOBs take their turn; the time in which they were held does not count as waiting."""
    client, failures = session.client, Failures()
    with session.busy("Releasing"):
        ids = dict.fromkeys(failures.each(jobs, client.job_id))
        after = failures.each(ids, client.release)
    if session.is_json:
        failures.print_json(session, [job.raw for job in after])
        return failures.tell(session)
    for job in after:
        session.out(clean_inline(f"{job.id} {job.name} is not held; it {condition(job.state)}"))
    return failures.tell(session)
