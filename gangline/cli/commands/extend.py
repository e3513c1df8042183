"""`gang extend`: give a job more time.

Not for: the limit that a job is submitted with (`resources.time` in its file).
"""

from __future__ import annotations

import click

from gangline.cli.options import DURATION, gang_command, job_argument
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.protocol.durations import exact_duration


@gang_command()
@job_argument
@click.argument("limit", type=DURATION, metavar="LIMIT")
def extend(session: Session, job: str, limit: float) -> None:
    """Let JOB run for LIMIT in all, such as 8h: not so much more, but the total from the start of its attempt.

    Granted unless another job would start later than it was promised; the answer names that one.
    """
    with session.busy("Asking"):
        after = session.client.extend(job, limit)
    if session.is_json:
        session.json(after.raw)
        return
    session.out(clean_inline(f"{after.id} {after.name} may run for {exact_duration(limit)} in all"))
