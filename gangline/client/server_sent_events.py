"""Reading `text/event-stream`: bytes in any pieces in, whole events out. Pure.

An event counts only once its blank line has arrived, so what a cut connection leaves behind is dropped and asked for
again. Not for: what the events mean (`gangline.client.follow`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

_LINE_END = re.compile(rb"\r\n|\n|\r")


@dataclass(frozen=True, kw_only=True)
class ServerSentEvent:
    """One event. `id` is the last id seen on the stream, as the standard has it."""

    event: str
    data: str
    id: str


class EventParser:
    """Feed it bytes as they come; it yields the events they complete."""

    def __init__(self) -> None:
        self._buffer = b""
        self._last_id = ""
        self._clear()

    def feed(self, data: bytes) -> Iterator[ServerSentEvent]:
        """The events completed by `data`."""
        for line in self._lines(data):
            if line:
                self._take(line)
                continue
            if self._data:
                yield ServerSentEvent(event=self._event or "message", data="\n".join(self._data), id=self._last_id)
            self._clear()

    def _lines(self, data: bytes) -> Iterator[str]:
        # Only the new bytes are searched for line ends (a long line in small pieces stays linear). A CR that ends the
        # buffer may be half of a CRLF: it waits for the next byte.
        begin = max(0, len(self._buffer) - 1)
        self._buffer += data
        position = 0
        for match in _LINE_END.finditer(self._buffer, begin):
            if match.group() == b"\r" and match.end() == len(self._buffer):
                break
            yield self._buffer[position : match.start()].decode("utf-8", errors="replace")
            position = match.end()
        self._buffer = self._buffer[position:]

    def _take(self, line: str) -> None:
        if line.startswith(":"):
            return  # a comment, such as the server's ping
        name, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if name == "event":
            self._event = value
        elif name == "data":
            self._data.append(value)
        elif name == "id" and "\0" not in value:
            self._last_id = value

    def _clear(self) -> None:
        self._event = ""
        self._data: list[str] = []
