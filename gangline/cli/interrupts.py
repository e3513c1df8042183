"""Ctrl-C between two steps instead of inside one, so that what was shown and where to go on always agree.

Not for: what an interrupt means (each command says it).
"""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import Any, Self


class HeldInterrupts:
    """Inside `held()` one Ctrl-C waits for the end of the block; a second one does not wait. Main thread only."""

    def __init__(self) -> None:
        self._is_held = False
        self._is_pending = False
        self._before: Any = None

    def __enter__(self) -> Self:
        self._before = signal.signal(signal.SIGINT, self._interrupt)
        return self

    def __exit__(self, *exception: object) -> None:
        signal.signal(signal.SIGINT, self._before)

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Raises KeyboardInterrupt at the end of the block when Ctrl-C came inside it."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False
        if self._is_pending:
            raise KeyboardInterrupt

    def _interrupt(self, number: int, frame: FrameType | None) -> None:
        if not self._is_held or self._is_pending:
            raise KeyboardInterrupt
        self._is_pending = True
