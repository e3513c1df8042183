"""The thread that hears what the server wants of a supervisor: a long-poll by version, passed on to the main loop.

Not for: acting on it (`worker.supervisor`).
"""

from __future__ import annotations

import random
import threading
import time
from typing import Final

from worker.api import ApiError, AttemptApi, Fenced
from worker.courier import FencedNotice, retry_seconds
from worker.mailbox import Mailbox

LONGEST_WAIT_SECONDS: Final = 20.0
TOO_FAST_SECONDS: Final = 0.1
"""An answer without news that comes sooner than this is not a long-poll: pause, whatever the server does."""


def wait_seconds(disconnect_stop_seconds: float | None) -> float:
    """How long one poll may take. Silence is counted from the sending of the last answered request, so a job that
    stops when cut off needs several polls within its deadline. Pure."""
    if disconnect_stop_seconds is None:
        return LONGEST_WAIT_SECONDS
    return max(0.1, min(LONGEST_WAIT_SECONDS, disconnect_stop_seconds / 3.0))


class DirectiveWatcher:
    """Polls until the process ends or the attempt is fenced. It is a daemon thread: it never delays an exit."""

    def __init__(self, api: AttemptApi, mailbox: Mailbox, *, wait_seconds: float) -> None:
        self._api = api
        self._mailbox = mailbox
        self._wait_seconds = wait_seconds
        self._thread: threading.Thread | None = None

    @property
    def answered_at(self) -> float | None:
        """Monotonic time of sending of the last request that the API answered."""
        return self._api.connection.answered_at

    @property
    def is_started(self) -> bool:
        """Whether it polls."""
        return self._thread is not None

    def start(self) -> None:
        """Begin to poll; does nothing when it has begun."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="directives", daemon=True)
            self._thread.start()

    def _run(self) -> None:
        version = 0
        failures = 0
        while True:
            asked_at = time.monotonic()
            try:
                directive = self._api.directive(version, self._wait_seconds)
            except Fenced:
                self._mailbox.post(FencedNotice())
                return
            except ApiError:
                failures += 1
                time.sleep(retry_seconds(failures, random.random()))
                continue
            failures = 0
            if directive.version > version:
                version = directive.version
                self._mailbox.post(directive)
            elif time.monotonic() - asked_at < TOO_FAST_SECONDS:
                time.sleep(TOO_FAST_SECONDS)
