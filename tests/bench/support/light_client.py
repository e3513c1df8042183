"""A light HTTP client: one keep-alive connection over a raw socket, so that the client's own time hardly counts.

Not for: anything but our own server, which always says `Content-Length`.
"""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from types import TracebackType
from typing import Any
from urllib.parse import urlsplit

TIMEOUT_SECONDS = 60.0
HEAD_END = b"\r\n\r\n"


class LightClient:
    """One connection to the API. Raises OSError when it breaks."""

    def __init__(self, url: str, token: str) -> None:
        parts = urlsplit(url)
        self._address = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._common = f"Host: {parts.netloc}\r\nAuthorization: Bearer {token}\r\n"
        self._socket = socket.create_connection(self._address, TIMEOUT_SECONDS)
        self._socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def __enter__(self) -> LightClient:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._socket.close()

    def request(
        self, method: str, path: str, body: bytes = b"", headers: Mapping[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body. `path` is without the prefix of the API."""
        lines = "".join(f"{name}: {value}\r\n" for name, value in (headers or {}).items())
        length = f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n" if body else ""
        head = f"{method} /api/v1{path} HTTP/1.1\r\n{self._common}{length}{lines}\r\n"
        self._socket.sendall(head.encode() + body)
        return self._read()

    def get_json(self, path: str) -> Any:
        """The answer to a GET as JSON; anything but 200 is an error."""
        status, body = self.request("GET", path)
        if status != 200:
            raise RuntimeError(f"GET {path}: {status} {body[:300]!r}")
        return json.loads(body)

    def submit(self, spec: Mapping[str, Any], key: str | None = None) -> int:
        """Submit a job; its id."""
        headers = {} if key is None else {"Idempotency-Key": key}
        status, body = self.request("POST", "/jobs", json.dumps(spec).encode(), headers)
        if status != 201:
            raise RuntimeError(f"POST /jobs: {status} {body[:300]!r}")
        return int(json.loads(body)["id"])

    def _read(self) -> tuple[int, bytes]:
        data = b""
        while (end := data.find(HEAD_END)) < 0:
            data += self._receive()
        head = data[:end].lower()
        start = head.index(b"content-length:") + len(b"content-length:")
        length = int(head[start:].split(b"\r\n", 1)[0])
        pieces = [data[end + len(HEAD_END) :]]
        missing = length - len(pieces[0])
        while missing > 0:
            piece = self._receive()
            pieces.append(piece)
            missing -= len(piece)
        return int(head[9:12]), b"".join(pieces)

    def _receive(self) -> bytes:
        piece = self._socket.recv(262_144)
        if not piece:
            raise ConnectionResetError("the server closed the connection")
        return piece
