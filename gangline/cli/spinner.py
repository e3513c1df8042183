"""A sign of life on a terminal while a command waits for something longer than a blink.

Not for: progress that can be measured (`gangline.cli.live`).
"""

from __future__ import annotations

import threading
from typing import Self, TextIO

DELAY_SECONDS = 0.15
"""Below this an answer feels immediate, and a flash of text would only disturb."""
FRAME_SECONDS = 0.1
FRAMES = "⠋⠙⠹⠸⠼⠴⠦⠧⠇⠏"
ERASE_LINE = "\r\x1b[2K"


class Spinner:
    """Shows a line on `stream` from 150 ms on, and takes it away at the end. Does nothing when not `enabled`."""

    def __init__(self, stream: TextIO, text: str, *, enabled: bool) -> None:
        self._stream = stream
        self._text = text
        self._enabled = enabled
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def tell(self, text: str) -> None:
        """Change what the line says."""
        self._text = text

    def __enter__(self) -> Self:
        if self._enabled:
            self._thread = threading.Thread(target=self._run, name="spinner", daemon=True)
            self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self._done.set()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        if self._done.wait(DELAY_SECONDS):
            return
        frame = 0
        while not self._done.is_set():
            self._stream.write(f"{ERASE_LINE}{FRAMES[frame % len(FRAMES)]} {self._text}")
            self._stream.flush()
            frame += 1
            self._done.wait(FRAME_SECONDS)
        self._stream.write(ERASE_LINE)
        self._stream.flush()
