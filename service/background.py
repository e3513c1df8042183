"""A thread of the service with a name, a start and a clean stop. Not for: what it does, or when it may run."""

from __future__ import annotations

import threading
from abc import ABC, abstractmethod


class BackgroundThread(ABC):
    """Runs `run` in a daemon thread until it returns; `stop` asks for that and waits for it."""

    def __init__(self, name: str, wake: threading.Event | None = None):
        """`wake` is what `run` waits on between its turns; `stop` sets it too."""
        self._stopping = threading.Event()
        self._wake = wake or threading.Event()
        self._thread = threading.Thread(target=self.run, name=name, daemon=True)

    @abstractmethod
    def run(self) -> None:
        """Work until `_stopping` is set."""

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Ask it to stop after its present turn, and wait until it has."""
        self._stopping.set()
        self._wake.set()
        self._thread.join()
