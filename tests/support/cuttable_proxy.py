"""A TCP proxy on the loopback address that a test can cut: connections die, and new ones are refused at once.

Not for: slowness or damage of bytes.
"""

from __future__ import annotations

import contextlib
import socket
import threading
from urllib.parse import urlsplit


class CuttableProxy:
    """Forwards to `url` until `cut`. Use as a context manager."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        self._target = (parts.hostname or "127.0.0.1", parts.port or 80)
        self._listener = socket.create_server(("127.0.0.1", 0))
        self._lock = threading.Lock()
        self._pairs: list[tuple[socket.socket, socket.socket]] = []
        self._is_cut = False
        self._answers_to_lose = 0
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"

    def __enter__(self) -> CuttableProxy:
        threading.Thread(target=self._accept, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        self.cut()
        self._listener.close()

    def cut(self) -> None:
        """Break every connection and refuse new ones."""
        with self._lock:
            self._is_cut = True
            pairs, self._pairs = self._pairs, []
        for pair in pairs:
            _close(*pair)

    def restore(self) -> None:
        """Accept connections again."""
        with self._lock:
            self._is_cut = False

    def lose_next_answer(self) -> None:
        """Let the service act on the next request and cut the connection instead of answering."""
        with self._lock:
            self._answers_to_lose += 1

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return  # closed
            with self._lock:
                server = None if self._is_cut else self._connect()
                if server is None:
                    client.close()
                    continue
                self._pairs.append((client, server))
            threading.Thread(target=self._pump, args=(client, server, False), daemon=True).start()
            threading.Thread(target=self._pump, args=(server, client, True), daemon=True).start()

    def _connect(self) -> socket.socket | None:
        try:
            return socket.create_connection(self._target)
        except OSError:
            return None  # the service is down: the caller finds its connection closed

    def _pump(self, source: socket.socket, target: socket.socket, is_answer: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                if is_answer and self._takes_loss():
                    break
                target.sendall(data)
        _close(source, target)

    def _takes_loss(self) -> bool:
        with self._lock:
            is_lost = self._answers_to_lose > 0
            self._answers_to_lose -= is_lost
            return is_lost


def _close(*sockets: socket.socket) -> None:
    for sock in sockets:
        with contextlib.suppress(OSError):
            sock.shutdown(socket.SHUT_RDWR)
        sock.close()
