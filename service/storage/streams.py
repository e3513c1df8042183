"""Bytes of streams in files: `<data>/streams/<attempt id>/<kind>-<rank>`. Sizes that count live in SQL, not here."""

from __future__ import annotations

import os
from pathlib import Path

from service.errors import StorageFull


class StreamFiles:
    """Write at an offset, read a window. Bytes beyond the size in SQL may exist here and mean nothing."""

    def __init__(self, data_folder: Path):
        self._folder = data_folder / "streams"
        self._known: set[int] = set()

    def path(self, attempt_id: int, kind: str, rank: int) -> Path:
        """The file of one stream."""
        return self._folder / str(attempt_id) / f"{kind}-{rank}"

    def write_at(self, attempt_id: int, kind: str, rank: int, offset: int, data: bytes) -> None:
        """Write `data` at `offset`. Raises StorageFull when the disk refuses."""
        path = self.path(attempt_id, kind, rank)
        try:
            if attempt_id not in self._known:
                path.parent.mkdir(parents=True, exist_ok=True)
                self._known.add(attempt_id)
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
            try:
                _write_all(descriptor, offset, data)
            finally:
                os.close(descriptor)
        except OSError as error:
            self._known.discard(attempt_id)
            raise StorageFull(f"cannot store log bytes: {error.strerror}") from error

    def read_at(self, attempt_id: int, kind: str, rank: int, offset: int, limit: int) -> bytes:
        """At most `limit` bytes from `offset`; empty when the file is not there."""
        try:
            descriptor = os.open(self.path(attempt_id, kind, rank), os.O_RDONLY)
        except FileNotFoundError:
            return b""
        try:
            return os.pread(descriptor, limit, offset)
        finally:
            os.close(descriptor)


def _write_all(descriptor: int, offset: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        written = os.pwrite(descriptor, view, offset)
        view = view[written:]
        offset += written
