"""The cgroup of an attempt: a kernel-kept list of its processes that nothing in it can leave unseen.

cgroup v2 where this process may make groups beside or under its own; on a machine whose memory controller is still v1,
a v1 memory group as well, for the limit on memory and its counter of OOM kills. Where neither can be made,
`worker.process_set` does without. Not for: limits on CPUs.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Final

AGENT_LEAF: Final = "agent"
"""Own leaf of the agent under systemd (`DelegateSubgroup=agent`): attempts get groups beside it, since a group with
controllers holds no processes of its own."""


@dataclass(frozen=True, kw_only=True)
class CgroupHome:
    """Folders in which attempts' groups are made."""

    unified: Path
    """In the v2 hierarchy."""
    memory_v1: Path | None = None
    """In the v1 memory hierarchy, where there is one."""


def find_home(mounts: str, own_groups: str) -> CgroupHome | None:
    """Where groups belong, from the texts of /proc/self/mounts and /proc/self/cgroup. None: no cgroup v2. Pure."""
    unified: Path | None = None
    memory: Path | None = None
    for line in mounts.splitlines():
        fields = line.split()
        if len(fields) < 4:
            continue
        if fields[2] == "cgroup2" and unified is None:
            unified = Path(fields[1])
        elif fields[2] == "cgroup" and "memory" in fields[3].split(","):
            memory = Path(fields[1])
    if unified is None:
        return None
    own = {controllers: path for _, controllers, path in (line.split(":", 2) for line in own_groups.splitlines())}
    memory_path = next((path for controllers, path in own.items() if "memory" in controllers.split(",")), None)
    return CgroupHome(
        unified=_beside_agent(unified / own.get("", "/").lstrip("/")),
        memory_v1=None if memory is None or memory_path is None else memory / memory_path.lstrip("/"),
    )


def current_home() -> CgroupHome | None:
    """Where this process may make groups; None without cgroup v2."""
    mounts = Path("/proc/self/mounts").read_text(encoding="utf-8", errors="replace")
    return find_home(mounts, Path("/proc/self/cgroup").read_text(encoding="utf-8", errors="replace"))


def group_name(mark: str) -> str:
    """Name of an attempt's group: unique to pool, node and attempt, and safe as a folder name whatever those hold."""
    digest = hashlib.sha256(mark.encode("utf-8", "surrogateescape")).hexdigest()
    return f"gangline-{mark.rpartition('/')[2]}-{digest[:12]}"


REMOVE_SECONDS: Final = 5.0
_REMOVE_ROUND_SECONDS: Final = 0.02


class AttemptCgroup:
    """One attempt's groups. `folders[0]` is the v2 one, which lists and kills; any other is for memory."""

    def __init__(self, folders: tuple[Path, ...], *, limits_memory: bool = False) -> None:
        self.folders = folders
        self.limits_memory = limits_memory
        """Whether the kernel holds the attempt to its memory."""

    @classmethod
    def create(cls, home: CgroupHome, mark: str, memory_bytes: int | None = None) -> AttemptCgroup:
        """Make the groups, held to `memory_bytes` of memory and no swap where the kernel can. Raises OSError
        (read-only, not permitted) when the v2 group cannot be made.

        A v1 memory group that cannot be made or entered is left out: it adds a limit and a counter, no more.
        """
        folders = cls._make_folders(home, group_name(mark))
        limits = memory_bytes is not None and any(_limit_memory(folder, memory_bytes) for folder in folders)
        return cls(folders, limits_memory=limits)

    @classmethod
    def _make_folders(cls, home: CgroupHome, name: str) -> tuple[Path, ...]:
        unified = home.unified / name
        _hand_down_memory(home.unified)
        unified.mkdir(exist_ok=True)
        if not os.access(unified / "cgroup.procs", os.W_OK):
            raise PermissionError(f"cannot put processes into {unified}")
        if home.memory_v1 is None:
            return (unified,)
        memory = home.memory_v1 / name
        try:
            memory.mkdir(exist_ok=True)
        except OSError:
            return (unified,)
        is_usable = os.access(memory / "cgroup.procs", os.W_OK) and (memory / "memory.oom_control").exists()
        return (unified, memory) if is_usable else (unified,)

    @classmethod
    def existing(cls, home: CgroupHome, mark: str) -> AttemptCgroup | None:
        """The groups of an attempt as another process made them, None when there are none."""
        name = group_name(mark)
        paths = [home.unified / name] + ([] if home.memory_v1 is None else [home.memory_v1 / name])
        folders = tuple(path for path in paths if path.is_dir())
        return cls(folders) if folders and folders[0] == paths[0] else None

    def members(self) -> list[int]:
        """Pids in the v2 group and the groups below it."""
        pids: list[int] = []
        for folder in _tree(self.folders[0]):
            with contextlib.suppress(OSError):
                # A group removed meanwhile (ENOENT, ENODEV) has none; a threaded one's (EOPNOTSUPP) are above it.
                pids += [int(line) for line in (folder / "cgroup.procs").read_text(encoding="ascii").split()]
        return pids

    def kill(self) -> bool:
        """SIGKILL every member at once. False where the kernel has no `cgroup.kill` (before 5.14)."""
        try:
            (self.folders[0] / "cgroup.kill").write_text("1", encoding="ascii")
        except OSError:
            return False
        return True

    def oom_kills(self) -> int:
        """OOM kills of the groups' members so far."""
        count = 0
        for path in (
            self.folders[0] / "memory.events",
            *(folder / "memory.oom_control" for folder in self.folders[1:]),
        ):
            with contextlib.suppress(FileNotFoundError):
                rows = (line.split() for line in path.read_text(encoding="ascii").splitlines())
                count = max(count, *(int(row[1]) for row in rows if row[0] == "oom_kill"), 0)
        return count

    def remove(self, seconds: float = REMOVE_SECONDS) -> list[Path]:
        """Remove the groups, deepest first; returns those that could not be (something still runs in them).

        A killed process stays in its group until its memory is given back and its parent has taken notice, which may
        take a moment after it can no longer be seen: tried again for `seconds`.
        """
        deadline = time.monotonic() + seconds
        while (remaining := self._remove_once()) and time.monotonic() < deadline:
            time.sleep(_REMOVE_ROUND_SECONDS)
        return remaining

    def _remove_once(self) -> list[Path]:
        remaining: list[Path] = []
        for root in self.folders:
            for folder in reversed(list(_tree(root))):
                try:
                    folder.rmdir()
                except FileNotFoundError:
                    continue
                except OSError:
                    remaining.append(folder)
        return remaining


_MEMORY_LIMITS: Final = (("memory.max", "memory.swap.max"), ("memory.limit_in_bytes", "memory.memsw.limit_in_bytes"))
"""(memory, swap) of v2 and v1. In v2 swap is counted for itself, in v1 with the memory."""


def _limit_memory(folder: Path, memory_bytes: int) -> bool:
    """Hold a group to so much memory. False where this group cannot."""
    for memory, swap in _MEMORY_LIMITS:
        if not (folder / memory).exists():
            continue
        try:
            (folder / memory).write_text(str(memory_bytes), encoding="ascii")
        except OSError:
            return False
        with contextlib.suppress(OSError):  # a kernel that does not count swap
            (folder / swap).write_text("0" if memory == "memory.max" else str(memory_bytes), encoding="ascii")
        return True
    return False


def _hand_down_memory(home: Path) -> None:
    """Let groups below `home` limit memory, as systemd's delegation leaves it to us. A group that holds processes of
    its own may not, and a hierarchy without the controller cannot."""
    try:
        is_there = "memory" in (home / "cgroup.controllers").read_text(encoding="ascii").split()
        is_handed_down = "memory" in (home / "cgroup.subtree_control").read_text(encoding="ascii").split()
        if is_there and not is_handed_down:
            (home / "cgroup.subtree_control").write_text("+memory", encoding="ascii")
    except OSError:
        return


def _beside_agent(own: Path) -> Path:
    return own.parent if own.name == AGENT_LEAF else own


def _tree(folder: Path) -> Iterator[Path]:
    """The folder and all below it, parents first. A group that vanishes meanwhile is left out."""
    yield folder
    try:
        children = sorted(entry.name for entry in os.scandir(folder) if entry.is_dir(follow_symlinks=False))
    except FileNotFoundError:
        return
    for name in children:
        yield from _tree(folder / name)
