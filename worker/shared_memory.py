"""The node's shared memory (/dev/shm): its size, and the files that an attempt's libraries left in it.

A loader worker that is killed leaves its file there, which takes memory until the next boot. Only files with a name
that a library makes up are removed, only our account's, made since the attempt began and used by nobody now: either the
name holds the pid of a process that is gone, or a process of the attempt used it when it was ended. Not for: files
there that a job named itself.
"""

from __future__ import annotations

import os
import re
import stat
import time
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Final

SHARED_MEMORY: Final = Path("/dev/shm")

_NAMED_BY_PID: Final = re.compile(r"(?:torch_|__KMP_REGISTERED_LIB_)(?P<pid>\d+)_")
"""torch's tensors between processes, Intel's OpenMP."""
_NAMED_BY_CHANCE: Final = re.compile(r"psm_[0-9a-f]+|nccl-\w+|sem\.(?:mp-|loky-)?\w+")
"""multiprocessing's shared memory and locks, NCCL's buffers."""


def size_bytes(folder: Path = SHARED_MEMORY) -> int | None:
    """Size of the whole file system; None where there is none."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return None
    return facts.f_blocks * facts.f_frsize


def files_in_use(pids: Iterable[int], folder: Path = SHARED_MEMORY) -> frozenset[str]:
    """Names below `folder` that processes have open or mapped. A process that is gone or not ours has none."""
    prefix = f"{folder}/"
    return frozenset(
        path[len(prefix) :]
        for pid in pids
        for path in _paths_of(pid)
        if path.startswith(prefix) and not path.endswith("(deleted)")
    )


def is_left_over(name: str, *, used: frozenset[str], is_alive: Callable[[int], bool]) -> bool:
    """Whether a name in /dev/shm is a library's whose process is gone, or that an attempt used (`used`). Pure."""
    by_pid = _NAMED_BY_PID.match(name)
    if by_pid is not None:
        return not is_alive(int(by_pid["pid"]))
    return name in used and _NAMED_BY_CHANCE.fullmatch(name) is not None


def remove_left_over(used: frozenset[str], *, since: float, folder: Path = SHARED_MEMORY) -> tuple[str, ...]:
    """Remove what an attempt left that began at `since` (epoch seconds) and used `used`, once its processes have ended.
    Returns the names. Raises OSError."""
    candidates = [name for name in _names(folder) if is_left_over(name, used=used, is_alive=_is_alive)]
    ours = [name for name in candidates if _is_ours(folder / name, since)]
    # Another job may use a file of a process that is gone, or a name that both were told.
    taken = files_in_use(_all_pids(), folder) if ours else frozenset()
    removed = tuple(name for name in ours if name not in taken)
    for name in removed:
        (folder / name).unlink(missing_ok=True)
    return removed


class SharedMemoryTrace:
    """Remembers what the processes of one attempt use, so that what they leave can be removed at the end."""

    def __init__(self, folder: Path = SHARED_MEMORY, *, since: float | None = None) -> None:
        """`since`: epoch seconds of the attempt's begin; None: now."""
        self._folder = folder
        self._since = time.time() if since is None else since
        self._used: set[str] = set()

    def look(self, pids: Iterable[int]) -> None:
        """Remember what these processes use: they are about to be ended."""
        self._used |= files_in_use(pids, self._folder)

    def clean(self) -> tuple[str, ...]:
        """Remove what is left. Returns the names. Raises OSError."""
        return remove_left_over(frozenset(self._used), since=self._since, folder=self._folder)


def _names(folder: Path) -> list[str]:
    try:
        return sorted(os.listdir(folder))  # noqa: PTH208  # names are all it needs
    except FileNotFoundError:
        return []


def _is_ours(path: Path, since: float) -> bool:
    try:
        facts = path.lstat()
    except FileNotFoundError:
        return False
    return stat.S_ISREG(facts.st_mode) and facts.st_uid == os.geteuid() and facts.st_ctime >= since


def _paths_of(pid: int) -> Iterator[str]:
    try:
        for line in Path(f"/proc/{pid}/maps").read_text(encoding="utf-8", errors="replace").splitlines():
            fields = line.split(maxsplit=5)
            if len(fields) == 6:
                yield fields[5]
        for entry in os.scandir(f"/proc/{pid}/fd"):
            yield str(Path(entry.path).readlink())
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return


def _is_alive(pid: int) -> bool:
    return Path(f"/proc/{pid}").exists()


def _all_pids() -> Iterator[int]:
    return (int(name) for name in _names(Path("/proc")) if name.isdecimal())
