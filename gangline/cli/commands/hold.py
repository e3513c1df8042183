"""`gang hold`: keep jobs from starting until they are released.

Not for: stopping what runs (`gang requeue`, `gang cancel`).
"""

from __future__ import annotations

import click

from gangline.cli.each import Failures
from gangline.cli.options import gang_command
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.protocol.outcomes import ExitCode


@gang_command()
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
@click.option("--reason", default="", metavar="TEXT", help="Shown to whoever looks at the job.")
def hold(session: Session, jobs: tuple[str, ...], reason: str) -> ExitCode:
    """Keep JOBs from starting until gang release. One that runs goes on, and does not start again once it stops."""
    client, failures = session.client, Failures()
    with session.busy("Holding"):
        ids = dict.fromkeys(failures.each(jobs, client.job_id))
        after = failures.each(ids, lambda job_id: client.hold(job_id, reason=reason))
    if session.is_json:
        failures.print_json(session, [job.raw for job in after])
        return failures.tell(session)
    for job in after:
        by = f" by {job.held.by}" if job.held is not None else ""
        goes_on = "" if job.state == "waiting" else f"; it is {job.state} and goes on"
        session.out(clean_inline(f"{job.id} {job.name} is held{by}{goes_on}"))
    if after:
        session.note(f"  release   gang release {' '.join(str(job.id) for job in after)}")
    return failures.tell(session)
