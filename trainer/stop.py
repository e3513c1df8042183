"""The wish that this training stop: noted by a signal handler, read by the loop, agreed on by all ranks.

A handler only sets a flag. Why it is to stop is in the stop file, which the supervisor writes before it signals.
Not for: agreeing (`trainer.loop`) or ending ranks that do not listen (the supervisor).
"""

from __future__ import annotations

import signal
from collections.abc import Mapping
from types import FrameType
from typing import Final

from gangline.protocol.names import ENV_STOP_FILE
from gangline.protocol.outcomes import StopIntent

SIGNALS: Final = (signal.SIGTERM, signal.SIGUSR1)
_WITHOUT_CHECKPOINT: Final = (
    StopIntent.CANCEL,
    StopIntent.ADMIN_STOP,
    StopIntent.PEER_FAILURE,
    StopIntent.START_DEADLINE,
    StopIntent.FENCED,
)
"""Intents after which nobody will resume from what is written now."""


class StopFlag:
    """Whether a stop was asked for."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        self._stop_file = environment.get(ENV_STOP_FILE)
        self._is_set = False

    def install(self) -> None:
        """Let the signals set the flag. Main thread only."""
        for number in SIGNALS:
            signal.signal(number, self._note)

    def set(self) -> None:
        """Ask for a stop, as the signals do."""
        self._is_set = True

    @property
    def is_set(self) -> bool:
        """Whether this rank was asked to stop."""
        return self._is_set

    @property
    def is_without_checkpoint(self) -> bool:
        """Whether it is to stop for good: cancelled, or already given up."""
        return self._is_set and self.intent in _WITHOUT_CHECKPOINT

    @property
    def intent(self) -> str | None:
        """Content of the stop file: a `StopIntent`; None when there is none (somebody else sent the signal)."""
        if not self._stop_file:
            return None
        try:
            with open(self._stop_file, encoding="utf-8") as file:
                return file.read().strip() or None
        except FileNotFoundError:
            return None

    def _note(self, number: int, frame: FrameType | None) -> None:
        self._is_set = True
