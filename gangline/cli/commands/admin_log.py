"""`gang admin log`: who changed what of the pool, and when.

Not for: the history of a job (`gang show`).
"""

from __future__ import annotations

import click

from gangline.cli.options import gang_command
from gangline.cli.records import print_records
from gangline.cli.session import Session


@gang_command(name="log")
@click.option("--node", metavar="NODE", help="Of this node alone.")
@click.option("-n", "--limit", type=click.IntRange(1, 1000), default=50, show_default=True, help="The newest N.")
def log(session: Session, node: str | None, limit: int) -> None:
    """List who changed what of nodes, teams, users and tokens, and what befell the nodes, newest first."""
    with session.busy("Reading"):
        items = session.client.pool_events(node=node, limit=limit)
    print_records(session, items, ("at", "actor", "text"), "Nothing was changed.")
