"""A small process that has everything loaded and forks supervisors in a few milliseconds.

A fresh interpreter would need over a hundred. It has one thread, no connection to anything but the agent that started
it, and ends when the agent's end of the socket closes; supervisors have sessions of their own and live on. Not for:
anything that outlives a request (it holds no state).

Here are both ends: `Nursery` for the agent, and `main` for the process (`python -P -m worker.nursery <descriptor>`).
"""

from __future__ import annotations

import contextlib
import gc
import json
import os
import signal
import socket
import subprocess
import sys
import threading
import traceback
from pathlib import Path
from types import TracebackType
from typing import Any, Final, NoReturn

from gangline.protocol.names import SUPERVISOR_LOG
from worker.agent_log import log

ANSWER_SECONDS: Final = 20.0
"""A nursery that needs longer, its own start included, is taken for dead."""
MAX_MESSAGE_BYTES: Final = 65536


class NurseryError(OSError):
    """No supervisor could be started."""


class Nursery:
    """The agent's end. Thread-safe. Starts the process when it is first needed, and again when it died."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._socket: socket.socket | None = None

    def __enter__(self) -> Nursery:
        self.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    @property
    def pid(self) -> int | None:
        """Pid of the nursery process, None while there is none."""
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start the process without waiting for it to be ready. Does nothing while it lives."""
        with self._lock:
            self._start()

    def spawn_supervisor(self, attempt_folder: Path) -> int:
        """Start the detached supervisor of `attempt_folder` and return its pid. Raises NurseryError.

        Asking twice is harmless: a supervisor that finds another one at work ends at once.
        """
        request = json.dumps({"attempt_folder": str(attempt_folder.resolve())}).encode()
        with self._lock:
            for is_last_try in (False, True):
                self._start()
                try:
                    return self._ask(request)
                except NurseryError:
                    raise
                except OSError as error:
                    log("nursery_died", error=error)
                    self._stop()
                    if is_last_try:
                        raise NurseryError(f"the nursery cannot start a supervisor: {error}") from error
        raise AssertionError("unreachable: the last try returns or raises")

    def close(self) -> None:
        """End the process. Supervisors live on."""
        with self._lock:
            self._stop()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._stop()
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "worker.nursery", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )
        ours.settimeout(ANSWER_SECONDS)
        self._socket = ours

    def _ask(self, request: bytes) -> int:
        if self._socket is None:
            raise ConnectionError("it is not running")
        self._socket.sendall(request)
        data = self._socket.recv(MAX_MESSAGE_BYTES)
        if not data:
            raise ConnectionError("it closed the socket")
        answer: dict[str, Any] = json.loads(data)
        if "pid" not in answer:
            raise NurseryError(f"the nursery could not start a supervisor: {answer.get('error')}")
        return int(answer["pid"])

    def _stop(self) -> None:
        if self._socket is not None:
            self._socket.close()
            self._socket = None
        if self._process is not None:
            try:
                self._process.wait(timeout=1.0)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
            self._process = None


# --- The process -----------------------------------------------------------------------------------------------------


def main(descriptor: int) -> int:
    """Serve requests from the socket `descriptor` until the agent closes its end."""
    from worker.supervisor import run_supervisor  # noqa: F401  # loaded once here, not after each fork

    for number in (signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    # The kernel collects supervisors that end while we live: nothing here waits for them.
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    gc.collect()
    gc.freeze()  # what is loaded stays shared with the forks
    with socket.socket(fileno=descriptor) as connection:
        while request := _receive(connection):
            try:
                folder = Path(json.loads(request)["attempt_folder"])
                answer: dict[str, Any] = {"pid": _fork_supervisor(folder, connection)}
            except (OSError, ValueError, KeyError) as error:
                answer = {"error": f"{type(error).__name__}: {error}"}
            with contextlib.suppress(ConnectionError):
                connection.send(json.dumps(answer).encode())
    return 0


def _receive(connection: socket.socket) -> bytes:
    try:
        return connection.recv(MAX_MESSAGE_BYTES)
    except ConnectionError:
        return b""


def _fork_supervisor(attempt_folder: Path, connection: socket.socket) -> int:
    """Fork. One fork and a session of its own detach it: our end re-parents it, and it never opens a terminal."""
    output = os.open(attempt_folder / SUPERVISOR_LOG, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    try:
        pid = os.fork()
        if pid == 0:
            _become_supervisor(attempt_folder, output)
        return pid
    finally:
        os.close(output)


def _become_supervisor(attempt_folder: Path, output: int) -> NoReturn:
    from worker.supervisor import run_supervisor  # already loaded by `main`

    status = 70
    try:
        os.setsid()
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.dup2(output, 1)
        os.dup2(output, 2)
        os.closerange(3, 1 << 20)
        status = run_supervisor(attempt_folder)
    except BaseException:
        traceback.print_exc()
        raise
    finally:
        sys.stderr.flush()
        os._exit(status)


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
