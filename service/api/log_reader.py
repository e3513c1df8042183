"""Read a rank's log as far as SQL says it exists: windows of text cut where characters and lines end. No routes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, select

from service.db.tables import attempts, jobs, streams
from service.domain.states import AttemptState
from service.errors import NotFound
from service.storage.streams import StreamFiles

WINDOW_BYTES = 65_536
"""Most bytes in one piece; a longer line is cut there by force, so that a follower never hangs on it."""


@dataclass(frozen=True, kw_only=True)
class LogFacts:
    """What exists of an attempt's logs."""

    attempt_id: int
    attempt_number: int
    is_over: bool
    num_ranks: int
    sizes: dict[int, int]
    """Bytes by rank."""


def load_log_facts(connection: Connection, job: Row[Any], attempt_number: int | None) -> LogFacts | None:
    """The logs of an attempt (None: the latest); None while the job has had no attempt. Raises NotFound."""
    query = select(attempts).where(attempts.c.job_id == job.id)
    if attempt_number is not None:
        query = query.where(attempts.c.number == attempt_number)
    attempt = connection.execute(query.order_by(attempts.c.number.desc()).limit(1)).one_or_none()
    if attempt is None:
        if attempt_number is not None:
            raise NotFound(f"job {job.id} has no attempt {attempt_number}", fix=f"It has had {job.num_attempts}.")
        return None
    rows = connection.execute(
        select(streams.c.rank, streams.c.num_bytes).where(streams.c.attempt_id == attempt.id, streams.c.kind == "log")
    )
    return LogFacts(
        attempt_id=attempt.id,
        attempt_number=attempt.number,
        is_over=attempt.state == AttemptState.ENDED,
        num_ranks=attempt.num_nodes * attempt.processes_per_node,
        sizes={row.rank: row.num_bytes for row in rows},
    )


def read_text(files: StreamFiles, facts: LogFacts, rank: int, start: int, limit: int) -> tuple[str, int]:
    """Text from byte `start`, and the byte after it. Cut at a line's end where there is one, else at a character's.

    Bytes that are not UTF-8 become replacement characters. While the attempt goes on, an unfinished character at the
    end is left for the next read.
    """
    size = facts.sizes.get(rank, 0)
    data = files.read_at(facts.attempt_id, "log", rank, start, min(limit, max(0, size - start)))
    is_last = facts.is_over and start + len(data) >= size
    end = _cut(data, is_full=len(data) >= limit, is_last=is_last)
    return data[:end].decode("utf-8", "replace"), start + end


def _cut(data: bytes, *, is_full: bool, is_last: bool) -> int:
    if is_last:
        return len(data)
    if is_full:
        line_end = data.rfind(b"\n") + 1
        if line_end:
            return line_end
    unfinished = _unfinished_tail(data)
    # A window of one broken character must still move on.
    return len(data) - unfinished if unfinished < len(data) or not is_full else len(data)


def _unfinished_tail(data: bytes) -> int:
    """How many bytes at the end begin a UTF-8 character that may still be completed."""
    for back in range(1, min(3, len(data)) + 1):
        byte = data[-back]
        if byte & 0b1100_0000 == 0b1000_0000:
            continue
        needed = 2 if byte >> 5 == 0b110 else 3 if byte >> 4 == 0b1110 else 4 if byte >> 3 == 0b11110 else 1
        return back if needed > back else 0
    return 0


def tail_offset(files: StreamFiles, facts: LogFacts, rank: int, num_lines: int) -> int:
    """The byte where the last `num_lines` lines begin, read backwards in blocks."""
    end = facts.sizes.get(rank, 0)
    position, found = end, 0
    while position > 0:
        start = max(0, position - WINDOW_BYTES)
        block = files.read_at(facts.attempt_id, "log", rank, start, position - start)
        at = len(block)
        while (at := block.rfind(b"\n", 0, at)) >= 0:
            if start + at == end - 1:
                continue  # the newline that ends the last line begins no line
            found += 1
            if found == num_lines:
                return start + at + 1
        position = start
    return 0


def job_state(connection: Connection, job_id: int) -> Any:
    """State, outcome and cause of a job now."""
    return connection.execute(
        select(jobs.c.state, jobs.c.outcome, jobs.c.cause, jobs.c.num_attempts).where(jobs.c.id == job_id)
    ).one()
