"""What runs on this machine and what a test left behind: processes, listening sockets, cgroups, /tmp folders.

Reads /proc only. Not for: the product's own process sets (`worker.process_set`); a test must not trust the code under
test to say that it left nothing.
"""

from __future__ import annotations

import fnmatch
import os
import socket
import struct
import tempfile
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
CGROUP_ROOTS = (Path("/sys/fs/cgroup"), Path("/sys/fs/cgroup/unified"))
OUR_FOLDERS = "gl-*"
"""Under /tmp: scratch of ranks, folders of sockets, and what the test helpers make."""
OUR_CGROUPS = "*gangline*"
TCP_LISTEN = "0A"
UNIX_LISTENING_FLAG = 0x10000


@dataclass(frozen=True, kw_only=True, order=True)
class RunningProcess:
    """A process that is not a zombie."""

    pid: int
    command: str
    """Command line, cut at 200 characters."""


@dataclass(frozen=True, kw_only=True, order=True)
class Listener:
    """A socket on which somebody waits for connections."""

    address: str
    """`127.0.0.1:8000`, `[::1]:8000`, or the path of a unix socket."""
    pid: int | None
    """A process that holds it, if we may look at that process."""


def all_processes() -> list[RunningProcess]:
    """Every live process that we may see; zombies have ended and do not count."""
    found = []
    for entry in PROC.iterdir():
        if entry.name.isdigit() and is_alive(int(entry.name)):
            found.append(RunningProcess(pid=int(entry.name), command=_command(entry)))
    return sorted(found)


def is_alive(pid: int) -> bool:
    """Whether `pid` runs. An unreaped child answers to `kill -0` and is dead all the same."""
    try:
        stat = (PROC / str(pid) / "stat").read_text(errors="replace")
    except (FileNotFoundError, ProcessLookupError):
        return False
    return stat.rpartition(")")[2].split()[0] not in ("Z", "X")


def processes_marked(variable: str, value: str | None = None) -> list[RunningProcess]:
    """Live processes whose environment, as it was at exec, holds `variable` (with exactly `value`, if given)."""
    found = []
    for process in all_processes():
        environment = environment_of(process.pid)
        if variable in environment and value in (None, environment[variable]):
            found.append(process)
    return found


def environment_of(pid: int) -> dict[str, str]:
    """The environment a process was started with; empty when it has ended or is not ours to read."""
    try:
        content = (PROC / str(pid) / "environ").read_bytes()
    except (FileNotFoundError, ProcessLookupError, PermissionError):
        return {}
    pairs = (entry.partition(b"=") for entry in content.split(b"\0") if entry)
    return {os.fsdecode(name): os.fsdecode(value) for name, _, value in pairs}


def children_of(pid: int) -> list[int]:
    """Process ids of the live direct children."""
    found = []
    for process in all_processes():
        try:
            stat = (PROC / str(process.pid) / "stat").read_text(errors="replace")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if int(stat.rpartition(")")[2].split()[1]) == pid:
            found.append(process.pid)
    return found


def listeners(pids: Iterable[int] | None = None) -> list[Listener]:
    """TCP and unix sockets that listen, of these processes or of all in our network namespace."""
    wanted = None if pids is None else set(pids)
    owners = _socket_owners(wanted)
    found = []
    for inode, address in _listening_sockets().items():
        pid = owners.get(inode)
        if wanted is None or pid is not None:
            found.append(Listener(address=address, pid=pid))
    return sorted(found, key=lambda listener: (listener.address, listener.pid or 0))


def folders_named(pattern: str, roots: Iterable[Path]) -> Iterator[Path]:
    """Folders anywhere below `roots` whose name fits `pattern`.

    Cgroups go while one looks, everybody's in the same tree: `Path.glob` would raise FileNotFoundError then.
    """
    for root in roots:
        for parent, names, _ in os.walk(root):
            yield from (Path(parent, name) for name in fnmatch.filter(names, pattern))


@dataclass(frozen=True, kw_only=True)
class Traces:
    """What of ours exists at one moment. Take one before and one after; the difference was left behind."""

    processes: frozenset[RunningProcess]
    listeners: frozenset[str] = field(default_factory=frozenset)
    folders: frozenset[str] = field(default_factory=frozenset)
    cgroups: frozenset[str] = field(default_factory=frozenset)

    @classmethod
    def take(cls, variable: str, value: str | None = None) -> Traces:
        """Look now. `variable` (and `value`) in its environment makes a process, and its listeners, ours.

        Folders and cgroups are recognised by name, so another test run on this machine shows up too: compare inside a
        run that has the machine, or look at the names.
        """
        processes = processes_marked(variable, value)
        return cls(
            processes=frozenset(processes),
            listeners=frozenset(item.address for item in listeners(process.pid for process in processes)),
            folders=frozenset(str(path) for path in Path(tempfile.gettempdir()).glob(OUR_FOLDERS)),
            cgroups=frozenset(map(str, folders_named(OUR_CGROUPS, CGROUP_ROOTS))),
        )

    def left_since(self, before: Traces) -> list[str]:
        """One line for each thing that is there now and was not `before`: empty when nothing was left."""
        lines = [f"process {item.pid}: {item.command}" for item in sorted(self.processes - before.processes)]
        lines += [f"listening: {address}" for address in sorted(self.listeners - before.listeners)]
        lines += [f"folder {path}" for path in sorted(self.folders - before.folders)]
        lines += [f"cgroup {path}" for path in sorted(self.cgroups - before.cgroups)]
        return lines


def _command(entry: Path) -> str:
    try:
        words = (entry / "cmdline").read_bytes().split(b"\0")
    except (FileNotFoundError, ProcessLookupError):
        return "(ended)"
    return b" ".join(words).decode(errors="replace").strip()[:200]


def _socket_owners(pids: set[int] | None) -> dict[int, int]:
    """Socket inode to a process that holds it."""
    owners: dict[int, int] = {}
    for process in all_processes():
        if pids is not None and process.pid not in pids:
            continue
        try:
            descriptors = list((PROC / str(process.pid) / "fd").iterdir())
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        for descriptor in descriptors:
            try:
                target = descriptor.readlink()
            except (FileNotFoundError, ProcessLookupError, PermissionError):
                continue
            if str(target).startswith("socket:["):
                owners[int(str(target)[8:-1])] = process.pid
    return owners


def _listening_sockets() -> dict[int, str]:
    """Inode to address, from the kernel's tables of this network namespace."""
    found: dict[int, str] = {}
    for table in ("tcp", "tcp6"):
        path = PROC / "self" / "net" / table
        for line in path.read_text().splitlines()[1:] if path.exists() else []:
            columns = line.split()
            if columns[3] == TCP_LISTEN:
                found[int(columns[9])] = _tcp_address(columns[1])
    for line in (PROC / "self" / "net" / "unix").read_text().splitlines()[1:]:
        columns = line.split(maxsplit=7)
        if len(columns) == 8 and int(columns[3], 16) & UNIX_LISTENING_FLAG:
            found[int(columns[6])] = columns[7]
    return found


def _tcp_address(text: str) -> str:
    """`0100007F:1F40` as `127.0.0.1:8000`: the kernel prints each 32-bit word in the host's byte order."""
    host, _, port = text.partition(":")
    words = [int(host[start : start + 8], 16) for start in range(0, len(host), 8)]
    packed = struct.pack(f"={len(words)}I", *words)
    if len(words) == 1:
        return f"{socket.inet_ntop(socket.AF_INET, packed)}:{int(port, 16)}"
    return f"[{socket.inet_ntop(socket.AF_INET6, packed)}]:{int(port, 16)}"
