"""A small REST server on loopback that behaves as the contract says, and misbehaves when told to.

It answers from plain dictionaries, records every request, can cut an answer after it has acted and cut a log stream at
any byte. Not for: what the real service decides (its own tests), only for what clients must cope with.
"""

from __future__ import annotations

import contextlib
import json
import re
import socket
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gangline.protocol.names import API_PREFIX

TOKEN = "glu_test-token-0123456789"


@dataclass(frozen=True, kw_only=True)
class Request:
    """One request as it came."""

    method: str
    path: str
    """Without the API prefix."""
    params: dict[str, list[str]]
    headers: dict[str, str]
    body: bytes

    @property
    def name(self) -> str:
        """Method and path, such as `POST /jobs`."""
        return f"{self.method} {self.path}"


class Cut(Exception):
    """Close the connection now, without (the rest of) an answer."""


@dataclass
class Answer:
    """What to answer."""

    status: int = 200
    body: Any = None
    headers: dict[str, str] = field(default_factory=dict)


def a_job(job_id: int = 12, **changes: Any) -> dict[str, Any]:
    """A running job of 2 × 2 ranks as REST shows it; `changes` replace fields."""
    job: dict[str, Any] = {
        "id": job_id,
        "name": "gpt",
        "owner": "priya",
        "team": "vision",
        "private": False,
        "state": "running",
        "submitted_at": "2026-01-05T10:00:00.000Z",
        "started_at": "2026-01-05T10:00:04.000Z",
        "ended_at": None,
        "resources": {"nodes": 2, "gpus_per_node": 2, "gpus": 4, "gpu": None},
        "processes_per_node": 2,
        "priority": 0,
        "held": None,
        "start_after": None,
        "tags": {},
        "attempts": 1,
        "attempt": None,
        "reason": None,
        "outcome": None,
        "cause": None,
        "progress": None,
        "cost": {"gpu_seconds": 12.5},
        "version": 1,
        "spec": {"name": "gpt", "run": {"kind": "script", "script": "train.py"}},
        "a_field_of_a_newer_server": {"ignored": True},
    }
    return {**job, **changes}


def a_problem(status: int, code: str, detail: str, **more: Any) -> Answer:
    """An error answer."""
    body = {"type": "about:blank", "title": code, "status": status, "code": code, "detail": detail, **more}
    return Answer(status=status, body=body, headers={"Content-Type": "application/problem+json"})


class FakeServer:
    """The server's state and its faults. Use as a context manager."""

    def __init__(self) -> None:
        self.jobs: dict[int, dict[str, Any]] = {}
        self.logs: dict[int, bytes] = {}
        """Log of the (one) attempt of any job, by rank."""
        self.log_is_complete = True
        """Whether streams end; else they stay open after the last byte."""
        self.bundles: dict[str, bytes] = {}
        self.keys: dict[str, dict[str, Any]] = {}
        self.requests: list[Request] = []
        self.overrides: dict[str, Callable[[Request], Answer | None]] = {}
        """By `METHOD /path`: an answer, or None to go on as usual; may raise Cut."""
        self.cut_after_acting: dict[str, int] = {}
        """By `METHOD /path`: how many answers are still to be lost after the server has acted."""
        self.stream_cuts: Iterator[int] = iter(())
        """After how many bytes each stream connection is cut; exhausted: no more cuts."""
        self.stream_step = 64
        """Log bytes of one event."""
        self.changed = threading.Condition()
        self.stopping = threading.Event()
        handler = type("Handler", (_Handler,), {"fake": self})
        self._http = ThreadingHTTPServer(("127.0.0.1", 0), handler)
        self._http.daemon_threads = True
        self._thread = threading.Thread(target=self._http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)

    @property
    def url(self) -> str:
        """Its address."""
        return f"http://127.0.0.1:{self._http.server_address[1]}"

    def __enter__(self) -> FakeServer:
        self._thread.start()
        return self

    def __exit__(self, *exception: object) -> None:
        self.stopping.set()
        with self.changed:
            self.changed.notify_all()
        self._http.shutdown()
        self._http.server_close()

    def add(self, job: dict[str, Any]) -> dict[str, Any]:
        """Put a job there."""
        self.jobs[job["id"]] = job
        return job

    def update(self, job_id: int, **changes: Any) -> None:
        """Change a job and wake its long polls."""
        with self.changed:
            self.jobs[job_id] = {**self.jobs[job_id], **changes, "version": self.jobs[job_id]["version"] + 1}
            self.changed.notify_all()

    def finish(self, job_id: int, state: str, outcome: str, **changes: Any) -> None:
        """End a job."""
        self.update(job_id, state=state, outcome=outcome, ended_at="2026-01-05T10:03:09.000Z", **changes)

    def requests_to(self, name: str) -> list[Request]:
        """The requests of one `METHOD /path`."""
        return [request for request in list(self.requests) if request.name == name]

    # --- Routes ----------------------------------------------------------------------------------------------------

    def answer(self, request: Request) -> Answer:
        """What the server says to a request."""
        override = self.overrides.get(request.name)
        said = override(request) if override else None
        if said is not None:
            return said
        for pattern, method in _ROUTES.items():
            match = re.fullmatch(pattern, request.name)
            if match is not None:
                return getattr(self, method)(request, *match.groups())
        return a_problem(404, "not_found", f"no route {request.name}", fix="Look at the routes.")

    def submit(self, request: Request) -> Answer:
        """POST /jobs, replaying by key."""
        if request.params.get("dry_run") == ["true"]:
            return Answer(
                body={"valid": True, "spec": {"name": "gpt"}, "resources": a_job()["resources"], "reason": None}
            )
        key = request.headers.get("idempotency-key", "")
        with self.changed:
            if key in self.keys:
                return Answer(201, self.keys[key], {"Idempotent-Replayed": "true"})
            job = self.add(a_job(max(self.jobs, default=11) + 1, state="waiting", started_at=None))
            if key:
                self.keys[key] = job
        return Answer(201, job)

    def list_jobs(self, request: Request) -> Answer:
        """GET /jobs, newest first, by cursor."""
        wanted = {name: request.params[name][0] for name in ("name", "state") if name in request.params}
        found = [job for job in self.jobs.values() if all(job[name] == value for name, value in wanted.items())]
        found.sort(key=lambda job: -job["id"])
        before = int(request.params.get("cursor", ["999999"])[0])
        limit = int(request.params.get("limit", ["50"])[0])
        page = [job for job in found if job["id"] < before]
        following = str(page[limit - 1]["id"]) if len(page) > limit else None
        return Answer(body={"items": page[:limit], "next": following})

    def get_job(self, request: Request, job_id: str) -> Answer:
        """GET /jobs/{id} with If-None-Match and `wait`."""
        if int(job_id) not in self.jobs:
            return a_problem(404, "not_found", f"there is no job {job_id}", fix="Look it up: gang ls.")
        hold = float(request.params.get("wait", ["0"])[0])
        known = request.headers.get("if-none-match")
        with self.changed:
            self.changed.wait_for(lambda: self.stopping.is_set() or self._etag(job_id) != known, timeout=hold)
            job, etag = self.jobs[int(job_id)], self._etag(job_id)
        return Answer(304, None, {"ETag": etag}) if etag == known else Answer(body=job, headers={"ETag": etag})

    def _etag(self, job_id: str) -> str:
        return f'"{self.jobs[int(job_id)]["version"]}"'

    def cancel(self, request: Request, job_id: str) -> Answer:
        """POST /jobs/{id}/cancel."""
        self.update(int(job_id), state="stopping")
        return Answer(202, self.jobs[int(job_id)])

    def requeue(self, request: Request, job_id: str) -> Answer:
        """POST /jobs/{id}/requeue."""
        if self.jobs[int(job_id)]["state"] != "running":
            return a_problem(409, "conflict", f"job {job_id} waits already", fix="Nothing to do.")
        self.update(int(job_id), state="stopping")
        return Answer(202, self.jobs[int(job_id)])

    def page(self, request: Request, job_id: str) -> Answer:
        """GET /jobs/{id}/logs."""
        job = self.jobs[int(job_id)]
        rank = int(request.params.get("rank", ["0"])[0])
        data = self.logs.get(rank, b"")
        begin = int(request.params.get("from", ["0"])[0])
        if "tail" in request.params:
            lines = data.splitlines(keepends=True)[-int(request.params["tail"][0]) :]
            begin = len(data) - sum(len(line) for line in lines)
        piece = data[begin : begin + min(int(request.params["limit"][0]), 1000)]
        body = {
            "attempt": 1 if data else None,
            "rank": rank,
            "offset": begin,
            "next_offset": begin + len(piece),
            "size": len(data),
            "text": piece.decode("utf-8", errors="replace"),
            "end": False,
            "state": job["state"],
        }
        return Answer(body=body)

    def raw(self, request: Request, job_id: str) -> Answer:
        """GET /jobs/{id}/logs/raw."""
        data = self.logs.get(int(request.params.get("rank", ["0"])[0]), b"")
        return Answer(body=data, headers={"Content-Type": "application/octet-stream"})

    def head_bundle(self, request: Request, digest: str) -> Answer:
        """HEAD /bundles/{digest}."""
        return Answer(200 if digest in self.bundles else 404)

    def put_bundle(self, request: Request, digest: str) -> Answer:
        """PUT /bundles/{digest}."""
        self.bundles[digest] = request.body
        return Answer(201, {"digest": digest})

    def me(self, request: Request) -> Answer:
        """GET /me."""
        return Answer(body={"name": "priya", "admin": True, "teams": ["vision"], "server_version": "0.1.0"})

    # --- The log stream --------------------------------------------------------------------------------------------

    def stream(self, request: Request) -> Iterator[bytes]:
        """The events of a log stream, resumed by Last-Event-ID."""
        job_id = int(request.path.split("/")[2])
        ranks = sorted(self.logs)
        if (chosen := request.params.get("ranks", ["all"])[0]) != "all":
            ranks = [int(rank) for rank in chosen.split(",")]
        offsets = dict.fromkeys(ranks, int(request.params.get("from", ["0"])[0]))
        resumed = request.headers.get("last-event-id", "")
        offsets |= {int(rank): int(offset) for rank, offset in re.findall(r"r(\d+):(\d+)", resumed)}
        if not resumed:
            yield _event("attempt", {"attempt": 1, "ranks": ranks}, _position(offsets))
        yield b": ping\n\n"
        while any(offsets[rank] < len(self.logs[rank]) for rank in ranks):
            for rank in ranks:
                begin = offsets[rank]
                piece = _whole_characters(self.logs[rank][begin : begin + self.stream_step])
                if piece:
                    offsets[rank] += len(piece)
                    text = piece.decode("utf-8", errors="replace")
                    yield _event("log", {"rank": rank, "offset": begin, "text": text}, _position(offsets))
        if not self.log_is_complete:
            while not self.log_is_complete and not self.stopping.wait(0.02):
                pass
        job = self.jobs[job_id]
        yield _event("end", {"state": job["state"], "outcome": job["outcome"], "exit_code": 0}, None)


def _whole_characters(piece: bytes) -> bytes:
    """`piece` without a character that its end cuts in two (but never nothing of something)."""
    for drop in range(min(4, len(piece))):
        with contextlib.suppress(UnicodeDecodeError):
            piece[: len(piece) - drop].decode("utf-8")
            return piece[: len(piece) - drop]
    return piece


def _position(offsets: dict[int, int]) -> str:
    return ",".join(["a1", *(f"r{rank}:{offset}" for rank, offset in sorted(offsets.items()))])


def _event(kind: str, data: dict[str, Any], event_id: str | None) -> bytes:
    lines = [f"event: {kind}", f"data: {json.dumps(data)}"]
    return ("\n".join([f"id: {event_id}", *lines] if event_id else lines) + "\n\n").encode()


_ROUTES = {
    r"POST /jobs": "submit",
    r"GET /jobs": "list_jobs",
    r"GET /jobs/(\d+)": "get_job",
    r"POST /jobs/(\d+)/cancel": "cancel",
    r"POST /jobs/(\d+)/requeue": "requeue",
    r"GET /jobs/(\d+)/logs": "page",
    r"GET /jobs/(\d+)/logs/raw": "raw",
    r"HEAD /bundles/(.+)": "head_bundle",
    r"PUT /bundles/(.+)": "put_bundle",
    r"GET /me": "me",
}


class _Handler(BaseHTTPRequestHandler):
    fake: FakeServer
    protocol_version = "HTTP/1.1"

    def log_message(self, *arguments: Any) -> None:
        """Silence."""

    def handle_one_request(self) -> None:
        """As the base class, but a client that goes away is no event."""
        try:
            super().handle_one_request()
        except (ConnectionError, ValueError):
            self.close_connection = True

    def do_GET(self) -> None:
        """Any request."""
        split = urlsplit(self.path)
        request = Request(
            method=self.command,
            path=split.path.removeprefix(API_PREFIX).replace("%3A", ":"),
            params=parse_qs(split.query),
            headers={name.lower(): value for name, value in self.headers.items()},
            body=self.rfile.read(int(self.headers.get("Content-Length") or 0)),
        )
        self.fake.requests.append(request)
        try:
            self._respond(request)
        except Cut:
            self._cut()

    do_POST = do_PUT = do_DELETE = do_HEAD = do_GET

    def _respond(self, request: Request) -> None:
        if request.headers.get("authorization") != f"Bearer {TOKEN}":
            self._send(a_problem(401, "unauthorized", "the token is not valid", fix="Log in: gang login."))
        elif request.path.endswith("/logs/stream") and request.name not in self.fake.overrides:
            self._stream(request)
        else:
            answer = self.fake.answer(request)
            left = self.fake.cut_after_acting.get(request.name, 0)
            if left:
                self.fake.cut_after_acting[request.name] = left - 1
                raise Cut
            self._send(answer)

    def _send(self, answer: Answer) -> None:
        is_raw = isinstance(answer.body, bytes)
        data = answer.body if is_raw else b"" if answer.body is None else json.dumps(answer.body).encode()
        self.send_response(answer.status)
        for name, value in {"Content-Type": "application/json", **answer.headers}.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        if self.command != "HEAD" and answer.status != 304:
            self.wfile.write(data)

    def _stream(self, request: Request) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/event-stream")
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        left = next(self.fake.stream_cuts, None)
        for event in self.fake.stream(request):
            piece = event if left is None else event[:left]
            if piece:
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                self.wfile.flush()
            if left is not None:
                left -= len(piece)
                if left <= 0:
                    raise Cut
        self.wfile.write(b"0\r\n\r\n")

    def _cut(self) -> None:
        self.close_connection = True
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
