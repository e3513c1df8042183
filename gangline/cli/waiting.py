"""Waiting for a job to end, as `wait` and `submit --wait` do it.

Not for: following logs (`gangline.cli.commands.logs`).
"""

from __future__ import annotations

from gangline.cli import exit_codes
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.cli.words import duration, state_note
from gangline.client.models import Job
from gangline.protocol.outcomes import ExitCode


def wait_for(session: Session, job: Job, *, detaches: bool = True) -> ExitCode:
    """Wait until `job` has ended, say how, return the exit code. Ctrl-C detaches, or, without `detaches`, is raised."""
    latest = job
    told = ""

    with session.busy(f"Job {job.id} is {job.state}") as spinner:

        def on_change(changed: Job) -> None:
            nonlocal latest, told
            latest = changed
            spinner.tell(f"Job {changed.id} is {changed.state}  {clean_inline(state_note(changed))}")
            if changed.state != told and not changed.is_terminal and not session.is_json:
                session.note(f"{changed.id} {changed.state}")
                told = changed.state

        try:
            ended = session.client.wait(job, timeout=session.timeout_seconds, on_change=on_change)
        except KeyboardInterrupt:
            if not detaches:
                raise
            ended = None
    if ended is None:
        session.still_there(latest, "waiting", f"gang wait {latest.id}")
        return ExitCode.INTERRUPTED
    if session.is_json:
        session.json(ended.raw)
    else:
        say_how_it_ended(session, ended)
    return exit_codes.of_ended_job(ended.state, ended.outcome)


def say_how_it_ended(session: Session, job: Job, *, to_stderr: bool = False) -> None:
    """One line on how a job ended, and for a failure the cause and the fix."""
    ran = ""
    if job.started_at is not None and job.ended_at is not None:
        ran = f" after {duration((job.ended_at - job.started_at).total_seconds())}"
    line = f"{job.id} {clean_inline(job.name)} {job.state}{ran}"
    if to_stderr:
        session.note(line)
    else:
        session.out(session.paint(job.state, line))
    if job.state == "failed" and job.cause is not None:
        if job.cause.sentence:
            session.note(f"  cause: {job.cause.sentence}")
        if job.cause.fix:
            session.note(f"  fix: {job.cause.fix}")
