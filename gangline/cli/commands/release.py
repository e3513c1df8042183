"""`gang release`: let held jobs take their turn.

Not for: machines that do not answer (`gang node release`).
"""

from __future__ import annotations

import click

from gangline.cli.options import gang_command
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.cli.words import condition


@gang_command()
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
def release(session: Session, jobs: tuple[str, ...]) -> None:
    """Let held JOBs take their turn; the time in which they were held does not count as waiting."""
    client = session.client
    with session.busy("Releasing"):
        after = [client.release(job_id) for job_id in dict.fromkeys(map(client.job_id, jobs))]
    if session.is_json:
        answers = [job.raw for job in after]
        session.json(answers[0] if len(answers) == 1 else {"items": answers})
        return
    for job in after:
        session.out(clean_inline(f"{job.id} {job.name} is not held; it {condition(job.state)}"))
