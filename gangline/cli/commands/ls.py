"""`gang ls`: jobs, newest first.

Not for: one job in full (`gang show`).
"""

from __future__ import annotations

import click

from gangline.cli.options import gang_command
from gangline.cli.session import Session
from gangline.cli.table import Column, Row
from gangline.cli.words import NOTHING, duration, gpu_number, layout, metric, progress_cell, state_note
from gangline.client.models import Job
from gangline.protocol.outcomes import JobState

COLUMNS = (
    Column(header="ID", right=True, keep=True),
    Column(header="STATE", keep=True),
    Column(header="NAME", keep=True, shrinks=True),
    Column(header="OWNER", shrinks=True),
    Column(header="LAYOUT"),
    Column(header="GPUS", right=True),
    Column(header="PROGRESS"),
    Column(header="LOSS", right=True),
    Column(header="LEFT", right=True),
)


@gang_command()
@click.option("--state", type=click.Choice([str(state) for state in JobState]), help="Only jobs in this state.")
@click.option("--owner", metavar="USER", help="Only jobs of this user; `me` is you.")
@click.option("--mine", is_flag=True, help="Short for --owner me.")
@click.option("--team", metavar="TEAM", help="Only jobs of this team.")
@click.option("--name", metavar="NAME", help="Only jobs of this name.")
@click.option("--tag", metavar="KEY=VALUE", help="Only jobs with this tag.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=50, show_default=True, help="At most so many.")
def ls(
    session: Session,
    state: str | None,
    owner: str | None,
    mine: bool,
    team: str | None,
    name: str | None,
    tag: str | None,
    limit: int,
) -> None:
    """List jobs, newest first."""
    owner = owner or ("me" if mine else None)
    with session.busy("Listing jobs"):
        # One more than shown, to be able to say that there are more.
        found = list(session.client.jobs(state=state, owner=owner, team=team, name=name, tag=tag, limit=limit + 1))
    shown = found[:limit]
    if session.is_json:
        session.json({"items": [job.raw for job in shown]})
        return
    if not shown:
        filtered = any((state, owner, team, name, tag))
        session.note("No jobs match." if filtered else "No jobs yet. Make one: gang init, then gang submit job.yaml")
        return
    session.table(COLUMNS, [row(job) for job in shown])
    if len(found) > limit:
        session.note(f"More jobs exist; --limit {limit * 2} shows more, --state, --owner and --name narrow the list.")


def row(job: Job) -> Row:
    """A job as a row: numbers while it trains, a sentence while it waits or when it has failed."""
    cells = (str(job.id), job.state, job.name, job.owner, layout(job), gpu_number(job))
    note = state_note(job)
    if note:
        return Row(cells=cells, note=note, style=job.state)
    left = job.progress.eta_seconds if job.progress and not job.is_terminal else None
    numbers = (
        progress_cell(job.progress),
        metric(job.progress, "loss"),
        NOTHING if left is None else duration(left),
    )
    return Row(cells=cells + numbers, style=job.state)
