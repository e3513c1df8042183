"""Client of the routes that agents and supervisors call, on the standard library alone, over one keep-alive connection.

Not for: users (`gangline.Client`), retries or back-off (the caller knows what can wait), or threads: give each thread
an object of its own, since a connection carries one request at a time.

Errors are typed by what the caller must do. `Fenced`: kill the ranks, somebody else has the job. `Conflict`: read its
`code`. `Refused` (any other answer) and `Unavailable` (no answer): keep everything and try again later.
"""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final, TypeVar
from urllib.parse import quote, urlsplit

from gangline.protocol.launch import Directive, LaunchPlan, NodeReport, Rendezvous, decode, encode
from gangline.protocol.names import API_PREFIX

T = TypeVar("T")

REQUEST_TIMEOUT_SECONDS: Final = 5.0
BUNDLE_CHUNK_BYTES: Final = 1 << 20
MAX_ANSWER_BYTES: Final = 16 << 20
"""No JSON answer of these routes comes near it; more is not our server."""


class ApiError(Exception):
    """The API did not do what was asked."""


class Answered(ApiError):
    """The API answered with a problem."""

    def __init__(self, status: int, problem: Mapping[str, Any]) -> None:
        self.status = status
        self.problem = dict(problem)
        self.code = str(problem.get("code", ""))
        detail = str(problem.get("detail") or problem.get("title") or "no detail given")
        fix = str(problem.get("fix") or "")
        super().__init__(f"HTTP {status} {self.code or '(no code)'}: {detail}" + (f" Fix: {fix}" if fix else ""))


class Conflict(Answered):
    """409: the world is not as the request assumed. `code` says how, `problem` holds the values."""


class Fenced(Conflict):
    """409 `attempt_fenced`: this attempt is over for the server; its ranks must die and nothing more may be sent."""


class Refused(Answered):
    """Any other answer that is not a success, 401, 404 and 5xx among them: spool, and try again later."""


class Unavailable(ApiError):
    """No answer that makes sense: unreachable, cut off, timed out, or not our API."""


@dataclass(frozen=True, kw_only=True)
class Enrolment:
    """What a node gets for its enrolment token."""

    node_name: str
    pool_id: str
    credential: str


@dataclass(frozen=True, kw_only=True)
class HeartbeatAnswer:
    """What the server wants of an agent."""

    interval_seconds: float
    pool_id: str
    launch: tuple[int, ...] = ()
    """Attempts to start here."""
    fenced: tuple[int, ...] = ()
    """Attempts named in the heartbeat that are no longer this node's: kill and forget them."""


class Connection:
    """One keep-alive HTTP/1.1 connection with a bearer token. Not thread-safe."""

    def __init__(
        self, server: str, bearer: str, *, prefix: str = "", timeout_seconds: float = REQUEST_TIMEOUT_SECONDS
    ) -> None:
        parts = urlsplit(server)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"server URL {server!r} must be http://host[:port] or https://host[:port]")
        self._scheme = parts.scheme
        self._host = parts.hostname
        self._port = parts.port
        self._prefix = parts.path.rstrip("/") + API_PREFIX + prefix
        self._headers = {"Authorization": f"Bearer {bearer}", "Accept": "application/json"}
        self._timeout_seconds = timeout_seconds
        self._connection: http.client.HTTPConnection | None = None
        self.answered_at: float | None = None
        """Monotonic time at which the last request that the API itself answered (status below 500) was *sent*."""

    def close(self) -> None:
        """Drop the connection. The next request opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def send_json(
        self, method: str, path: str, body: Mapping[str, Any] | None = None, *, timeout_seconds: float | None = None
    ) -> dict[str, Any]:
        """Send a JSON object (or nothing) and return the JSON object answered."""
        data = None if body is None else json.dumps(body, allow_nan=False).encode()
        return self._exchange(method, path, data, "application/json", timeout_seconds)

    def send_bytes(self, method: str, path: str, body: bytes) -> dict[str, Any]:
        """Send raw bytes and return the JSON object answered."""
        return self._exchange(method, path, body, "application/octet-stream", None)

    def download(self, path: str, target: Path) -> None:
        """Stream an answer's body into file `target`. A body cut short raises `Unavailable`, a full disk OSError."""
        response = self._request("GET", path, None, None, None)
        try:
            if response.status != 200:
                raise _problem(response.status, _read(response, MAX_ANSWER_BYTES, path))
            expected = response.length
            written = 0
            with target.open("wb") as file:
                while chunk := _read(response, BUNDLE_CHUNK_BYTES, path):
                    file.write(chunk)
                    written += len(chunk)
            if expected is not None and written != expected:
                raise Unavailable(f"GET {path}: the answer was cut after {written} of {expected} bytes")
        finally:
            if not response.isclosed():
                self.close()  # the rest of the body is in the way of the next request

    def _exchange(
        self, method: str, path: str, body: bytes | None, content_type: str, timeout_seconds: float | None
    ) -> dict[str, Any]:
        response = self._request(method, path, body, content_type, timeout_seconds)
        try:
            data = response.read(MAX_ANSWER_BYTES)
        except (http.client.HTTPException, OSError) as error:
            self.close()
            raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
        if not response.isclosed() or response.will_close:
            self.close()
        if not 200 <= response.status < 300:
            raise _problem(response.status, data)
        try:
            answer = json.loads(data) if data else {}
        except ValueError as error:
            raise Unavailable(f"{method} {path}: the answer is not JSON; is {self._host} a Gangline server?") from error
        if not isinstance(answer, dict):
            raise Unavailable(f"{method} {path}: expected a JSON object, got {type(answer).__name__}")
        return answer

    def _request(
        self, method: str, path: str, body: bytes | None, content_type: str | None, timeout_seconds: float | None
    ) -> http.client.HTTPResponse:
        """Send and read the head of the answer. Every route is idempotent, so a request over a connection that the
        server had closed while it was idle is sent again once, over a fresh one."""
        headers = dict(self._headers)
        if body is not None and content_type is not None:
            headers["Content-Type"] = content_type
        timeout = self._timeout_seconds if timeout_seconds is None else timeout_seconds
        while True:
            was_used = self._connection is not None
            sent_at = time.monotonic()
            try:
                connection = self._connect(timeout)
                connection.request(method, self._prefix + path, body, headers)
                response = connection.getresponse()
            except (http.client.HTTPException, OSError) as error:
                self.close()
                is_stale = was_used and isinstance(error, http.client.RemoteDisconnected | BrokenPipeError)
                if is_stale or (was_used and isinstance(error, ConnectionResetError)):
                    continue
                raise Unavailable(f"{method} {path}: {type(error).__name__}: {error}") from error
            if response.status < 500:
                self.answered_at = sent_at
            return response

    def _connect(self, timeout_seconds: float) -> http.client.HTTPConnection:
        if self._connection is None:
            if self._scheme == "https":
                self._connection = http.client.HTTPSConnection(self._host, self._port, timeout=timeout_seconds)
            else:
                self._connection = http.client.HTTPConnection(self._host, self._port, timeout=timeout_seconds)
        self._connection.timeout = timeout_seconds
        if self._connection.sock is not None:
            self._connection.sock.settimeout(timeout_seconds)
        return self._connection


class NodeApi:
    """What an agent calls: enrolment (bearer `gle_`), heartbeat and claims (bearer `gln_`)."""

    def __init__(self, server: str, bearer: str, *, timeout_seconds: float = REQUEST_TIMEOUT_SECONDS) -> None:
        self.connection = Connection(server, bearer, prefix="/agent", timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Drop the connection."""
        self.connection.close()

    def enrol(self, name: str, address: str) -> Enrolment:
        """Register this node under `name`; peers reach it at `address`. Again: the credential is replaced."""
        answer = self.connection.send_json("POST", "/enrol", {"name": name, "address": address})
        return _decoded(Enrolment, answer)

    def heartbeat(
        self,
        *,
        incarnation: str,
        boot_id: str,
        version: str,
        inventory: Mapping[str, Any],
        attempts: Iterable[int],
        process_sets: Iterable[int],
        quarantined: Mapping[str, str],
        gpu_use: Iterable[Mapping[str, Any]] = (),
    ) -> HeartbeatAnswer:
        """Renew the node's lease and say what lives here. `quarantined` maps a GPU's uuid to the reason, `gpu_use`
        says of each GPU its index, utilisation (0 to 1) and memory_bytes."""
        body = {
            "incarnation": incarnation,
            "boot_id": boot_id,
            "version": version,
            "inventory": dict(inventory),
            "attempts": sorted(attempts),
            "process_sets": sorted(process_sets),
            "quarantined": dict(quarantined),
            "gpu_use": [dict(use) for use in gpu_use],
        }
        return _decoded(HeartbeatAnswer, self.connection.send_json("POST", "/heartbeat", body))

    def claim(self, attempt_id: int, token: str, incarnation: str) -> LaunchPlan:
        """Claim this node's part of an attempt. The same token again gets the same plan. Raises `Conflict` with code
        `not_assigned` or `already_claimed`."""
        body = {"token": token, "incarnation": incarnation}
        return _decoded(LaunchPlan, self.connection.send_json("POST", f"/attempts/{attempt_id}/claim", body))


class AttemptApi:
    """What a supervisor calls for its node of an attempt, with the claim token (`gla_`) as bearer."""

    def __init__(
        self,
        server: str,
        token: str,
        attempt_id: int,
        node_rank: int,
        *,
        timeout_seconds: float = REQUEST_TIMEOUT_SECONDS,
    ) -> None:
        prefix = f"/agent/attempts/{attempt_id}/nodes/{node_rank}"
        self.connection = Connection(server, token, prefix=prefix, timeout_seconds=timeout_seconds)

    def close(self) -> None:
        """Drop the connection."""
        self.connection.close()

    def directive(self, version: int, wait_seconds: float) -> Directive:
        """What the server wants, answered at once when newer than `version`, else within `wait_seconds`."""
        path = f"/directive?version={version}&wait={wait_seconds:g}"
        timeout_seconds = wait_seconds + REQUEST_TIMEOUT_SECONDS
        return _decoded(Directive, self.connection.send_json("GET", path, timeout_seconds=timeout_seconds))

    def rendezvous(self, rendezvous: Rendezvous) -> Directive:
        """Tell the peers where rank 0 listens. Node rank 0 only."""
        return _decoded(Directive, self.connection.send_json("POST", "/rendezvous", encode(rendezvous)))

    def started(self, pid_of_rank: Mapping[int, int], sent_at: float) -> Directive:
        """Every rank of this node runs. `sent_at` in epoch seconds of this node's clock."""
        ranks = [{"rank": rank, "pid": pid} for rank, pid in sorted(pid_of_rank.items())]
        return _decoded(Directive, self.connection.send_json("POST", "/started", {"ranks": ranks, "sent_at": sent_at}))

    def put_stream(self, stream: str, rank: int, offset: int, data: bytes) -> int:
        """Append `data` (at most 1 MiB) at `offset` of stream `log` or `events`; returns the size now stored. Raises
        `Conflict` with code `offset_mismatch`: continue from `problem["size"]`."""
        path = f"/streams/{quote(stream, safe='')}/{rank}?offset={offset}"
        return _size(self.connection.send_bytes("PUT", path, data))

    def failing(self, report: NodeReport) -> Directive:
        """First failure of this node, so that the server stops the peers; the final report follows."""
        return _decoded(Directive, self.connection.send_json("POST", "/failing", encode(report)))

    def ended(self, report: NodeReport) -> None:
        """This node's part is over. Sending it again changes nothing."""
        self.connection.send_json("POST", "/ended", encode(report))

    def download_bundle(self, target: Path) -> None:
        """Write the code bundle of the attempt (gzip'd tar) to `target`. The caller checks the digest."""
        self.connection.download("/bundle", target)


def _decoded(cls: type[T], answer: dict[str, Any]) -> T:
    try:
        return decode(cls, answer)
    except ValueError as error:
        raise Unavailable(f"the server's answer is not understood: {error}") from error


def _read(response: http.client.HTTPResponse, num_bytes: int, path: str) -> bytes:
    try:
        return response.read(num_bytes)
    except (http.client.HTTPException, OSError) as error:
        raise Unavailable(f"GET {path}: {type(error).__name__}: {error}") from error


def _size(answer: Mapping[str, Any]) -> int:
    size = answer.get("size")
    if not isinstance(size, int) or isinstance(size, bool) or size < 0:
        raise Unavailable(f"the server's answer is not understood: size is {size!r}")
    return size


def _problem(status: int, data: bytes) -> Answered:
    try:
        problem = json.loads(data)
    except ValueError:
        problem = None
    if not isinstance(problem, dict):
        problem = {"detail": data[:200].decode("utf-8", "replace")}
    if status != 409:
        return Refused(status, problem)
    return Fenced(status, problem) if problem.get("code") == "attempt_fenced" else Conflict(status, problem)
