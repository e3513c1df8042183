"""`gang hold`: keep jobs from starting until they are released.

Not for: stopping what runs (`gang requeue`, `gang cancel`).
"""

from __future__ import annotations

import click

from gangline.cli.options import gang_command
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session


@gang_command()
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
@click.option("--reason", default="", metavar="TEXT", help="Shown to whoever looks at the job.")
def hold(session: Session, jobs: tuple[str, ...], reason: str) -> None:
    """Keep JOBs from starting until gang release. One that runs goes on, and does not start again once it stops."""
    client = session.client
    with session.busy("Holding"):
        after = [client.hold(job_id, reason=reason) for job_id in dict.fromkeys(map(client.job_id, jobs))]
    if session.is_json:
        answers = [job.raw for job in after]
        session.json(answers[0] if len(answers) == 1 else {"items": answers})
        return
    for job in after:
        by = f" by {job.held.by}" if job.held is not None else ""
        goes_on = "" if job.state == "waiting" else f"; it is {job.state} and goes on"
        session.out(clean_inline(f"{job.id} {job.name} is held{by}{goes_on}"))
    session.note(f"  release   gang release {' '.join(str(job.id) for job in after)}")
