"""What a file system says when it has no room: the disk is full, a quota is used up, a file may not grow further.

Trainer and service read errors by the same table, so that both call the same texts a full disk. Not for: whose disk.
"""

from __future__ import annotations

from typing import Final

_STORAGE_FULL: Final = ("No space left on device", "Disk quota exceeded", "File too large")


def is_storage_full_text(text: str) -> bool:
    """Whether an error's message says that there was no room to write."""
    return any(one in text for one in _STORAGE_FULL)
