"""The progress line under a followed log: state, bar, step, time left, loss. On a terminal only.

rich draws it; this module is imported when a log is followed on a terminal. Not for: piped output.
"""

from __future__ import annotations

import threading
from typing import Self

from rich.console import Console
from rich.live import Live
from rich.text import Text

from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.cli.words import bar, duration, metric_value, state_note
from gangline.client.errors import GanglineError
from gangline.client.models import Job

POLL_SECONDS = 1.0


class LiveProgress:
    """Draws the line while used as a context manager, and asks for the job's progress in a thread of its own."""

    def __init__(self, session: Session, job: Job) -> None:
        self.job = job
        """As last seen."""
        self._session = session
        self._is_stale = False
        self._done = threading.Event()
        self._console = Console(no_color=not session.has_colour, highlight=False, emoji=False, markup=False)
        self._live = Live(
            get_renderable=self._line, console=self._console, refresh_per_second=5, transient=True,
            redirect_stdout=False, redirect_stderr=False,
        )  # fmt: skip
        self._thread = threading.Thread(target=self._poll, name="progress", daemon=True)

    def __enter__(self) -> Self:
        self._live.__enter__()
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        self._live.__exit__(None, None, None)

    def print(self, lines: list[str]) -> None:
        """Print lines above the progress line."""
        if lines:
            self._console.print(Text("\n").join(Text.from_ansi(line) for line in lines), soft_wrap=True)

    def note(self, text: str) -> None:
        """Print a remark above it."""
        self._console.print(Text(clean_inline(text), style="dim"), soft_wrap=True)

    def _poll(self) -> None:
        # A client of its own: the other one is inside its stream, and the two must not share a connection pool's state.
        with self._session.new_client() as client:
            client.on_trouble = None
            while not self._done.wait(POLL_SECONDS):
                try:
                    self.job = client.job(self.job.id)
                    self._is_stale = False
                except GanglineError:
                    self._is_stale = True  # said on the line itself; the log stream reports what lasts

    def _line(self) -> Text:
        line = Text(progress_line(self.job), no_wrap=True, overflow="ellipsis")
        if self._is_stale:
            line.append("  (no answer from the server)", style="dim")
        return line


def progress_line(job: Job) -> str:
    """`running  ████▏····  40%  step 80/200  loss 2.31  left 31s`."""
    progress = job.progress
    parts = [f"{job.id} {job.state}"]
    if progress is not None:
        if progress.fraction is not None:
            parts.append(f"{bar(progress.fraction, 20)} {progress.fraction * 100:3.0f}%")
        if progress.step is not None:
            parts.append(f"step {progress.step}" + (f"/{progress.total_steps}" if progress.total_steps else ""))
        if "loss" in progress.metrics:
            parts.append(f"loss {metric_value(progress.metrics['loss'])}")
        if progress.eta_seconds is not None:
            parts.append(f"left {duration(progress.eta_seconds)}")
    elif state_note(job):
        parts.append(state_note(job))
    return clean_inline("  ".join(parts))
