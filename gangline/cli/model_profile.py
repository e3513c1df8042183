"""`--profile`: counts what the model of a job file costs, in the user's own environment, and sends it along.

It imports the user's code, so it happens only when asked for, and in a process of its own. Not for: counting
(`python -m trainer profile` does it).
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import click

from gangline.cli.session import Session
from gangline.client.errors import GanglineError
from gangline.client.job_file import JobFile, with_profile

PROFILE_SECONDS = 300.0
_READ_TWICE = ("run", "code")

profile_option = click.option(
    "--profile",
    "wants_profile",
    is_flag=True,
    help="Import the job's code here and send what its model costs: for strategy auto, and the memory it needs.",
)


def profiled(session: Session, file: str, job_file: JobFile) -> JobFile:
    """`job_file` with the profile of its model. Raises UsageError where the file cannot be read again, GanglineError
    with what the count said when it failed."""
    changed = [name for name, _ in job_file.overrides if name.split(".")[0] in _READ_TWICE]
    if file == "-" or changed:
        what = "stdin" if file == "-" else f"--set {changed[0]}"
        raise click.UsageError(
            f"--profile reads the job file and its code as they are on disk; it does not go with {what}."
        )
    path = Path(file).resolve()
    with session.busy("Counting what the model costs"):
        return with_profile(job_file, _counted(path))


def _counted(path: Path) -> dict[str, Any]:
    command = [sys.executable, "-P", "-m", "trainer", "profile", str(path), "-o", "json"]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    try:
        done = subprocess.run(
            command,
            cwd=path.parent,
            env=environment,
            capture_output=True,
            text=True,
            timeout=PROFILE_SECONDS,
            check=False,
        )
        if done.returncode == 0:
            answer: dict[str, Any] = json.loads(done.stdout)
            return answer
        said = (done.stderr or done.stdout).strip()
    except subprocess.TimeoutExpired:
        said = f"it took more than {PROFILE_SECONDS:.0f} s"
    except ValueError as error:
        said = f"its answer is no JSON: {error}"
    raise GanglineError(
        f"the model of {path.name} could not be counted: {said[-2000:]}",
        fix="run gang where your code and PyTorch can be imported (pip install 'gangline[train]'), or drop --profile",
    )
