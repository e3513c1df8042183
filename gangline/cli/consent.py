"""Asking before a command acts on several jobs at once.

Not for: the act itself.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.client.models import Job


def ask(session: Session, jobs: Sequence[Job], verb: str) -> None:
    """List the jobs and ask whether to `verb` them. Raises a usage error without a terminal to ask on."""
    for job in jobs:
        session.note(f"{job.id}  {job.state}  {clean_inline(job.name)}  {clean_inline(job.owner)}")
    if not sys.stdin.isatty():
        raise click.UsageError(f"This would {verb} {len(jobs)} jobs: without a terminal to ask on, -y is needed.")
    click.confirm(f"{verb.capitalize()} these {len(jobs)} jobs?", abort=True, err=True)
