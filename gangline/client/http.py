"""One HTTP exchange with the server: bearer token, bounded retries, problem answers as exceptions.

httpx is imported when the first request is made (it costs more than all the rest of a command). What may be repeated
without harm is repeated after a lost connection: reads, PUT and DELETE, and POSTs with an Idempotency-Key, which keep
their key. Not for: the meaning of any path (`gangline.client.client`).
"""

from __future__ import annotations

import contextlib
import json
import random
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from types import ModuleType
from typing import TYPE_CHECKING, Any

from gangline.client.config import Settings, is_loopback
from gangline.client.errors import GanglineError, ServerFailed, Unreachable, from_problem
from gangline.protocol.names import API_PREFIX, IDEMPOTENCY_HEADER

if TYPE_CHECKING:
    import httpx

BACK_OFF_SECONDS = (0.2, 0.4, 0.8, 1.6)
"""Pauses before the second, third, … try; after the last one the error is raised. Each is spread by ±25 %."""
MAX_RETRY_AFTER_SECONDS = 5.0
IDEMPOTENT_METHODS = frozenset({"GET", "HEAD", "PUT", "DELETE"})
RETRIED_STATUS = frozenset({502, 503, 504})
RETRIED_CODES = frozenset({"idempotency_in_progress", "database_unavailable"})
CONNECT_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Call:
    """A request as data. `content` bytes are sent as they are; a file is sent by `content_file` (path, size)."""

    method: str
    path: str
    params: tuple[tuple[str, str], ...] = ()
    headers: Mapping[str, str] = field(default_factory=dict)
    content: bytes | None = None
    content_file: tuple[str, int] | None = None
    timeout_seconds: float | None = None
    """How long the answer may take; None: the transport's own limit."""

    @property
    def is_repeatable(self) -> bool:
        """Whether sending it again after a lost answer changes nothing."""
        return self.method in IDEMPOTENT_METHODS or IDEMPOTENCY_HEADER in self.headers


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One request and how it went, for `--debug`. The token is not in it."""

    call: Call
    url: str
    status: int | None
    seconds: float
    failure: str = ""


class Transport:
    """Sends calls to one server. Not safe to share between threads that are both in a call."""

    def __init__(
        self,
        settings: Settings,
        *,
        timeout_seconds: float = 30.0,
        on_exchange: Callable[[Exchange], None] | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.settings = settings
        self.timeout_seconds = timeout_seconds
        self._on_exchange = on_exchange
        self._sleep = sleep
        self._http: httpx.Client | None = None

    def close(self) -> None:
        """Close the connections. The transport opens new ones when it is used again."""
        if self._http is not None:
            self._http.close()
            self._http = None

    def json(self, call: Call) -> Any:
        """Send `call` and return the JSON of its answer; None for an empty one."""
        return self.decoded(self.send(call))

    def decoded(self, answer: httpx.Response) -> Any:
        """The JSON of an answer. Raises ServerFailed when it is something else, such as a proxy's page."""
        if not answer.content:
            return None
        try:
            return answer.json()
        except ValueError as error:
            kind = answer.headers.get("content-type", "something unnamed")
            raise ServerFailed(
                f"{self.settings.url} did not answer with JSON but with {kind}",
                fix="check that the address is a Gangline server and not a proxy or another site",
                status=answer.status_code,
            ) from error

    def send(self, call: Call, *, accept: frozenset[int] = frozenset()) -> httpx.Response:
        """Send `call`, repeating it where that is harmless; returns a 2xx answer, or one whose status is in `accept`.

        Raises the GanglineError of the problem the server answered with, Unreachable when there was no answer.
        """
        for pause in (*BACK_OFF_SECONDS, None):
            try:
                answer = self._send_once(call)
            except Unreachable:
                if pause is None or not call.is_repeatable:
                    raise
                self._sleep(_spread(pause))
                continue
            if answer.is_success or answer.status_code in accept:
                return answer
            error = problem_error(answer.status_code, answer.content, self.settings.url)
            if pause is None or not (call.is_repeatable and _is_worth_another_try(error)):
                raise error
            self._sleep(max(_spread(pause), _retry_after(answer.headers)))
        raise AssertionError("the last round either returns or raises")

    def _send_once(self, call: Call) -> httpx.Response:
        httpx = load_httpx()
        started = time.monotonic()
        with contextlib.ExitStack() as stack:
            content: Any = call.content
            headers = self.headers(call)
            if call.content_file is not None:
                path, size = call.content_file
                content = stack.enter_context(open(path, "rb"))
                headers["Content-Length"] = str(size)
            try:
                answer = self.http().request(
                    call.method,
                    self.url(call),
                    params=call.params or None,
                    headers=headers,
                    content=content,
                    timeout=self.limits(call.timeout_seconds),
                )
            except httpx.TransportError as error:
                self.note(call, None, started, describe(error))
                raise self.unreachable(error) from error
        self.note(call, answer.status_code, started)
        return answer

    @contextlib.contextmanager
    def stream(self, call: Call, *, read_timeout_seconds: float) -> Iterator[httpx.Response]:
        """Open `call` as a stream, once. Raises as `send` does; the caller reads `iter_bytes` and sees httpx errors."""
        httpx = load_httpx()
        started = time.monotonic()
        timeout = httpx.Timeout(read_timeout_seconds, connect=min(CONNECT_SECONDS, self.timeout_seconds))
        request = self.http().build_request(
            call.method, self.url(call), params=call.params or None, headers=self.headers(call), timeout=timeout
        )
        try:
            answer = self.http().send(request, stream=True)
        except httpx.TransportError as error:
            self.note(call, None, started, describe(error))
            raise self.unreachable(error) from error
        try:
            self.note(call, answer.status_code, started)
            if not answer.is_success:
                try:
                    body = answer.read()
                except httpx.TransportError as error:
                    raise self.unreachable(error) from error
                raise problem_error(answer.status_code, body, self.settings.url)
            yield answer
        finally:
            answer.close()

    def http(self) -> httpx.Client:
        """The httpx client, made at first use."""
        if self._http is None:
            import ssl

            # For plain HTTP an empty context saves reading all certificates; should the server redirect to https, it
            # would refuse every certificate, never accept one unchecked.
            is_plain = self.settings.url.startswith("http://")
            verify = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT) if is_plain else ssl.create_default_context()
            # A proxy of the environment is for the outside world; this very machine is never behind it.
            self._http = load_httpx().Client(verify=verify, trust_env=not is_loopback(self.settings.url))
        return self._http

    def url(self, call: Call) -> str:
        """The full address of a call, without its parameters."""
        return f"{self.settings.url}{API_PREFIX}{call.path}"

    def headers(self, call: Call) -> dict[str, str]:
        """The headers of a call, token included."""
        headers = {"Accept": "application/json", "User-Agent": "gangline-client", **call.headers}
        if self.settings.token:
            headers["Authorization"] = f"Bearer {self.settings.token}"
        return headers

    def limits(self, timeout_seconds: float | None) -> httpx.Timeout:
        """Time limits of one exchange."""
        httpx = load_httpx()
        total = self.timeout_seconds if timeout_seconds is None else timeout_seconds
        return httpx.Timeout(total, connect=min(CONNECT_SECONDS, total))

    def unreachable(self, error: Exception) -> Unreachable:
        """The error for a server that did not answer."""
        return Unreachable(
            f"no answer from {self.settings.url} ({self.settings.url_source}): {describe(error)}",
            fix="check that the server runs and the address is right; `gang login URL` changes the address, "
            "`gang up` starts a server on this machine",
        )

    def note(self, call: Call, status: int | None, started: float, failure: str = "") -> None:
        """Tell whoever watches the exchanges."""
        if self._on_exchange is not None:
            httpx = load_httpx()
            url = str(httpx.URL(self.url(call), params=call.params or None))
            elapsed = time.monotonic() - started
            self._on_exchange(Exchange(call=call, url=url, status=status, seconds=elapsed, failure=failure))


def load_httpx() -> ModuleType:
    """httpx, without the command line of its own that it brings along wherever rich and pygments are installed.

    That one costs as much as all the rest of httpx. None in `sys.modules` makes an import fail as if the module were
    missing, which httpx is prepared for; the entry is taken out again at once.
    """
    command_line = "httpx._main"
    is_first = "httpx" not in sys.modules
    if is_first:
        sys.modules[command_line] = None  # type: ignore[assignment]  # how Python itself spells "not to be had"
    try:
        import httpx
    finally:
        if is_first:
            del sys.modules[command_line]
    return httpx


def problem_error(status: int, body: bytes, url: str) -> GanglineError:
    """The exception for an error answer, whatever its body holds."""
    try:
        problem = json.loads(body) if body else {}
    except ValueError:
        problem = {}
    if not isinstance(problem, dict) or not problem:
        fix = "check the address; a proxy may have answered instead of the server" if status < 500 else ""
        problem = {"detail": f"{url} answered {status} without saying why", "fix": fix}
    return from_problem(status, problem)


def describe(error: Exception) -> str:
    """A transport error in words; httpx leaves some without any."""
    return str(error) or type(error).__name__


def _is_worth_another_try(error: GanglineError) -> bool:
    return error.status in RETRIED_STATUS or error.code in RETRIED_CODES


def _retry_after(headers: Mapping[str, str]) -> float:
    try:
        return min(MAX_RETRY_AFTER_SECONDS, max(0.0, float(headers.get("retry-after", "0"))))
    except ValueError:
        return 0.0  # the date form: the back-off alone is enough


def _spread(seconds: float) -> float:
    return seconds * random.uniform(0.75, 1.25)
