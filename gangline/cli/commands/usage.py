"""`gang usage`: GPU-hours by team, user and week.

Not for: what one job cost (`gang show`).
"""

from __future__ import annotations

import click

from gangline.cli.options import gang_command
from gangline.cli.sanitise import clean
from gangline.cli.session import Session
from gangline.cli.table import Column, Row
from gangline.cli.times import instant
from gangline.cli.words import local_time
from gangline.client.pool_models import UsageRow

AXES = ("team", "user", "week")
NUMBERS = (
    Column(header="HELD", right=True, keep=True),
    Column(header="BUSY", right=True, keep=True),
    Column(header="BUSY %", right=True),
    Column(header="LOST", right=True),
    Column(header="JOBS", right=True),
)


@gang_command()
@click.option("--by", default="team", show_default=True, metavar="AXES", help="team, user, week, joined by commas.")
@click.option("--since", metavar="TIME", help="From: 7d ago, a date, or a time (default: 28d).")
@click.option("--until", metavar="TIME", help="To: the same (default: now).")
@click.option(
    "-o", "--output", "output", type=click.Choice(["table", "json", "csv"]), help="table (default), json or csv."
)
def usage(session: Session, by: str, since: str | None, until: str | None) -> None:
    """Show GPU-hours held, busy and lost to preemption: of your teams, for an admin of all.

    A week is an ISO week in UTC; CPU slots count as GPUs.
    """
    axes = tuple(axis.strip() for axis in by.split(","))
    now = session.now()
    begin, end = instant(since, now, hint="--since"), instant(until, now, hint="--until")
    with session.busy("Adding up"):
        if session.output == "csv":
            text = session.client.usage_csv(by=axes, since=begin, until=end)
            click.echo(clean(text), nl=False)
            return
        answer = session.client.usage(by=axes, since=begin, until=end)
    if session.is_json:
        session.json(answer.raw)
        return
    span = f"from {local_time(answer.since, now)} to {local_time(answer.until, now)}"
    if not answer.items:
        session.note(f"Nobody that you may see held a GPU {span}.")
        return
    columns = (*(Column(header=axis.upper(), keep=True) for axis in axes), *NUMBERS)
    session.table(columns, [_row(row, axes) for row in answer.items])
    total = answer.total
    session.note(f"{total.held_gpu_hours:,.1f} GPU-hours held, {total.busy_gpu_hours:,.1f} of them busy, {span}")


def _row(row: UsageRow, axes: tuple[str, ...]) -> Row:
    keys = tuple(str(getattr(row, axis, None) or "") for axis in axes)
    share = row.busy_gpu_hours / row.held_gpu_hours if row.held_gpu_hours else 0.0
    numbers = (row.held_gpu_hours, row.busy_gpu_hours)
    return Row(
        cells=(
            *keys,
            *(f"{number:,.1f}" for number in numbers),
            f"{share:.0%}",
            f"{row.lost_gpu_hours:,.1f}",
            str(row.jobs),
        )
    )
