"""`gang admin quota` and `gang admin cap`: what a team is guaranteed, and the most that a team or user holds at once.

Not for: the order of jobs (`gang priority`).
"""

from __future__ import annotations

from typing import Any

import click

from gangline.cli.options import gang_command
from gangline.cli.records import print_record
from gangline.cli.session import Session


class NumberOrNone(click.ParamType):
    """A whole number from 0, or `none`."""

    name = "number"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int | str:
        """The number; `none` as it is, since None means that nothing was said."""
        if value == "none" or isinstance(value, int):
            return value
        if not str(value).isdecimal():
            self.fail(f"{value!r} is neither a whole number nor none.", param, ctx)
        return int(value)


NUMBER = NumberOrNone()


@gang_command()
@click.argument("team")
@click.option("--gpus", type=NUMBER, metavar="N", help="GPUs that it is guaranteed, or none.")
@click.option("--nodes", type=NUMBER, metavar="N", help="Whole nodes that it is guaranteed, or none.")
@click.option("--cap", type=NUMBER, metavar="N", help="Most GPUs that it holds at once, borrowed ones too, or none.")
def quota(session: Session, team: str, gpus: int | str | None, nodes: int | str | None, cap: int | str | None) -> None:
    """Set what TEAM is guaranteed, and its cap; what is not given stays as it is.

    What a team's jobs hold beyond its quota is borrowed: when another team asks for its own, those that resume are
    asked back and stop at a checkpoint, however short they have run. A cap only keeps further jobs from starting.
    """
    given = {"quota_gpus": gpus, "quota_nodes": nodes, "cap_gpus": cap}
    changes = {name: _number(value) for name, value in given.items() if value is not None}
    if not changes:
        raise click.UsageError("Say at least one of --gpus, --nodes and --cap, such as --gpus 8 or --gpus none.")
    with session.busy("Setting"):
        answer = session.client.set_quota(team, **changes)
    facts = (
        f"guaranteed {_word(answer, 'quota_gpus')} GPUs and {_word(answer, 'quota_nodes')} whole nodes, "
        f"at most {_word(answer, 'cap_gpus', 'any number of')} GPUs at once"
    )
    print_record(session, answer, f"Team {team}: {facts}.")
    for warning in answer.get("warnings", ()):
        session.note(f"warning: {warning}")


@gang_command()
@click.argument("user")
@click.option("--gpus", type=NUMBER, metavar="N", required=True, help="Most GPUs that the user's jobs hold, or none.")
def cap(session: Session, user: str, gpus: int | str) -> None:
    """Set the most GPUs that the jobs of USER hold at once. It only keeps further jobs from starting."""
    with session.busy("Setting"):
        answer = session.client.set_user_cap(user, _number(gpus))
    print_record(session, answer, f"User {user}: at most {_word(answer, 'cap_gpus', 'any number of')} GPUs at once.")


def _number(value: int | str) -> int | None:
    return value if isinstance(value, int) else None


def _word(answer: dict[str, Any], name: str, nothing: str = "no") -> str:
    value = answer.get(name)
    return nothing if value is None else str(value)
