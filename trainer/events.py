"""What a rank tells: progress, checkpoints and notices, one JSON line each, written by a thread of its own.

The step only puts a record into a queue: a slow disk costs the oldest progress lines, never time. What must not be lost
(checkpoints, notices) is never dropped: what a full disk refuses is written when it takes something again. Not for:
sending (the supervisor ships the file).
"""

from __future__ import annotations

import json
import math
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

MAX_WAITING: Final = 1_000
"""Progress lines that wait for the disk; beyond it the oldest one is dropped."""
CLOSE_SECONDS: Final = 5.0

Offset = Callable[[], int | None]
"""Bytes of the events file up to the end of a record; None until it is written."""


@dataclass
class _Waiting:
    record: dict[str, Any]
    is_droppable: bool
    end: int | None = None


class EventWriter:
    """Appends records to a rank's events file. `path` None: records are accepted and go nowhere."""

    def __init__(self, path: Path | None, *, max_waiting: int = MAX_WAITING) -> None:
        self._path = path
        self._max_waiting = max_waiting
        self._waiting: deque[_Waiting] = deque()
        self._changed = threading.Condition()
        self._is_closing = False
        self._num_written = 0
        self._num_dropped = 0
        self._has_warned = False
        self._is_line_open = False
        """Whether the file ends within a line that the disk took a part of."""
        self._thread = threading.Thread(target=self._run, name="events", daemon=True)
        self._thread.start()

    @property
    def num_dropped(self) -> int:
        """Progress lines that a slow disk cost."""
        return self._num_dropped

    def progress(
        self,
        *,
        step: int | None = None,
        total_steps: int | None = None,
        phase: str | None = None,
        metrics: Mapping[str, float] | None = None,
    ) -> None:
        """Tell how far the training is. Returns at once."""
        values = {name: as_json_number(value) for name, value in (metrics or {}).items()}
        record = {"kind": "progress", "step": step, "total_steps": total_steps, "phase": phase, "metrics": values}
        self._put(record, is_droppable=True)

    def notice(self, text: str) -> None:
        """Tell the job's owner something in a sentence."""
        self._put({"kind": "notice", "text": text[:2000]}, is_droppable=False)

    def emit(self, record: dict[str, Any]) -> Offset:
        """Write `record`, which has a `kind`; never dropped. The answer tells where it ends in the file."""
        waiting = self._put(record, is_droppable=False)
        return lambda: waiting.end

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Write what waits, for at most `seconds`."""
        with self._changed:
            self._is_closing = True
            self._changed.notify()
        self._thread.join(seconds)

    def _put(self, record: dict[str, Any], *, is_droppable: bool) -> _Waiting:
        waiting = _Waiting({"at": time.time(), **record}, is_droppable)
        with self._changed:
            if is_droppable and len(self._waiting) >= self._max_waiting:
                self._drop_oldest()
            self._waiting.append(waiting)
            self._changed.notify()
        return waiting

    def _drop_oldest(self) -> None:
        for index, waiting in enumerate(self._waiting):
            if waiting.is_droppable:
                del self._waiting[index]
                self._num_dropped += 1
                return

    def _run(self) -> None:
        kept: list[_Waiting] = []
        while True:
            with self._changed:
                while not self._waiting and not self._is_closing:
                    self._changed.wait()
                if not self._waiting and not kept:
                    return
                is_last_try = not self._waiting
                batch = [*kept, *self._waiting]
                self._waiting.clear()
            if self._path is not None:
                self._write(self._path, batch)
                kept = [one for one in batch if one.end is None and not one.is_droppable]
            if is_last_try:
                return

    def _write(self, path: Path, batch: list[_Waiting]) -> None:
        """Write the lines, and note where each ends. Those that have no end after it are not in the file."""
        lines = []
        for waiting in batch:
            self._num_written += 1
            record = {"seq": self._num_written, **waiting.record}
            lines.append(json.dumps(record, ensure_ascii=False, separators=(",", ":")).encode() + b"\n")
        try:
            descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o600)
            try:
                for waiting, line in zip(batch, lines, strict=True):
                    self._append(descriptor, line)
                    # User code in this process may append to the same file: where a line ended is asked, not counted.
                    waiting.end = os.lseek(descriptor, 0, os.SEEK_CUR)
            finally:
                os.close(descriptor)
        except OSError as error:
            if not self._has_warned:
                self._has_warned = True
                print(f"gangline: warning: progress is not recorded: {path}: {error}", file=sys.stderr, flush=True)  # noqa: T201  # the rank's log

    def _append(self, descriptor: int, line: bytes) -> None:
        """All of a line, or OSError: a disk that is nearly full takes a part, after which the next one begins anew."""
        left = b"\n" + line if self._is_line_open else line
        while left:
            num_taken = os.write(descriptor, left)
            left = left[num_taken:]
            self._is_line_open = bool(left)


def as_json_number(value: float) -> float | str:
    """A number as a record carries it: what is not finite by its name."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "Infinity" if value > 0 else "-Infinity"
    return value
