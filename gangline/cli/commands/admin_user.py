"""`gang admin user`: people who may use the pool.

Not for: their tokens (`admin_token`).
"""

from __future__ import annotations

import click

from gangline.cli.options import gang_command
from gangline.cli.records import print_record, print_records
from gangline.cli.session import Session


@gang_command(name="ls")
def ls(session: Session) -> None:
    """List users."""
    with session.busy("Listing users"):
        items = session.client.users()
    print_records(
        session, items, ("name", "admin", "teams", "cap_gpus", "top_priority", "created_at", "disabled_at"), "No users."
    )


@gang_command(name="create")
@click.argument("name")
@click.option("--admin", is_flag=True, help="May do everything.")
def create(session: Session, name: str, admin: bool) -> None:
    """Create the user NAME."""
    with session.busy("Creating"):
        answer = session.client.create_user(name, admin=admin)
    print_record(session, answer, f"Created {'admin' if admin else 'user'} {name}.")
    session.note(f"  token   gang admin token create --user {name}")


@gang_command(name="disable")
@click.argument("name")
def disable(session: Session, name: str) -> None:
    """Disable the user NAME: their tokens stop working, their jobs stay."""
    with session.busy("Disabling"):
        answer = session.client.disable_user(name)
    print_record(session, answer, f"Disabled {name}.")
