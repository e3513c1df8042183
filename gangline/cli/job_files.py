"""Reading the job file of `check` and `submit`: `-` for stdin, `--set`, and lines in error messages.

Not for: what a job file may hold, which the server says.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from pathlib import Path

from gangline.cli.options import parse_overrides
from gangline.cli.session import Session
from gangline.client.errors import GanglineError
from gangline.client.job_file import JobFile, located, read_job_file


def load(session: Session, file: str, words: tuple[str, ...]) -> JobFile:
    """The job file named on the command line. Raises InvalidSpec."""
    overrides = parse_overrides(words)
    session.job_file_label = "stdin" if file == "-" else file
    session.overridden_keys = frozenset(key for key, _ in overrides)
    if file == "-":
        return read_job_file(sys.stdin.read() + "\n", overrides, text_label="stdin")
    return read_job_file(Path(file), overrides)


@contextlib.contextmanager
def faults_located(job_file: JobFile) -> Iterator[None]:
    """Gives the faults that the server finds the lines of the user's own file, where it did not."""
    try:
        yield
    except GanglineError as error:
        problems = located(job_file, error.errors)
        if problems:
            error.problem["errors"] = [vars(problem) for problem in problems]
        raise
