"""`gang priority`: change the priority of a job.

Not for: who may use the top one (`gang admin grant-priority`).
"""

from __future__ import annotations

import re

import click

from gangline.cli.options import gang_command, job_argument
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session

_NUMBER = re.compile(r"[+-]?[0-9]{1,4}")


@gang_command()
@job_argument
@click.argument("value")
def priority(session: Session, job: str, value: str) -> None:
    """Give JOB the priority VALUE: low, normal, high, a number from -100 to 100, or top for whom an admin granted it.

    It counts from the job's next turn on; the job file that was submitted stays as it was.
    """
    with session.busy("Asking"):
        after = session.client.set_priority(job, int(value) if _NUMBER.fullmatch(value) else value)
    if session.is_json:
        session.json(after.raw)
        return
    session.out(clean_inline(f"{after.id} {after.name} has priority {value}"))
