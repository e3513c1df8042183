"""`gang queue`: the waiting jobs in the order of the policy, each with its reason and when it starts.

Not for: one job (`gang why`), jobs that run (`gang ls`, `gang top`).
"""

from __future__ import annotations

import click

from gangline.cli.options import gang_command
from gangline.cli.session import Session
from gangline.cli.start_words import start_cell
from gangline.cli.table import Column, Row
from gangline.cli.words import NOTHING, count, duration, gpu_range
from gangline.client.queue_models import QueuedJob

COLUMNS = (
    Column(header="#", right=True, keep=True),
    Column(header="ID", right=True, keep=True),
    Column(header="NAME", keep=True, shrinks=True),
    Column(header="OWNER", shrinks=True),
    Column(header="GPUS", right=True),
    Column(header="LEFT", right=True),
    Column(header="STARTS IN", right=True),
    Column(header="WHY", shrinks=True),
)


@gang_command()
@click.option("--limit", type=click.IntRange(1, 200), default=50, show_default=True, help="At most so many.")
@click.option("--after", type=click.IntRange(0, 2**31 - 1), default=0, help="Go on after this position.")
def queue(session: Session, limit: int, after: int) -> None:
    """List the waiting jobs in the order in which they take their turns."""
    with session.busy("Reading the queue"):
        page = session.client.queue(after=after, limit=limit)
    if session.is_json:
        session.json(page.raw)
        return
    if not page.items:
        session.note("No jobs wait." if not after else f"No jobs wait after position {after}.")
        return
    session.table(COLUMNS, [row(job) for job in page.items])
    if page.next is not None:
        session.note(f"{count(page.count, 'job')} wait; --after {page.next} shows more.")


def row(job: QueuedJob) -> Row:
    """A waiting job as a row."""
    return Row(
        cells=(
            NOTHING if job.position is None else str(job.position),
            NOTHING if job.id is None else str(job.id),
            job.name,
            job.owner or NOTHING,
            gpu_range(job.gpus, job.min_gpus),
            NOTHING if job.left_seconds is None else duration(job.left_seconds),
            start_cell(job.start),
            job.reason.text if job.reason else "",
        )
    )
