"""`gang wait`: stay until a job has ended; the exit code says how.

Not for: output of the job (`gang logs -f`).
"""

from __future__ import annotations

import click

from gangline.cli.options import DURATION, gang_command, job_argument
from gangline.cli.session import Session
from gangline.cli.waiting import wait_for
from gangline.protocol.outcomes import ExitCode


@gang_command()
@job_argument
@click.option(
    "--timeout",
    "limit_seconds",
    type=DURATION,
    metavar="TIME",
    help="Wait at most this long: 90s, 12h. Default: forever.",
)
def wait(session: Session, job: str, limit_seconds: float | None) -> ExitCode:
    """Wait until JOB has ended.

    Exit code: 0 succeeded, 10 failed, 11 cancelled, 12 waited too long (the job goes on), 13 lost node or time limit.
    Ctrl-C only stops waiting.
    """
    found = session.client.job(job)
    if limit_seconds is not None:
        session.timeout_seconds = limit_seconds
    return wait_for(session, found)
