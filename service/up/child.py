"""One supervised child process: started in a session of its own, restarted with back-off, stopped by pid."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

BACKOFF_SECONDS = (0.1, 0.5, 1.0, 2.0, 5.0)
STABLE_SECONDS = 30.0


@dataclass
class Child:
    """A part of the pool. Its own session keeps the terminal's Ctrl-C away from it: `gang up` decides the order."""

    name: str
    argv: Sequence[str]
    environment: Mapping[str, str]
    log_path: Path
    stop_seconds: float = 10.0
    process: subprocess.Popen[bytes] | None = None
    num_restarts: int = 0
    _started_at: float = field(default=0.0)
    _not_before: float = field(default=0.0)

    def start(self) -> None:
        """Start it; output goes to its log file."""
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                list(self.argv),
                env=dict(self.environment),
                cwd=self.log_path.parent,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
        self._started_at = time.monotonic()

    def restart_if_dead(self) -> int | None:
        """Start it again when it has died and its back-off is over; returns its exit code when it has just died."""
        if self.process is not None:
            code = self.process.poll()
            if code is None:
                return None
            now = time.monotonic()
            if now - self._started_at > STABLE_SECONDS:
                self.num_restarts = 0
            self._not_before = now + BACKOFF_SECONDS[min(self.num_restarts, len(BACKOFF_SECONDS) - 1)]
            self.num_restarts += 1
            self.process = None
            return code
        if time.monotonic() >= self._not_before:
            self.start()
        return None

    @property
    def pid(self) -> int | None:
        """Its pid while it runs."""
        return self.process.pid if self.process is not None and self.process.poll() is None else None

    def send(self, number: signal.Signals) -> None:
        """Signal it, if it runs."""
        if self.process is not None and self.process.poll() is None:
            os.kill(self.process.pid, number)

    def stop(self) -> None:
        """SIGTERM, then SIGKILL after `stop_seconds`."""
        if self.process is None:
            return
        self.send(signal.SIGTERM)
        try:
            self.process.wait(self.stop_seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process = None

    def log_tail(self, num_bytes: int = 2_000) -> str:
        """The end of its log, for an error message."""
        with self.log_path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - num_bytes))
            return log.read().decode("utf-8", "replace").strip()
