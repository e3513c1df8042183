"""`gang admin grant-priority` and `revoke-priority`: who may give jobs the priority top.

Not for: the priority of a job (`gang priority`).
"""

from __future__ import annotations

import click

from gangline.cli.options import gang_command
from gangline.cli.records import print_record
from gangline.cli.session import Session
from gangline.cli.words import count


@gang_command(name="grant-priority")
@click.argument("user")
def grant(session: Session, user: str) -> None:
    """Let USER give jobs the priority top, which goes before the jobs of all teams."""
    with session.busy("Granting"):
        session.client.grant_priority(user)
    print_record(session, {"name": user, "top_priority": True}, f"{user} may use the priority top.")


@gang_command(name="revoke-priority")
@click.argument("user")
def revoke(session: Session, user: str) -> None:
    """Take the priority top back from USER; jobs that have it keep it until gang priority changes them."""
    with session.busy("Revoking"):
        answer = session.client.revoke_priority(user)
    left = answer.get("jobs_at_top", 0)
    kept = f"; {count(left, 'job')} still {'has' if left == 1 else 'have'} it" if left else ""
    print_record(session, answer, f"{user} may no longer use the priority top{kept}.")
