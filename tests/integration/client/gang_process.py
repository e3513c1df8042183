"""Running the real `gang` in a process of its own against a fake server.

Not for: assertions.
"""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from tests.integration.client.fake_rest_server import TOKEN, FakeServer
from tests.support.child import end, hear_interrupts
from tests.support.wait import BUSY_SECONDS

COMMAND = [sys.executable, "-m", "gangline.cli"]


@dataclass(frozen=True, kw_only=True)
class Result:
    """How a run ended."""

    code: int
    out: str
    err: str


def environment(server: FakeServer | None, folder: Path, **more: str) -> dict[str, str]:
    """A clean environment; the config file would lie in `folder`."""
    kept = {name: os.environ[name] for name in ("PATH", "HOME", "LD_LIBRARY_PATH") if name in os.environ}
    here = {"GANGLINE_URL": server.url, "GANGLINE_TOKEN": TOKEN} if server is not None else {}
    return {**kept, "GANGLINE_CONFIG_FOLDER": str(folder / "config"), "LANG": "C.UTF-8", **here, **more}


def gang(server: FakeServer | None, folder: Path, *words: str, stdin: str = "", **more: str) -> Result:
    """Run `gang` to its end, with pipes."""
    done = subprocess.run(
        [*COMMAND, *words],
        input=stdin,
        capture_output=True,
        text=True,
        env=environment(server, folder, **more),
        cwd=folder,
        timeout=BUSY_SECONDS,
        check=False,
    )
    return Result(code=done.returncode, out=done.stdout, err=done.stderr)


class RunningGang:
    """A `gang` that is still running, with pipes. Use as a context manager."""

    def __init__(self, server: FakeServer, folder: Path, *words: str) -> None:
        self.process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            bufsize=0,  # so that a line read early takes nothing else out of the pipe
            env=environment(server, folder),
            cwd=folder,
            preexec_fn=hear_interrupts,
        )

    def __enter__(self) -> RunningGang:
        return self

    def __exit__(self, *exception: object) -> None:
        end(self.process)

    def interrupt(self, number: int = signal.SIGINT) -> Result:
        """Send Ctrl-C (or another signal) and wait for the end."""
        self.process.send_signal(number)
        out, err = self.process.communicate(timeout=BUSY_SECONDS)
        return Result(code=self.process.returncode, out=out.decode(), err=err.decode())


def gang_on_terminal(server: FakeServer, folder: Path, *words: str, columns: int = 80, **more: str) -> Result:
    """Run `gang` to its end with a terminal as stdin, stdout and stderr; `out` is all it wrote there."""
    ours, theirs = pty.openpty()
    try:
        process = subprocess.Popen(
            [*COMMAND, *words],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            env=environment(server, folder, TERM="xterm-256color", COLUMNS=str(columns), **more),
            cwd=folder,
        )
        os.close(theirs)
        data = b""
        while select.select([ours], [], [], BUSY_SECONDS)[0]:
            try:
                piece = os.read(ours, 65536)
            except OSError:  # EIO: the last writer has closed the terminal
                break
            if not piece:
                break
            data += piece
        return Result(code=process.wait(timeout=BUSY_SECONDS), out=data.decode("utf-8", errors="replace"), err="")
    finally:
        os.close(ours)
