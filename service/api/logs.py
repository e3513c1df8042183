"""Routes of logs: a JSON page, raw bytes with Range, and a server-sent stream whose ids are byte offsets."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import AsyncIterator
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response, StreamingResponse

from gangline.protocol.names import API_PREFIX
from gangline.protocol.outcomes import JobState
from service.api.deps import MAX_ID, AppState, AttemptNumber, State, allowed_job, bearer_token, caller, json_response
from service.api.log_reader import WINDOW_BYTES, LogFacts, job_state, load_log_facts, read_text, tail_offset
from service.auth.permissions import Action
from service.auth.principals import Principal
from service.errors import Forbidden, InvalidRequest, NotFound, Unauthorized

log = logging.getLogger("gangline.api")
router = APIRouter(prefix=f"{API_PREFIX}/jobs/{{job_id}}/logs")
PAGE_BYTES = 1_048_576
KEEP_ALIVE_SECONDS = 15.0
Reader = Annotated[Principal, Depends(caller(Action.JOB_READ))]
Offset = Annotated[int, Query(ge=0, le=MAX_ID, alias="from")]


@router.get("")
def get_page(
    state: State,
    principal: Reader,
    job_id: int,
    rank: Annotated[int, Query(ge=0)] = 0,
    attempt: AttemptNumber = None,
    start: Offset = 0,
    limit: Annotated[int, Query(ge=1, le=PAGE_BYTES)] = WINDOW_BYTES,
    tail: Annotated[int | None, Query(ge=1)] = None,
) -> Response:
    """A window of one rank's log as text; answers at once, with nothing, while there is nothing."""
    with state.database.read() as connection:
        job = allowed_job(connection, principal, job_id, Action.JOB_READ)
        facts = load_log_facts(connection, job, attempt)
    page = {"attempt": None, "rank": rank, "offset": 0, "next_offset": 0, "size": 0, "text": "", "end": False}
    if facts is not None:
        offset = tail_offset(state.streams, facts, rank, tail) if tail is not None else start
        text, following = read_text(state.streams, facts, rank, offset, limit)
        size = facts.sizes.get(rank, 0)
        page.update(
            attempt=facts.attempt_number,
            offset=offset,
            next_offset=following,
            size=size,
            text=text,
            end=facts.is_over and following >= size,
        )
    return json_response({**page, "state": job.state})


@router.get("/raw")
def get_raw(
    state: State,
    principal: Reader,
    job_id: int,
    rank: Annotated[int, Query(ge=0)] = 0,
    attempt: AttemptNumber = None,
    byte_range: Annotated[str | None, Header(alias="range")] = None,
) -> Response:
    """The bytes of one rank's log as they were written, whole or a range of them."""
    with state.database.read() as connection:
        job = allowed_job(connection, principal, job_id, Action.JOB_READ)
        facts = load_log_facts(connection, job, attempt)
    size = facts.sizes.get(rank, 0) if facts else 0
    headers = {
        "Accept-Ranges": "bytes",
        "Content-Disposition": f'attachment; filename="job-{job_id}-rank-{rank}.log"',
    }
    wanted = _parse_range(byte_range, size)
    if wanted == "unsatisfiable":
        return Response(status_code=416, headers={**headers, "Content-Range": f"bytes */{size}"})
    start, end = wanted if isinstance(wanted, tuple) else (0, size)
    headers["Content-Length"] = str(end - start)
    status = 200
    if isinstance(wanted, tuple):
        status = 206
        headers["Content-Range"] = f"bytes {start}-{end - 1}/{size}"

    def pieces() -> Any:
        position = start
        while facts is not None and position < end:
            data = state.streams.read_at(facts.attempt_id, "log", rank, position, min(PAGE_BYTES, end - position))
            if not data:
                return
            position += len(data)
            yield data

    return StreamingResponse(pieces(), status, headers, media_type="application/octet-stream")


def _parse_range(header: str | None, size: int) -> tuple[int, int] | str | None:
    """First and last-plus-one byte of a single range; None: the whole; `unsatisfiable`."""
    match = re.fullmatch(r"bytes=(\d{0,18})-(\d{0,18})", header.strip()) if header else None
    if match is None or match.groups() == ("", ""):
        return None
    first, last = match.groups()
    if not first:
        start, end = max(0, size - int(last)), size
    else:
        start, end = int(first), min(size, int(last) + 1) if last else size
    return (start, end) if start < end else "unsatisfiable"


@router.get("/stream")
async def get_stream(
    request: Request,
    state: State,
    principal: Reader,
    job_id: int,
    ranks: str = "all",
    attempt: AttemptNumber = None,
    start: Offset = 0,
    tail: Annotated[int | None, Query(ge=1)] = None,
    last_event_id: Annotated[str | None, Header()] = None,
) -> Response:
    """Follow the logs of a job's ranks over its attempts, until it ends. Resumes exactly by Last-Event-ID."""
    chosen = None if ranks == "all" else _parse_ranks(ranks)
    resumed = _parse_event_id(last_event_id) if last_event_id else None

    def check() -> None:
        with state.database.read() as connection:
            job = allowed_job(connection, principal, job_id, Action.JOB_READ)
            load_log_facts(connection, job, resumed[0] if resumed else attempt)

    await run_in_threadpool(check)
    token = bearer_token(request)
    follower = _Follower(state, token, job_id, chosen, only_attempt=attempt, start=start, tail=tail, resumed=resumed)
    headers = {"Cache-Control": "no-store", "X-Accel-Buffering": "no"}
    return StreamingResponse(follower.events(), headers=headers, media_type="text/event-stream")


def _parse_ranks(text: str) -> frozenset[int]:
    if not re.fullmatch(r"\d{1,6}(,\d{1,6})*", text):
        raise InvalidRequest(f"ranks={text!r} is not a list of ranks", fix="Use ranks=all or ranks=0,2.")
    return frozenset(int(part) for part in text.split(","))


def _parse_event_id(text: str) -> tuple[int, dict[int, int]]:
    match = re.fullmatch(r"a(\d{1,9})((?:,r\d{1,6}:\d{1,18})*)", text.strip())
    if match is None:
        raise InvalidRequest(f"Last-Event-ID {text!r} is not one that this stream gave", fix="Start without it.")
    offsets = (part.split(":") for part in match.group(2).split(",") if part)
    return int(match.group(1)), {int(rank[1:]): int(offset) for rank, offset in offsets}


class _Follower:
    """One follower's position: the attempt, and the byte offset in each rank's log."""

    def __init__(
        self,
        state: AppState,
        token: str,
        job_id: int,
        ranks: frozenset[int] | None,
        *,
        only_attempt: int | None,
        start: int,
        tail: int | None,
        resumed: tuple[int, dict[int, int]] | None,
    ):
        self._state = state
        self._token = token
        self._job_id = job_id
        self._ranks = ranks
        self._only_attempt = only_attempt
        self._start = start
        self._tail = tail
        self._number, self._offsets = resumed or (only_attempt or 0, {})
        self._is_announced = resumed is not None

    async def events(self) -> AsyncIterator[bytes]:
        """The stream's events until the job (or the attempt asked for) has ended and everything was sent.

        It breaks off, without an end event, once the caller may not read any more: the next request says why.
        """
        try:
            async for piece in self._events():
                yield piece
        except (Unauthorized, Forbidden, NotFound) as error:
            log.info("stream_broken_off job_id=%s why=%s", self._job_id, error.detail)

    async def _events(self) -> AsyncIterator[bytes]:
        topics: tuple[str, ...] = (f"job:{self._job_id}",)
        while not self._state.bus.is_closed:
            facts = await run_in_threadpool(self._facts)
            wanted = topics[:1] if facts is None else (*topics[:1], f"log:{facts.attempt_id}")
            with self._state.bus.subscribe(*wanted) as subscription:
                while True:
                    facts, pieces, ended = await run_in_threadpool(self._look)
                    for piece in pieces:
                        yield piece
                    if ended is not None:
                        yield _event("end", ended)
                        return
                    if facts is not None and f"log:{facts.attempt_id}" not in wanted:
                        break
                    if pieces:
                        continue
                    timeout = KEEP_ALIVE_SECONDS if self._state.database.is_sqlite else 0.5
                    if not await subscription.wait(timeout):
                        if self._state.bus.is_closed:
                            return
                        yield b": still here\n\n"

    def _facts(self) -> LogFacts | None:
        principal = self._state.principals.current(self._token)
        if principal is None:
            raise Unauthorized("the token of this stream is not valid any more")
        with self._state.database.read() as connection:
            job = allowed_job(connection, principal, self._job_id, Action.JOB_READ)
            number = self._number or None
            if number is None and job.num_attempts:
                number = job.num_attempts if self._tail is not None or self._start else 1
            facts = load_log_facts(connection, job, number)
        if self._state.principals.current(self._token) is None:  # what was written since must not be read either
            raise Unauthorized("the token of this stream is not valid any more")
        return facts

    def _look(self) -> tuple[LogFacts | None, list[bytes], dict[str, Any] | None]:
        """What there is to send now, and the end if this was the last of it. Authorises anew each time."""
        with self._state.database.read() as connection:
            before = job_state(connection, self._job_id)
        facts = self._facts()
        if facts is None:
            is_over = JobState(before.state).is_terminal
            return None, [], self._end(before) if is_over else None
        pieces = self._begin_attempt(facts)
        for rank in self._wanted_ranks(facts):
            pieces.extend(self._read_rank(facts, rank))
        if len(pieces) > _MAX_PIECES or any(
            self._offset(facts, r) < facts.sizes.get(r, 0) for r in self._wanted_ranks(facts)
        ):
            return facts, pieces, None
        if not facts.is_over:
            return facts, pieces, None
        if self._only_attempt is None and before.num_attempts > facts.attempt_number:
            self._number, self._offsets, self._is_announced = facts.attempt_number + 1, {}, False
            self._start, self._tail = 0, None
            return self._facts(), pieces or [b": next attempt\n\n"], None
        is_over = self._only_attempt is not None or JobState(before.state).is_terminal
        return facts, pieces, self._end(before) if is_over else None

    def _begin_attempt(self, facts: LogFacts) -> list[bytes]:
        self._number = facts.attempt_number
        if self._is_announced:
            return []
        self._is_announced = True
        ranks = sorted(self._wanted_ranks(facts))
        for rank in ranks:
            self._offsets[rank] = (
                tail_offset(self._state.streams, facts, rank, self._tail) if self._tail is not None else self._start
            )
        return [_event("attempt", {"attempt": facts.attempt_number, "ranks": ranks}, self._event_id())]

    def _wanted_ranks(self, facts: LogFacts) -> list[int]:
        known = set(range(facts.num_ranks)) | set(facts.sizes)
        return sorted(known if self._ranks is None else known & self._ranks)

    def _offset(self, facts: LogFacts, rank: int) -> int:
        return (
            min(self._offsets.get(rank, 0), facts.sizes.get(rank, 0))
            if rank not in self._offsets
            else self._offsets[rank]
        )

    def _read_rank(self, facts: LogFacts, rank: int) -> list[bytes]:
        pieces: list[bytes] = []
        while len(pieces) < _PIECES_PER_RANK:
            offset = self._offsets.get(rank, 0)
            if offset >= facts.sizes.get(rank, 0):
                break
            text, following = read_text(self._state.streams, facts, rank, offset, WINDOW_BYTES)
            if following == offset:
                break
            self._offsets[rank] = following
            pieces.append(_event("log", {"rank": rank, "offset": offset, "text": text}, self._event_id()))
        return pieces

    def _event_id(self) -> str:
        offsets = "".join(f",r{rank}:{offset}" for rank, offset in sorted(self._offsets.items()))
        return f"a{self._number}{offsets}"

    @staticmethod
    def _end(row: Any) -> dict[str, Any]:
        cause = json.loads(row.cause) if row.cause else {}
        return {"state": row.state, "outcome": row.outcome, "exit_code": cause.get("exit_code")}


_PIECES_PER_RANK = 16
_MAX_PIECES = 1_000


def _event(kind: str, data: dict[str, Any], event_id: str | None = None) -> bytes:
    """One server-sent event. JSON holds no line break, so one data line is enough."""
    lines = [f"event: {kind}", f"data: {json.dumps(data, ensure_ascii=True)}"]
    if event_id is not None:
        lines.insert(0, f"id: {event_id}")
    return ("\n".join(lines) + "\n\n").encode()
