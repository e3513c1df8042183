"""`gang admin team`: teams and who is in them.

Not for: what a team may hold (`admin_quota`).
"""

from __future__ import annotations

import click

from gangline.cli.each import Failures
from gangline.cli.options import gang_command
from gangline.cli.records import print_record, print_records
from gangline.cli.session import Session
from gangline.protocol.outcomes import ExitCode


@gang_command(name="ls")
def ls(session: Session) -> None:
    """List teams."""
    with session.busy("Listing teams"):
        items = session.client.teams()
    print_records(session, items, ("name", "members", "quota_gpus", "quota_nodes", "cap_gpus"), "No teams.")


@gang_command(name="create")
@click.argument("name")
def create(session: Session, name: str) -> None:
    """Create the team NAME."""
    with session.busy("Creating"):
        answer = session.client.create_team(name)
    print_record(session, answer, f"Created team {name}.")
    session.note(f"  members   gang admin team add {name} USER...")


@gang_command(name="add")
@click.argument("team")
@click.argument("users", metavar="USER...", nargs=-1, required=True)
def add(session: Session, team: str, users: tuple[str, ...]) -> ExitCode:
    """Put USERs into TEAM."""
    client, failures = session.client, Failures()

    def add_one(user: str) -> str:
        client.add_member(team, user)
        return user

    with session.busy("Adding"):
        added = failures.each(users, add_one)
    if added:
        print_record(session, {"team": team, "added": added}, f"{', '.join(added)} now in team {team}.")
    return failures.tell(session)


@gang_command(name="remove")
@click.argument("team")
@click.argument("users", metavar="USER...", nargs=-1, required=True)
def remove(session: Session, team: str, users: tuple[str, ...]) -> ExitCode:
    """Take USERs out of TEAM."""
    client, failures = session.client, Failures()

    def remove_one(user: str) -> str:
        client.remove_member(team, user)
        return user

    with session.busy("Removing"):
        removed = failures.each(users, remove_one)
    if removed:
        print_record(session, {"team": team, "removed": removed}, f"{', '.join(removed)} no longer in team {team}.")
    return failures.tell(session)
