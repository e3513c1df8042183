"""`gang top`: the pool at a glance, again and again.

Not for: what a screen shows (`gangline.cli.pool_view`).
"""

from __future__ import annotations

import shutil
import time

import click

from gangline.cli.options import DURATION, gang_command
from gangline.cli.pool_view import frame
from gangline.cli.session import Session
from gangline.client.errors import GanglineError
from gangline.client.pool_models import Overview

SHOWN_JOBS = 50
SHORTEST_INTERVAL_SECONDS = 0.2


@gang_command()
@click.option("--once", is_flag=True, help="Show it once and leave; so does a pipe.")
@click.option("--every", type=DURATION, default=2.0, metavar="TIME", help="Refresh this often (default: 2s).")
def top(session: Session, once: bool, every: float) -> None:
    """Show the pool at a glance: GPUs and how much they work, running and waiting jobs, what teams hold.

    It refreshes until Ctrl-C. A bar a GPU: ▁ held and idle to █ busy, · free, ? held and unknown, x out of use.
    """
    with session.busy("Asking"):
        overview = session.client.overview(limit=SHOWN_JOBS)
    if session.is_json:
        session.json(overview.raw)
    elif once or session.width is None:
        for line in _lines(session, overview, height=None):
            session.out(line)
    else:
        _refresh(session, overview, max(SHORTEST_INTERVAL_SECONDS, every))


def _refresh(session: Session, overview: Overview, every: float) -> None:
    """Draw on the terminal until Ctrl-C, which is how one leaves. An outage is said on the screen and waited out."""
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    console = Console(no_color=not session.has_colour, highlight=False, emoji=False, markup=False)
    trouble = ""
    try:
        with Live(console=console, auto_refresh=False, screen=True, vertical_overflow="crop") as live:
            while True:
                lines = _lines(session, overview, height=console.height)
                lines[1:1] = [trouble] if trouble else []
                live.update(Text.from_ansi("\n".join(lines), no_wrap=True, overflow="crop"), refresh=True)
                time.sleep(every)
                try:
                    overview, trouble = session.client.overview(limit=SHOWN_JOBS), ""
                except GanglineError:
                    trouble = "No answer from the server: this is how it was."
    except KeyboardInterrupt:
        return


def _lines(session: Session, overview: Overview, height: int | None) -> list[str]:
    width = session.width if height is None else shutil.get_terminal_size().columns
    return frame(overview, session.now(), width=width, height=height, paint=session.paint)
