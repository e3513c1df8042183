"""Signals of the agent as a descriptor that `select` can wait for. Not for: what stopping means (`worker.agent`)."""

from __future__ import annotations

import signal
import socket
from types import FrameType


class Wake:
    """A readable descriptor for signals, so that a sleep in `select` ends at once. SIGTERM and SIGINT ask to stop."""

    def __init__(self) -> None:
        self.is_stopping = False
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> Wake:
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGTERM, self._stop)
        signal.signal(signal.SIGINT, self._stop)
        signal.signal(signal.SIGCHLD, lambda number, frame: None)  # only to be woken when a child ends
        return self

    def __exit__(self, *exc: object) -> None:
        signal.set_wakeup_fd(-1)
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGCHLD):
            signal.signal(number, signal.SIG_DFL)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """For select."""
        return self._reader.fileno()

    def clear(self) -> None:
        """Forget the signals seen so far."""
        try:
            while self._reader.recv(512):
                pass
        except BlockingIOError:
            return

    def _stop(self, number: int, frame: FrameType | None) -> None:
        self.is_stopping = True
