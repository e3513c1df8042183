"""`gang admin token`: tokens of users, and tokens by which nodes enrol.

A token is shown once, when it is made: alone on stdout, so that it can go straight into a file.
"""

from __future__ import annotations

import click

from gangline.cli.options import DURATION, gang_command
from gangline.cli.records import print_record, print_records
from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session


@gang_command(name="ls")
def ls(session: Session) -> None:
    """List tokens: yours, or everybody's if you are an admin."""
    with session.busy("Listing tokens"):
        items = session.client.tokens()
    print_records(
        session, items, ("id", "user", "label", "kind", "created_at", "expires_at", "revoked_at"), "No tokens."
    )


@gang_command(name="create")
@click.option("--label", default="", metavar="TEXT", help="What it is for.")
@click.option("--user", metavar="NAME", help="Whose token; by default yours. Others' need an admin.")
@click.option("--enrolment", is_flag=True, help="For nodes to enrol with, not for a user. Needs an admin.")
@click.option("--expires-in", type=DURATION, metavar="TIME", help="Stops working after this long: 12h, 90d.")
def create(session: Session, label: str, user: str | None, enrolment: bool, expires_in: float | None) -> None:
    """Make a token. It is printed once, alone on stdout."""
    if enrolment and user is not None:
        raise click.UsageError("An enrolment token belongs to no user: give --enrolment or --user.")
    kind = "enrolment" if enrolment else "user"
    with session.busy("Making a token"):
        answer = session.client.create_token(label or kind, user=user, kind=kind, expires_in_seconds=expires_in)
    if session.is_json:
        session.json(answer)
        return
    session.out(clean_inline(str(answer.get("token", ""))))
    session.note("Keep it safe: it is not shown again. Revoke it: gang admin token revoke " + str(answer.get("id", "")))


@gang_command(name="revoke")
@click.argument("token_id", metavar="ID")
def revoke(session: Session, token_id: str) -> None:
    """Revoke the token ID (as `gang admin token ls` shows it); it stops working at once."""
    with session.busy("Revoking"):
        session.client.revoke_token(token_id)
    print_record(session, {"id": token_id, "revoked": True}, f"Revoked token {token_id}.")
