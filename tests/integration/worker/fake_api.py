"""A service as agents and supervisors see it, in one process and without a database: the wire contract, no more.

Tests place attempts on it, read what nodes told it, and break it on purpose. Real HTTP on the loopback address.
"""

from __future__ import annotations

import dataclasses
import json
import re
import secrets
import threading
import time
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any
from urllib.parse import parse_qs, urlsplit

from gangline.protocol.launch import AssignedGPU, CodeSource, LaunchPlan, RunPlan, encode

POOL_ID = f"pool-{secrets.token_hex(4)}"
"""One per test process: agents end marked processes of their own pool, and other test runs here have such too."""
ENROLMENT_TOKEN = "gle_test"
_ATTEMPT_PATH = re.compile(r"/api/v1/agent/attempts/(\d+)/(claim|nodes/(\d+)/(.+))")


@dataclass
class FakeAttempt:
    """One attempt on one node, as the service knows it."""

    plan: LaunchPlan
    token: str | None = None
    """Of the node that claimed it."""
    claims: int = 0
    state: str = "allocated"
    """`allocated`, `claimed`, `started` or `ended`."""
    is_fenced: bool = False
    directive: dict[str, Any] = field(default_factory=lambda: {"version": 1, "stop": None, "rendezvous": None})
    streams: dict[str, bytearray] = field(default_factory=dict)
    """By `log/<rank>` and `events/<rank>`."""
    pids: dict[int, int] = field(default_factory=dict)
    """Of the ranks, as reported by `started`."""
    failing: list[dict[str, Any]] = field(default_factory=list)
    reports: list[dict[str, Any]] = field(default_factory=list)
    """Every `ended` report; more than one is allowed."""


class Answer(Exception):
    """Ends a request with this status and body."""

    def __init__(self, status: int, body: dict[str, Any] | bytes) -> None:
        self.status = status
        self.body = body


def problem(status: int, code: str, **values: Any) -> Answer:
    return Answer(status, {"status": status, "code": code, "title": code, "detail": code, "fix": "none", **values})


class FakeApi:
    """Use as a context manager. Attributes may be read and set from the test at any time."""

    def __init__(self, *, interval_seconds: float = 0.1) -> None:
        self.interval_seconds = interval_seconds
        self.lock = threading.RLock()
        self.changed = threading.Condition(self.lock)
        self.attempts: dict[int, FakeAttempt] = {}
        self.enrolled: list[dict[str, Any]] = []
        self.heartbeats: list[dict[str, Any]] = []
        self.bundles: dict[int, bytes] = {}
        self.launch_by_heartbeat = True
        """False: only hints start attempts."""
        self.outage: int | None = None
        """Answer everything with this status."""
        self.lost_claim_answers = 0
        """Act on that many claims and cut the connection instead of answering."""
        self.credentials = {"gln_test"}
        self._server = _Server(("127.0.0.1", 0), _handler(self))
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> FakeApi:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        with self.changed:
            self.outage = 503
            self.changed.notify_all()
        self._server.shutdown()
        self._server.server_close()

    # --- What tests do -----------------------------------------------------------------------------------------------

    def place(self, plan: LaunchPlan) -> FakeAttempt:
        """Assign an attempt to the node."""
        with self.changed:
            attempt = self.attempts[plan.attempt_id] = FakeAttempt(plan=plan)
            return attempt

    def limit(self, attempt_id: int, seconds: float) -> None:
        """Change the time limit, through the directive."""
        self._direct(attempt_id, time_limit_seconds=seconds)

    def stop(self, attempt_id: int, intent: str = "cancel", grace_seconds: float = 60.0) -> None:
        """Ask the supervisor to stop, through the directive. By default nothing is killed that ends by itself."""
        self._direct(attempt_id, stop={"intent": intent, "grace_seconds": grace_seconds})

    def fence(self, attempt_id: int) -> None:
        """Take the attempt away from the node."""
        with self.changed:
            self.attempts[attempt_id].is_fenced = True
            self.changed.notify_all()

    def _direct(self, attempt_id: int, **changes: Any) -> None:
        with self.changed:
            directive = self.attempts[attempt_id].directive
            directive.update(changes, version=directive["version"] + 1)
            self.changed.notify_all()

    # --- Routes ------------------------------------------------------------------------------------------------------

    def answer(self, method: str, path: str, query: dict[str, list[str]], bearer: str, body: bytes) -> Answer:
        """Handle one request."""
        with self.lock:
            if self.outage is not None:
                return problem(self.outage, "outage")
        try:
            if (method, path) == ("POST", "/api/v1/agent/enrol"):
                return self._enrol(bearer, json.loads(body))
            if (method, path) == ("POST", "/api/v1/agent/heartbeat"):
                return self._heartbeat(bearer, json.loads(body))
            match = _ATTEMPT_PATH.fullmatch(path)
            if match is None:
                return problem(404, "not_found")
            attempt = self.attempts.get(int(match[1]))
            if match[2] == "claim":
                return self._claim(attempt, bearer, json.loads(body))
            if attempt is None or int(match[3]) != attempt.plan.node_rank:
                return problem(404, "not_found")
            return self._supervisor(attempt, method, match[4], query, bearer, body)
        except Answer as answer:
            return answer

    def _enrol(self, bearer: str, body: dict[str, Any]) -> Answer:
        if bearer != ENROLMENT_TOKEN:
            return problem(401, "unauthorized")
        with self.lock:
            self.enrolled.append(body)
        return Answer(200, {"node_name": body["name"], "pool_id": POOL_ID, "credential": "gln_test"})

    def _heartbeat(self, bearer: str, body: dict[str, Any]) -> Answer:
        if bearer not in self.credentials:
            return problem(401, "unauthorized")
        with self.changed:
            self.heartbeats.append(body)
            self.changed.notify_all()
            named = {*body["attempts"], *body["process_sets"]}
            return Answer(
                200,
                {
                    "interval_seconds": self.interval_seconds,
                    "pool_id": POOL_ID,
                    "launch": [
                        number
                        for number, attempt in self.attempts.items()
                        if attempt.state == "allocated" and self.launch_by_heartbeat
                    ],
                    "fenced": [number for number in named if self._is_foreign(number)],
                },
            )

    def _is_foreign(self, attempt_id: int) -> bool:
        attempt = self.attempts.get(attempt_id)
        return attempt is None or attempt.is_fenced

    def _claim(self, attempt: FakeAttempt | None, bearer: str, body: dict[str, Any]) -> Answer:
        if bearer not in self.credentials:
            return problem(401, "unauthorized")
        with self.changed:
            if attempt is None or attempt.state == "ended" or attempt.is_fenced:
                return problem(409, "not_assigned")
            if attempt.token not in (None, body["token"]):
                return problem(409, "already_claimed")
            attempt.claims += 1
            if attempt.token is None:
                attempt.token = body["token"]
                attempt.state = "claimed"
                self.changed.notify_all()
            if self.lost_claim_answers > 0:
                self.lost_claim_answers -= 1
                raise ConnectionAbortedError
            return Answer(200, encode(attempt.plan))

    def _supervisor(
        self,
        attempt: FakeAttempt,
        method: str,
        action: str,
        query: dict[str, list[str]],
        bearer: str,
        body: bytes,
    ) -> Answer:
        with self.changed:
            if attempt.is_fenced:
                return problem(409, "attempt_fenced")
            if bearer != attempt.token:
                return problem(401, "unauthorized")
            match method, action:
                case "GET", "directive":
                    self._wait_directive(attempt, int(query["version"][0]), float(query["wait"][0]))
                case "POST", "rendezvous":
                    self._direct(attempt.plan.attempt_id, rendezvous=json.loads(body))
                case "POST", "started":
                    attempt.pids = {row["rank"]: row["pid"] for row in json.loads(body)["ranks"]}
                    attempt.state = "started"
                case "POST", "failing":
                    attempt.failing.append(json.loads(body))
                case "POST", "ended":
                    attempt.reports.append(json.loads(body))
                    attempt.state = "ended"
                    self.changed.notify_all()
                    return Answer(200, {})
                case "GET", "bundle":
                    return Answer(200, self.bundles[attempt.plan.attempt_id])
                case "PUT", _ if action.startswith("streams/"):
                    return self._stream(attempt, action.removeprefix("streams/"), int(query["offset"][0]), body)
                case _:
                    return problem(404, "not_found")
            self.changed.notify_all()
            return Answer(200, dict(attempt.directive))

    def _wait_directive(self, attempt: FakeAttempt, version: int, seconds: float) -> None:
        deadline = time.monotonic() + seconds
        while attempt.directive["version"] <= version:
            left = deadline - time.monotonic()
            if left <= 0:
                return
            self.changed.wait(left)
            if attempt.is_fenced:
                raise problem(409, "attempt_fenced")
            if self.outage is not None:
                raise problem(self.outage, "outage")

    def _stream(self, attempt: FakeAttempt, name: str, offset: int, body: bytes) -> Answer:
        stored = attempt.streams.setdefault(name, bytearray())
        if offset != len(stored):
            return problem(409, "offset_mismatch", size=len(stored))
        stored += body
        self.changed.notify_all()
        return Answer(200, {"size": len(stored)})


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 64

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients are killed here on purpose; their broken connections are no news."""


def _handler(api: FakeApi) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def handle_any(self) -> None:
            parts = urlsplit(self.path)
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            bearer = (self.headers.get("Authorization") or "").removeprefix("Bearer ")
            try:
                answer = api.answer(self.command, parts.path, parse_qs(parts.query), bearer, body)
            except ConnectionAbortedError:
                self.close_connection = True
                return
            data = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            self.send_header("Content-Type", "application/json" if answer.status < 400 else "application/problem+json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        do_GET = do_POST = do_PUT = handle_any

        def log_message(self, format: str, *args: Any) -> None:
            return

    return Handler


def a_plan(attempt_id: int, *, script: str | None = None, shell: str | None = None, **changes: Any) -> LaunchPlan:
    """A valid and boring plan: one node, one CPU slot, one process. State only what matters to the case."""
    run = (
        RunPlan(kind="script", script=script) if script is not None else RunPlan(kind="command", shell=shell or "true")
    )
    plan = LaunchPlan(
        attempt_id=attempt_id,
        job_id=attempt_id + 1000,
        job_name="test",
        attempt_number=1,
        pool_id=POOL_ID,
        node_name="node-1",
        node_rank=0,
        num_nodes=1,
        node_address="127.0.0.1",
        processes_per_node=1,
        first_rank=0,
        world_size=1,
        gpus=(AssignedGPU(index=0, uuid="cpu-slot-0", kind="cpu_slot"),),
        cpus=1.0,
        memory_bytes=None,
        run=run,
        code=CodeSource(),
        python=None,
        env={},
        time_limit_seconds=None,
        stop_grace_seconds=1.0,
        start_timeout_seconds=30.0,
        disconnect_stop_seconds=None,
        gather_seconds=0.02,
        start_reason="submitted",
    )
    return dataclasses.replace(plan, **changes)
