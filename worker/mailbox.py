"""Wakes a supervisor's main loop: signals, and messages of its threads, all end one wait.

Not for: messages between processes.
"""

from __future__ import annotations

import os
import select
import signal
from collections import deque
from types import FrameType
from typing import Any, Final

_WATCHED_SIGNALS: Final = (signal.SIGCHLD, signal.SIGTERM)
_IGNORED_SIGNALS: Final = (signal.SIGINT, signal.SIGHUP)
"""Ctrl-C or a closed terminal ends neither the job nor its supervisor."""


class Mailbox:
    """`post` from any thread or signal handler, `wait` and `drain` from the main thread."""

    def __init__(self) -> None:
        self._messages: deque[Any] = deque()
        self._reader, self._writer = os.pipe2(os.O_CLOEXEC | os.O_NONBLOCK)
        self._poll = select.poll()
        self._poll.register(self._reader, select.POLLIN)
        self.is_terminated = False
        """SIGTERM has come."""

    def watch_signals(self) -> None:
        """Let SIGCHLD and SIGTERM end a wait; ignore SIGINT and SIGHUP. Main thread only."""
        signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        for number in _WATCHED_SIGNALS:
            signal.signal(number, self._handle)
        for number in _IGNORED_SIGNALS:
            signal.signal(number, signal.SIG_IGN)

    def post(self, message: Any) -> None:
        """Leave a message and end the wait."""
        self._messages.append(message)
        try:
            os.write(self._writer, b"\0")
        except BlockingIOError:
            return  # the pipe is full of wake-ups: one more changes nothing

    def wait(self, seconds: float | None) -> None:
        """Return when something came, or after `seconds` (None: no limit)."""
        if self._messages:
            return
        timeout = None if seconds is None else max(0.0, seconds) * 1000.0
        if self._poll.poll(timeout):
            self._empty_pipe()

    def drain(self) -> list[Any]:
        """Every message so far, oldest first."""
        messages: list[Any] = []
        while self._messages:
            messages.append(self._messages.popleft())
        return messages

    def _handle(self, number: int, frame: FrameType | None) -> None:
        if number == signal.SIGTERM:
            self.is_terminated = True

    def _empty_pipe(self) -> None:
        try:
            while len(os.read(self._reader, 4096)) == 4096:
                pass
        except BlockingIOError:
            return
