"""`gang submit`: send a job file, say what becomes of the job, wait for it if asked.

Ctrl-C while the request is in flight answers the question that matters: does the job exist? Not for: validation, which
is the server's (`gang check` asks for it alone).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Callable, Iterator
from types import FrameType

import click

from gangline.cli import job_files
from gangline.cli.model_profile import profile_option, profiled
from gangline.cli.options import gang_command, set_option
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.cli.waiting import wait_for
from gangline.cli.words import gpus
from gangline.client.base import new_key
from gangline.client.errors import GanglineError
from gangline.client.job_file import JobFile
from gangline.client.models import Job
from gangline.protocol.outcomes import ExitCode

FIRST_LOOK_SECONDS = 0.5


@gang_command()
@click.argument("file")
@set_option
@click.option("--wait", is_flag=True, help="Wait until the job has ended; the exit code says how.")
@click.option("--cancel-on-interrupt", is_flag=True, help="With --wait: Ctrl-C (or SIGTERM) cancels the job. For CI.")
@click.option("--key", metavar="KEY", help="Idempotency key: the same key never makes a second job.")
@profile_option
def submit(
    session: Session,
    file: str,
    overrides: tuple[str, ...],
    wait: bool,
    cancel_on_interrupt: bool,
    key: str | None,
    wants_profile: bool,
) -> ExitCode | None:
    """Submit a job FILE (`-` for stdin).

    Code named by a relative path, or not named at all (then the file's folder), is packed and uploaded. Ctrl-C never
    stops the job. With --wait: exit 0 succeeded, 10 failed, 11 cancelled, 12 --timeout is over, 13 lost node or time
    limit.
    """
    if cancel_on_interrupt and not wait:
        raise click.UsageError("--cancel-on-interrupt needs --wait: without it the command does not stay.")
    job_file = job_files.load(session, file, overrides)
    if wants_profile:
        job_file = profiled(session, file, job_file)
    job = _send(session, job_file, key or new_key())
    if not (session.is_json or wait):
        job = _after_first_look(session, job)
    if not (session.is_json and wait):
        _show(session, job)
    if not wait:
        return None
    if not cancel_on_interrupt:
        return wait_for(session, job)
    try:
        with _interrupted_by_sigterm():
            return wait_for(session, job, detaches=False)
    except KeyboardInterrupt:
        cancelled = session.client.cancel(job.id, reason="interrupted while waiting")
        session.note(f"Interrupted: job {job.id} is cancelled, its state is {cancelled.state}.")
        return ExitCode.INTERRUPTED


def _send(session: Session, job_file: JobFile, key: str) -> Job:
    """Submit; on Ctrl-C find out what happened before leaving."""
    is_sending = False

    def on_step(text: str) -> None:
        nonlocal is_sending
        is_sending = text == "Submitting"
        spinner.tell(text)

    try:
        with session.busy("Submitting") as spinner, job_files.faults_located(job_file):
            return session.client.submit(job_file, key=key, on_step=on_step)
    except KeyboardInterrupt:
        if not is_sending:
            session.note("Interrupted before anything was submitted.")
            raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None
        _say_whether_it_exists(session, lambda: session.client.submit(job_file, key=key), key)
        raise click.exceptions.Exit(ExitCode.INTERRUPTED) from None


def _say_whether_it_exists(session: Session, ask_again: Callable[[], Job], key: str) -> None:
    """The same request with the same key: whether or not the first one arrived, now there is one job."""
    session.close()  # the connection is in the middle of an answer
    try:
        with session.busy("Finding out whether the job was submitted"):
            job = ask_again()
    except GanglineError as error:
        session.note(f"Interrupted: it is not known whether the job was submitted ({error.detail}).")
        session.note(f"fix: run the command again with --key {key}; that never makes a second job")
        return
    session.still_there(job, "waiting for the answer", f"gang logs -f {job.id}")


def _after_first_look(session: Session, job: Job) -> Job:
    """The job once the scheduler has looked at it, which takes it a moment: then its reason says something."""
    try:
        return session.client.poll(job, FIRST_LOOK_SECONDS)
    except (GanglineError, KeyboardInterrupt):
        return job  # it is submitted, and that is what has to be said


def _show(session: Session, job: Job) -> None:
    if session.is_json:
        session.json(job.raw)
        return
    session.out(f"Submitted {job.id}  {clean_inline(job.name)}  {clean_inline(gpus(job))}")
    session.note(_outlook(job))
    session.note(f"  logs   gang logs -f {job.id}\n  stop   gang cancel {job.id}")


def _outlook(job: Job) -> str:
    if job.state == "waiting":
        return f"Waiting: {job.reason.text}" if job.reason else "Waiting for its turn."
    return f"It is {job.state}."


@contextlib.contextmanager
def _interrupted_by_sigterm() -> Iterator[None]:
    """CI systems stop a step by SIGTERM: inside the block it counts as Ctrl-C."""

    def interrupt(number: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGTERM, interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
