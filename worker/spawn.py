"""Start one process of an attempt: fork, join the attempt's cgroups, new session, output to a file, exec.

`subprocess` is not used, since the child has to enter its cgroups before it is the user's program (a shell in between
would drop variables whose names are no shell names). Not for: waiting for it (`worker.process_set`).
"""

from __future__ import annotations

import os
import resource
import signal
from collections.abc import Mapping
from pathlib import Path
from typing import Final, NoReturn

_EXEC_FAILED: Final = 255


class SpawnError(OSError):
    """The process could not become the program. `errno` says why, `step` where."""

    def __init__(self, number: int, step: str, subject: str) -> None:
        super().__init__(number, f"{step}: {os.strerror(number)}", subject)
        self.step = step


def spawn(
    *,
    program: str,
    arguments: tuple[str, ...],
    environment: Mapping[str, str],
    working_folder: Path,
    log_file: Path,
    cgroup_folders: tuple[Path, ...] = (),
    data_limit_bytes: int | None = None,
) -> int:
    """Start `program` (a path; a relative one is relative to `working_folder`) and return its pid once it runs.

    `data_limit_bytes`: an allocation beyond it fails in the process itself (RLIMIT_DATA).

    stdin is empty, stdout and stderr are appended to `log_file`. It leads a session and process group of its own.
    Raises SpawnError when a step failed, ValueError for text that no process can be given (NUL, lone surrogates).
    """
    words = [_as_bytes(word) for word in arguments]
    variables = {_as_bytes(name): _as_bytes(value) for name, value in environment.items()}
    path = _as_bytes(program)
    log = os.open(log_file, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    reader, writer = os.pipe()
    try:
        pid = os.fork()
        if pid == 0:
            _become(path, words, variables, working_folder, log, writer, cgroup_folders, data_limit_bytes)
        os.close(writer)
        writer = -1
        failure = _read_all(reader)
    finally:
        for descriptor in (log, reader, writer):
            if descriptor >= 0:
                os.close(descriptor)
    if failure:
        os.waitpid(pid, 0)
        step, _, number = failure.decode("ascii").partition(" ")
        subject = program if step == "exec" else str(working_folder if step == "chdir" else cgroup_folders)
        raise SpawnError(int(number), step, subject)
    return pid


def _become(
    path: bytes,
    words: list[bytes],
    variables: dict[bytes, bytes],
    working_folder: Path,
    log: int,
    writer: int,
    cgroup_folders: tuple[Path, ...],
    data_limit_bytes: int | None,
) -> NoReturn:
    """The child's half. It never returns: an error goes through the pipe, which a successful exec closes."""
    step = "cgroup"
    try:
        for folder in cgroup_folders:
            group = os.open(folder / "cgroup.procs", os.O_WRONLY)
            os.write(group, b"0")
            os.close(group)
        if data_limit_bytes is not None:
            step = "limit"
            _, hardest = resource.getrlimit(resource.RLIMIT_DATA)
            limit = data_limit_bytes if hardest == resource.RLIM_INFINITY else min(hardest, data_limit_bytes)
            resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
        step = "session"
        os.setsid()
        os.umask(0o022)
        empty = os.open(os.devnull, os.O_RDONLY)
        os.dup2(empty, 0)
        os.dup2(log, 1)
        os.dup2(log, 2)
        step = "chdir"
        os.chdir(working_folder)
        step = "exec"
        # Python ignores SIGPIPE and the supervisor SIGINT and SIGHUP; ignored signals would stay so in the program.
        for number in (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_DFL)
        signal.pthread_sigmask(signal.SIG_SETMASK, ())
        os.execve(path, words, variables)
    except OSError as error:
        os.write(writer, f"{step} {error.errno}".encode("ascii"))
    finally:
        os._exit(_EXEC_FAILED)


def _as_bytes(text: str) -> bytes:
    data = os.fsencode(text)
    if b"\0" in data:
        raise ValueError(f"{text[:80]!r} holds a NUL character, which no argument, variable or path can")
    return data


def _read_all(descriptor: int) -> bytes:
    data = b""
    while chunk := os.read(descriptor, 256):
        data += chunk
    return data
