"""Says that a checkpoint is still being written or read, so that a slow disk is not taken for a hang.

What a rank moves in that time are bytes alone: those in the checkpoints' folder, which other ranks of the node may
write, and those that it reads and writes itself (checksums). Not for: whether what is written is right (`layout`).
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

LOOK_SECONDS: Final = 10.0
SHARE_BYTES: Final = 1 << 20
"""Less than this may be anything, the log for one."""


@contextlib.contextmanager
def told_while_bytes_move(
    root: Path | None, tell: Callable[[float], None], *, look_seconds: float = LOOK_SECONDS
) -> Iterator[None]:
    """Call `tell`, in another thread, after `look_seconds` in which bytes were moved below `root` or by this process.

    It gets the seconds since the beginning, and is not called after the end. `root` None: there are no checkpoints, so
    nothing is looked at. Looks into the file system.
    """
    if root is None:
        yield
        return
    is_over, telling, began = threading.Event(), threading.Lock(), time.monotonic()

    def look() -> None:
        last = moved_bytes(root)
        while not is_over.wait(look_seconds):
            now = moved_bytes(root)
            with telling:
                if now != last and not is_over.is_set():
                    tell(time.monotonic() - began)
            last = now

    threading.Thread(target=look, daemon=True, name="checkpoint-growth").start()
    try:
        yield
    finally:
        with telling:
            is_over.set()  # nobody waits for the thread: a look at a file system that hangs would keep the rank


def moved_bytes(root: Path) -> tuple[int, int]:
    """(in files below `root`, read and written by this process), each in mebibytes."""
    return _in_files(root) // SHARE_BYTES, _by_this_process() // SHARE_BYTES


def _in_files(root: Path) -> int:
    total = 0
    for folder, _, names in os.walk(root):  # passes over what vanishes meanwhile
        for name in names:
            with contextlib.suppress(OSError):
                total += (Path(folder) / name).stat().st_size
    return total


def _by_this_process() -> int:
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:
        return 0  # not Linux, or not to be seen here: the files have to do
    counts = dict(line.split(": ", 1) for line in lines)
    return int(counts["rchar"]) + int(counts["wchar"])
