"""Sends what ranks write, byte for byte: each log and events file is the spool, and an offset says how far it is sent.

The server appends at an offset or says where it stands, so nothing is lost or repeated whatever fails in between:
`offsets.json` only saves a question after a restart. Not for: back-off and threads (`worker.courier`).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangline.protocol import names
from gangline.protocol.launch import LaunchPlan
from worker.agent_log import log
from worker.api import Answered, Conflict, Fenced
from worker.attempt_folder import ranks_of
from worker.state import write_json

MAX_CHUNK_BYTES: Final = 1 << 20
"""Largest body of one PUT."""
LOG: Final = "log"
EVENTS: Final = "events"

Put = Callable[[str, int, int, bytes], int]
"""`AttemptApi.put_stream`: (stream, rank, offset, data) to the size now stored."""


@dataclass(frozen=True, kw_only=True)
class StreamFile:
    """One file that is shipped."""

    kind: str
    """`log` or `events`."""
    rank: int
    path: Path

    @property
    def key(self) -> str:
        """Its name in `offsets.json` and in the report."""
        return f"{self.kind}/{self.rank}"


@dataclass(frozen=True, kw_only=True)
class Round:
    """What one look at every file came to."""

    num_bytes: int
    """Sent and accepted."""
    refusal: Answered | None = None
    """The last answer that refused bytes, if any did."""


def streams_of(attempt_folder: Path, plan: LaunchPlan) -> tuple[StreamFile, ...]:
    """Every stream of this node, events before logs: they are few, and the progress display waits for them."""
    events = [StreamFile(kind=EVENTS, rank=r, path=attempt_folder / names.events_file(r)) for r in ranks_of(plan)]
    logs = [StreamFile(kind=LOG, rank=r, path=attempt_folder / names.log_file(r)) for r in ranks_of(plan)]
    return (*events, *logs)


def next_chunk(kind: str, data: bytes, is_final: bool) -> bytes:
    """The part of freshly read `data` to send now. Events go in whole lines, so that no reader ever sees half of one;
    the rest of a line waits, unless nothing more will come or it fills a whole chunk. Pure."""
    if kind != EVENTS or is_final:
        return data
    whole = data[: data.rfind(b"\n") + 1]
    return data if not whole and len(data) >= MAX_CHUNK_BYTES else whole


class Shipper:
    """Keeps the offsets of an attempt's streams. One thread only."""

    def __init__(self, streams: Iterable[StreamFile], offsets_file: Path, put: Put) -> None:
        self._streams = tuple(streams)
        self._offsets_file = offsets_file
        self._put = put
        known = _read_offsets(offsets_file)
        self._offsets = {stream.key: known.get(stream.key, 0) for stream in self._streams}

    @property
    def offsets(self) -> Mapping[str, int]:
        """Bytes of each stream that the server has accepted."""
        return dict(self._offsets)

    def sizes(self) -> dict[str, int]:
        """Bytes of each stream on disk now."""
        return {stream.key: _size(stream.path) for stream in self._streams}

    def is_all_sent(self) -> bool:
        """Whether the server has every byte that is on disk now."""
        return all(_size(stream.path) <= self._offsets[stream.key] for stream in self._streams)

    def ship_round(self, *, is_final: bool = False) -> Round:
        """Send at most one chunk of each stream that has something new.

        A refused stream does not keep the others back. Raises `Fenced` and `Unavailable`.
        """
        num_bytes = 0
        refusal: Answered | None = None
        try:
            for stream in self._streams:
                try:
                    num_bytes += self._ship(stream, is_final)
                except Fenced:
                    raise
                except Answered as error:
                    refusal = error
        finally:
            if num_bytes:
                self._save_offsets()
        return Round(num_bytes=num_bytes, refusal=refusal)

    def _save_offsets(self) -> None:
        try:
            write_json(self._offsets_file, self._offsets)
        except OSError as error:
            log("offsets_not_saved", error=error)  # a full disk; the server knows them as well

    def _ship(self, stream: StreamFile, is_final: bool) -> int:
        offset = self._offsets[stream.key]
        if _size(stream.path) <= offset:
            return 0
        with stream.path.open("rb") as file:
            file.seek(offset)
            data = next_chunk(stream.kind, file.read(MAX_CHUNK_BYTES), is_final)
        if not data:
            return 0
        try:
            stored = self._put(stream.kind, stream.rank, offset, data)
        except Conflict as error:
            stored = _size_of_conflict(error)
            if stored == offset:
                raise  # it says that we differ, and names the offset that we sent at
        self._offsets[stream.key] = stored
        return len(data)


def _size_of_conflict(error: Conflict) -> int:
    size = error.problem.get("size")
    if error.code != "offset_mismatch" or not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise error
    return size


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0  # the job removed it; what was sent stays


def _read_offsets(path: Path) -> dict[str, int]:
    try:
        data = json.loads(path.read_bytes())
    except (FileNotFoundError, ValueError):
        return {}  # the server knows better: the first PUT is answered with where it stands
    return {key: value for key, value in data.items() if isinstance(value, int)} if isinstance(data, dict) else {}
