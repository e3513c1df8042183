"""Following logs over server-sent events so that no byte is lost or repeated, whatever happens to the connection.

Each chunk names its rank and byte offset, each event id the position after it. A broken stream is opened again with
Last-Event-ID; what arrives twice is cut off by its offset, what is missing is reported as a gap, and only the server's
`end` ends it. Not for: splitting text into lines or printing it.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from gangline.client.errors import ServerFailed, Unreachable
from gangline.client.http import Call, Transport
from gangline.client.log_models import Gap
from gangline.client.server_sent_events import EventParser, ServerSentEvent

SILENCE_SECONDS = 45.0
"""The server sends at least a ping each 15 s; after three missed ones the connection is taken for dead."""
FIRST_PATIENCE_SECONDS = 3.0
"""Before the first answer a server that does not answer is most likely not there."""
PATIENCE_SECONDS = 600.0
"""After it, an outage is waited out this long."""
PAUSES_SECONDS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0)
_POSITION_PART = re.compile(r"a(?P<attempt>[0-9]+)|r(?P<rank>[0-9]+):(?P<offset>[0-9]+)")


@dataclass(frozen=True, kw_only=True)
class AttemptStarted:
    """What follows belongs to this attempt."""

    attempt: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, kw_only=True)
class LogChunk:
    """Log text of one rank: bytes `offset` to `end_offset`. `position` resumes right after it."""

    attempt: int | None
    rank: int
    offset: int
    end_offset: int
    text: str
    position: str


@dataclass(frozen=True, kw_only=True)
class FollowEnd:
    """The job has ended and every byte has been sent."""

    state: str
    outcome: str | None
    exit_code: int | None


FollowItem = AttemptStarted | LogChunk | Gap | FollowEnd


@dataclass(frozen=True, kw_only=True)
class Position:
    """A place in the logs of an attempt: what an event id says. Spelt `a1,r0:812,r1:640`."""

    attempt: int | None = None
    offsets: dict[int, int] = field(default_factory=dict)


def parse_position(text: str) -> Position:
    """Read a position. Raises ValueError when it is none."""
    attempt: int | None = None
    offsets: dict[int, int] = {}
    for part in text.split(","):
        match = _POSITION_PART.fullmatch(part)
        if match is None:
            raise ValueError(f"{text!r} is not a log position; one looks like a1,r0:812,r1:640")
        if match["attempt"]:
            attempt = int(match["attempt"])
        else:
            offsets[int(match["rank"])] = int(match["offset"])
    return Position(attempt=attempt, offsets=offsets)


class LogFollower:
    """One follow of one job's logs. Iterate over it once."""

    def __init__(
        self,
        transport: Transport,
        job_id: int,
        *,
        ranks: str = "all",
        start: int | None = None,
        tail: int | None = None,
        position: str | None = None,
        on_trouble: Callable[[str], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
        monotonic: Callable[[], float] = time.monotonic,
    ) -> None:
        self.position = position or ""
        """Where to resume; moves on with every chunk given out."""
        self._transport = transport
        self._job_id = job_id
        self._params = tuple(
            (name, str(value))
            for name, value in (("ranks", ranks), ("from", start), ("tail", tail))
            if value is not None
        )
        self._on_trouble = on_trouble or (lambda message: None)
        self._sleep = sleep
        self._monotonic = monotonic
        self._has_been_answered = False
        self._attempt: int | None = None
        self._next_offsets: dict[tuple[int | None, int], int] = {}

    def __iter__(self) -> Iterator[FollowItem]:
        failures = 0
        failing_since: float | None = None
        while True:
            trouble = f"{self._transport.settings.url} closed the log stream before its end"
            try:
                for item in self._read_one_connection():
                    failures, failing_since = 0, None
                    yield item
                    if isinstance(item, FollowEnd):
                        return
                last_error = Unreachable(trouble, fix="try again; `gang logs -f` goes on from where it stopped")
            except Unreachable as error:
                last_error = error
            now = self._monotonic()
            failing_since = now if failing_since is None else failing_since
            patience = PATIENCE_SECONDS if self._has_been_answered else FIRST_PATIENCE_SECONDS
            if now - failing_since > patience:
                raise last_error
            if failures == 1:  # a single cut heals before anybody needs to hear of it
                self._on_trouble(last_error.detail)
            self._sleep(PAUSES_SECONDS[min(failures, len(PAUSES_SECONDS) - 1)])
            failures += 1

    def _read_one_connection(self) -> Iterator[FollowItem]:
        import httpx

        parser = EventParser()
        try:
            with self._transport.stream(self._call(), read_timeout_seconds=SILENCE_SECONDS) as answer:
                self._has_been_answered = True
                for data in answer.iter_bytes():
                    for event in parser.feed(data):
                        yield from self._accept(event)
        except httpx.TransportError as error:
            raise self._transport.unreachable(error) from error

    def _call(self) -> Call:
        headers = {"Accept": "text/event-stream", "Accept-Encoding": "identity", "Cache-Control": "no-cache"}
        params = self._params
        if self.position:
            headers["Last-Event-ID"] = self.position
            params = tuple(pair for pair in params if pair[0] == "ranks")
        return Call(method="GET", path=f"/jobs/{self._job_id}/logs/stream", params=params, headers=headers)

    def _accept(self, event: ServerSentEvent) -> Iterator[FollowItem]:
        """What an event means for whoever follows; kinds of a newer server are passed over."""
        handlers: dict[str, Callable[[dict[str, Any], str], list[FollowItem]]] = {
            "attempt": self._accept_attempt,
            "log": self._accept_log,
            "gap": self._accept_gap,
            "end": self._accept_end,
        }
        handler = handlers.get(event.event)
        if handler is None:
            return
        try:
            data = json.loads(event.data)
            items = handler(data, event.id)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ServerFailed(
                f"the log stream carries a {event.event} event this client does not understand: {error}",
                fix="use a client of the server's release",
            ) from error
        # The position moves before the item is given out: should the consumer stop right here, it has this item. One
        # that may be interrupted anywhere (Ctrl-C) remembers the position of the last chunk it has dealt with instead.
        if event.id:
            self.position = event.id
        yield from items

    def _accept_attempt(self, data: dict[str, Any], event_id: str) -> list[FollowItem]:
        attempt = int(data["attempt"])
        if attempt == self._attempt:
            return []  # said again after a reconnect
        self._attempt = attempt
        return [AttemptStarted(attempt=self._attempt, ranks=tuple(int(rank) for rank in data.get("ranks", ())))]

    def _accept_log(self, data: dict[str, Any], event_id: str) -> list[FollowItem]:
        rank, offset, text = int(data["rank"]), int(data["offset"]), str(data["text"])
        after = parse_position(event_id) if event_id else Position()
        attempt = after.attempt if after.attempt is not None else self._attempt
        end_offset = after.offsets.get(rank, offset + len(text.encode("utf-8", errors="surrogatepass")))
        key = (attempt, rank)
        expected = self._next_offsets.get(key)
        items: list[FollowItem] = []
        if expected is not None and offset < expected:
            if end_offset <= expected:
                return []
            text = _without_first_bytes(text, expected - offset)
            offset = expected
        elif expected is not None and offset > expected:
            items.append(Gap(rank=rank, start=expected, end=offset, attempt=attempt))
        self._next_offsets[key] = end_offset
        items.append(
            LogChunk(attempt=attempt, rank=rank, offset=offset, end_offset=end_offset, text=text, position=event_id)
        )
        return items

    def _accept_gap(self, data: dict[str, Any], event_id: str) -> list[FollowItem]:
        rank, start, end = int(data["rank"]), int(data["from"]), int(data["to"])
        key = (self._attempt, rank)
        if self._next_offsets.get(key, -1) >= end:
            return []
        self._next_offsets[key] = end
        return [Gap(rank=rank, start=start, end=end, attempt=self._attempt)]

    def _accept_end(self, data: dict[str, Any], event_id: str) -> list[FollowItem]:
        exit_code = data.get("exit_code")
        outcome = data.get("outcome")
        return [
            FollowEnd(
                state=str(data["state"]),
                outcome=None if outcome is None else str(outcome),
                exit_code=exit_code if isinstance(exit_code, int) else None,
            )
        ]


def _without_first_bytes(text: str, count: int) -> str:
    """`text` without its first `count` bytes of UTF-8; a character cut in two becomes a replacement character."""
    return text.encode("utf-8", errors="surrogatepass")[count:].decode("utf-8", errors="replace")
