"""The agent's Celery child: started, watched and started again with back-off, told the doorbell, ended with the agent.

It runs in a session of its own (a Ctrl-C meant for the agent does not reach it) and watches a pipe that only the agent
holds, so it cannot outlive even an agent that was killed. Not for: what it does (`worker.celery_app`).
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Final

from gangline.protocol.names import ENV_BROKER_URL
from worker.agent_log import log
from worker.doorbell import ENV_DOORBELL, ENV_NODE_NAME, ENV_PARENT_PIPE

SHORTEST_DELAY_SECONDS: Final = 0.5
LONGEST_DELAY_SECONDS: Final = 30.0
STEADY_AFTER_SECONDS: Final = 20.0
"""A child that lived this long was healthy: the next delay starts from the shortest again."""
STOP_SECONDS: Final = 2.0
"""It holds nothing worth waiting for; after this it is killed."""


def next_delay(previous_seconds: float, lived_seconds: float) -> float:
    """Seconds to wait before the next start of a child that lived `lived_seconds`. Pure."""
    if lived_seconds >= STEADY_AFTER_SECONDS or previous_seconds == 0.0:
        return SHORTEST_DELAY_SECONDS
    return min(previous_seconds * 2, LONGEST_DELAY_SECONDS)


class CeleryChild:
    """One Celery worker process. Times are monotonic seconds, given by the caller."""

    def __init__(self, *, broker_url: str, node_name: str, doorbell: Path, folder: Path) -> None:
        """Start nothing yet; `folder` becomes its working folder."""
        self._environment = {
            ENV_BROKER_URL: broker_url,
            ENV_NODE_NAME: node_name,
            ENV_DOORBELL: str(doorbell),
        }
        self._folder = folder
        self._process: subprocess.Popen[bytes] | None = None
        self._started_at = 0.0
        self._delay_seconds = 0.0
        self._due_at = 0.0
        self._read_end, self._write_end = os.pipe()

    @property
    def pid(self) -> int | None:
        """Process id while it runs."""
        return None if self._process is None else self._process.pid

    @property
    def due_at(self) -> float | None:
        """When the next start is due; None while it runs."""
        return self._due_at if self._process is None else None

    def poll(self, now: float) -> None:
        """Notice an end, and start when that is due."""
        if self._process is not None and (status := self._process.poll()) is not None:
            self._delay_seconds = next_delay(self._delay_seconds, now - self._started_at)
            self._due_at = now + self._delay_seconds
            log("celery_ended", pid=self._process.pid, status=status, restart_in_seconds=self._delay_seconds)
            self._process = None
        if self._process is None and now >= self._due_at:
            self._start(now)

    def _start(self, now: float) -> None:
        self._started_at = now
        self._process = subprocess.Popen(
            [sys.executable, "-P", "-m", "worker", "celery"],
            cwd=self._folder,
            env={**os.environ, **self._environment, ENV_PARENT_PIPE: str(self._read_end)},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,  # Celery's banner; what matters it logs to stderr
            pass_fds=(self._read_end,),
            start_new_session=True,
        )
        log("celery_started", pid=self._process.pid)

    def stop(self) -> None:
        """End it: SIGTERM, then SIGKILL after two seconds."""
        if self._process is not None:
            self._process.terminate()
            try:
                self._process.wait(STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            log("celery_stopped", pid=self._process.pid)
            self._process = None
        os.close(self._read_end)
        os.close(self._write_end)
