"""Logs: a page, the whole stored log, raw bytes, or following. Part of `Client`.

Not for: colours, prefixes, progress bars (`gangline.cli.logs`).
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gangline.client.base import BaseClient, query
from gangline.client.errors import GanglineError
from gangline.client.http import Call
from gangline.client.models import build

if TYPE_CHECKING:
    from gangline.client.follow import LogFollower
    from gangline.client.log_models import LogLine, LogPage

PAGE_BYTES = 65536
_LINES = re.compile(r"[^\n]*\n|[^\n]+")
"""Lines end at a line feed alone: `str.splitlines` would also cut at form feeds, NEL and the like."""
_RANKS = re.compile(r"all|[0-9]+(,[0-9]+)*")


class LogCalls(BaseClient):
    """The log methods of the client, by job id."""

    def log_page(
        self,
        job_id: int,
        *,
        rank: int = 0,
        attempt: int | None = None,
        start: int | None = None,
        limit_bytes: int = PAGE_BYTES,
        tail: int | None = None,
    ) -> LogPage:
        """One page of a rank's log, from byte `start` or the last `tail` lines. Answers at once in any state."""
        from gangline.client.log_models import LogPage

        params = {"rank": rank, "attempt": attempt, "limit": limit_bytes, "tail": tail, "from_": start}
        return build(LogPage, self.get(f"/jobs/{job_id}/logs", **params))

    def log_pages(
        self,
        job_id: int,
        *,
        rank: int = 0,
        attempt: int | None = None,
        start: int | None = None,
        tail: int | None = None,
    ) -> Iterator[LogPage]:
        """Pages up to the size the log had at the first one; the first page always, also when it is empty."""
        page = self.log_page(job_id, rank=rank, attempt=attempt, start=start, tail=tail)
        goal = page.size
        yield page
        while page.next_offset < goal and page.next_offset > page.offset:
            # The attempt of the first page: a new one must not slip in between two pages.
            page = self.log_page(job_id, rank=rank, attempt=page.attempt, start=page.next_offset)
            yield page

    def log_bytes(
        self, job_id: int, *, rank: int = 0, attempt: int | None = None, start: int | None = None
    ) -> Iterator[bytes]:
        """A rank's log exactly as it was written, in pieces."""
        headers = {"Accept": "*/*", "Accept-Encoding": "identity"}
        if start:
            headers["Range"] = f"bytes={start}-"
        call = Call(
            method="GET",
            path=f"/jobs/{job_id}/logs/raw",
            params=query({"rank": rank, "attempt": attempt}),
            headers=headers,
        )
        try:
            with self.transport.stream(call, read_timeout_seconds=self.transport.timeout_seconds) as answer:
                yield from answer.iter_bytes()
        except GanglineError as error:
            if error.status != 416:  # the range begins at or behind the end: there is nothing more
                raise

    def follow(
        self,
        job_id: int,
        *,
        ranks: str = "all",
        start: int | None = None,
        tail: int | None = None,
        position: str | None = None,
    ) -> LogFollower:
        """Follow the logs of `ranks` (`all` or `0,2`) to the end of the job. Exact across lost connections.

        Iterate for AttemptStarted, LogChunk, Gap and, last, FollowEnd. `position` goes on after an earlier chunk.
        """
        from gangline.client.follow import LogFollower

        if not _RANKS.fullmatch(ranks):
            raise ValueError(f"ranks={ranks!r}: expected `all` or numbers with commas, such as `0,2`")
        return LogFollower(
            self.transport,
            job_id,
            ranks=ranks,
            start=start,
            tail=tail,
            position=position,
            on_trouble=self.on_trouble,
        )

    def log_lines(
        self, job_id: int, *, ranks: str = "all", follow: bool = False, tail: int | None = None
    ) -> Iterator[LogLine]:
        """Lines of text. Without `follow`: what is stored now, of rank 0 unless ranks are given, rank after rank."""
        if follow:
            from gangline.client.follow import LogChunk

            for item in self.follow(job_id, ranks=ranks, tail=tail):
                if isinstance(item, LogChunk):
                    yield from _lines(item.text, item.rank, item.offset, item.attempt)
            return
        for rank in (0,) if ranks == "all" else tuple(int(part) for part in ranks.split(",")):
            yield from self._stored_lines(job_id, rank, tail)

    def _stored_lines(self, job_id: int, rank: int, tail: int | None) -> Iterator[LogLine]:
        rest, rest_offset = "", 0
        for page in self.log_pages(job_id, rank=rank, tail=tail):
            # A page may end inside a line: its beginning waits for the next page.
            text, offset = (rest + page.text, rest_offset) if rest else (page.text, page.offset)
            whole, _, rest = text.rpartition("\n")
            lines = whole + "\n" if len(rest) < len(text) else ""
            rest_offset = offset + len(lines.encode("utf-8", errors="replace"))
            yield from _lines(lines, rank, offset, page.attempt)
        yield from _lines(rest, rank, rest_offset, page.attempt)


def _lines(text: str, rank: int, offset: int, attempt: int | None) -> Iterator[LogLine]:
    from gangline.client.log_models import LogLine

    for line in _LINES.findall(text):
        yield LogLine(rank=rank, text=line, offset=offset, attempt=attempt)
        offset += len(line.encode("utf-8", errors="replace"))
