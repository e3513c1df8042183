"""What one run of a command has at hand: its client, its output streams, colours and width.

All text of others passes `clean` here or in the module that lays it out. Not for: what a command says.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import TYPE_CHECKING, Any

import click

from gangline.cli.sanitise import clean, clean_inline
from gangline.cli.spinner import Spinner
from gangline.cli.table import Column, Row, render

if TYPE_CHECKING:
    from gangline.client import Client, Job
    from gangline.client.http import Exchange

STATE_COLOURS: dict[str, dict[str, Any]] = {
    "waiting": {"fg": "yellow"},
    "starting": {"fg": "cyan"},
    "running": {"fg": "blue"},
    "stopping": {"fg": "magenta"},
    "succeeded": {"fg": "green"},
    "failed": {"fg": "red"},
    "cancelled": {"fg": "bright_black"},
    "ready": {"fg": "green"},
    "unreachable": {"fg": "yellow"},
    "lost": {"fg": "red"},
    "heading": {"bold": True},
}
MAX_DEBUG_BODY = 4096
_NOT_FOR_TERMINALS = re.compile(r"[\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")


@dataclass(kw_only=True)
class Session:
    """One run of a command. Built from the common options."""

    output: str = "table"
    server: str | None = None
    timeout_seconds: float | None = None
    no_color: bool = False
    debug: bool = False
    job_file_label: str = ""
    """Name of the job file the command reads, for messages about its lines."""
    overridden_keys: frozenset[str] = frozenset()
    _client: Client | None = field(default=None, repr=False)

    # --- The server ------------------------------------------------------------------------------------------------

    @property
    def client(self) -> Client:
        """The client, made at first use."""
        if self._client is None:
            self._client = self.new_client()
        return self._client

    def new_client(self, *, url: str | None = None, token: str | None = None) -> Client:
        """A further client with the same options, for another thread or another server."""
        from gangline.client import Client

        return Client(
            url or self.server,
            token,
            timeout_seconds=30.0 if self.timeout_seconds is None else max(0.1, min(30.0, self.timeout_seconds)),
            on_exchange=self.print_exchange if self.debug else None,
            on_trouble=lambda message: self.note(f"{clean_inline(message)}; trying again"),
        )

    def close(self) -> None:
        """Close the client."""
        if self._client is not None:
            self._client.close()

    def print_exchange(self, exchange: Exchange) -> None:
        """One exchange as a curl command that works when pasted where GANGLINE_TOKEN is set, and its result."""
        call = exchange.call
        words = ["curl", "-X", call.method, shlex.quote(exchange.url), "-H", '"Authorization: Bearer $GANGLINE_TOKEN"']
        for name, value in call.headers.items():
            words += ["-H", shlex.quote(f"{name}: {value}")]
        if call.content_file is not None:
            words += ["--data-binary", shlex.quote(f"@{call.content_file[0]}")]
        elif call.content is not None:
            text = call.content[:MAX_DEBUG_BODY].decode("utf-8", errors="replace")
            words += ["--data-binary", shlex.quote(text + ("…" if len(call.content) > MAX_DEBUG_BODY else ""))]
        result = exchange.failure or str(exchange.status)
        self.note(f"> {' '.join(words)}\n< {result} in {exchange.seconds * 1000:.0f} ms")

    # --- Output ----------------------------------------------------------------------------------------------------

    @property
    def is_json(self) -> bool:
        """Whether stdout is to carry JSON and nothing else."""
        return self.output == "json"

    @property
    def has_colour(self) -> bool:
        """Whether stdout may carry colours."""
        return sys.stdout.isatty() and not self.no_color and os.environ.get("TERM") != "dumb"

    @property
    def width(self) -> int | None:
        """Columns of the terminal on stdout; None when piped: nothing is cut or dropped."""
        return shutil.get_terminal_size().columns if sys.stdout.isatty() else None

    def now(self) -> datetime:
        """The time, in the zone of whoever looks at it."""
        return datetime.now().astimezone()

    def out(self, line: str = "") -> None:
        """Print data: a line that is already clean, colours included."""
        click.echo(line, color=self.has_colour)

    def note(self, text: str) -> None:
        """Print a remark on stderr."""
        click.echo(clean(text), err=True)

    def json(self, value: Any) -> None:
        """Print REST fields as JSON; characters that a terminal acts on are escaped as JSON allows."""
        text = json.dumps(value, ensure_ascii=False, indent=2)
        click.echo(_NOT_FOR_TERMINALS.sub(lambda match: f"\\u{ord(match.group()):04x}", text))

    def table(self, columns: Sequence[Column], rows: Sequence[Row]) -> None:
        """Print a table that fits the terminal."""
        lines = render(columns, rows, width=self.width, paint=self.paint)
        self.out(self.paint("heading", lines[0]))
        for line in lines[1:]:
            self.out(line)

    def paint(self, style: str, text: str) -> str:
        """`text` in the colour of a state or role."""
        look = STATE_COLOURS.get(style)
        return click.style(text, **look) if look and self.has_colour else text

    def busy(self, text: str) -> Spinner:
        """A spinner for as long as the `with` block takes, on a terminal only."""
        enabled = sys.stderr.isatty() and not self.is_json and not self.debug and os.environ.get("TERM") != "dumb"
        return Spinner(sys.stderr, clean_inline(text), enabled=enabled)

    def still_there(self, job: Job, doing: str, again: str) -> None:
        """The line for Ctrl-C: it only detaches."""
        if job.is_terminal:
            self.note(f"Stopped {doing}. Job {job.id} has ended: {job.state}.  Again: {again}")
        else:
            self.note(
                f"Stopped {doing}. Job {job.id} is still {job.state}.  Again: {again}   Stop it: gang cancel {job.id}"
            )
