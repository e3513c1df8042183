"""The process set of an attempt: every process it started, directly or not, and nothing else.

Three independent ways to know a member, none of them its name, arguments, parent or process group: it is in the
attempt's cgroup; it descends from the supervisor (a subreaper, so that orphans and double-setsid daemons come back to
it); or its environment carries `GANGLINE_ATTEMPT` with exactly this attempt's mark. The last is for finding what a dead
supervisor left. A process is signalled through a pidfd whose start time was checked, so a reused pid is never hit.

Not for: when to stop (`worker.stopping`) or what an exit means (`worker.evidence`).
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Final

from gangline.protocol.names import ENV_ATTEMPT
from worker.cgroup import AttemptCgroup, current_home
from worker.state import ProcessFacts, ProcessIdentity, process_facts

_PR_SET_CHILD_SUBREAPER: Final = 36
_MARK_PREFIX: Final = ENV_ATTEMPT.encode("ascii") + b"="
KILL_ROUND_SECONDS: Final = 0.02
MARKED_KILL_SECONDS: Final = 5.0


def become_subreaper() -> None:
    """Let orphaned descendants be re-parented to this process instead of init. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        number = ctypes.get_errno()
        raise OSError(number, f"prctl(PR_SET_CHILD_SUBREAPER): {os.strerror(number)}")


class ProcessSet:
    """The process set as its supervisor sees it. One thread only: the one that starts the ranks."""

    def __init__(self, cgroup: AttemptCgroup | None) -> None:
        self._cgroup = cgroup
        self._has_children = False

    @property
    def cgroup_folders(self) -> tuple[Path, ...]:
        """Groups that a new member has to enter before it runs the user's program."""
        return self._cgroup.folders if self._cgroup is not None else ()

    @property
    def limits_memory(self) -> bool:
        """Whether the kernel holds the whole set to the attempt's memory."""
        return self._cgroup is not None and self._cgroup.limits_memory

    def add(self) -> None:
        """A child was started."""
        self._has_children = True

    def reap(self) -> list[tuple[int, int]]:
        """Collect what ended since the last call, as (pid, wait status): ranks and adopted orphans alike."""
        ended: list[tuple[int, int]] = []
        while self._has_children:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                self._has_children = False
                break
            if pid == 0:
                break
            ended.append((pid, status))
        return ended

    def is_empty(self) -> bool:
        """Whether nothing of the attempt lived at the last `reap`: without children a subreaper has no descendants."""
        return not self._has_children

    def members(self) -> list[ProcessFacts]:
        """Every living member."""
        pids = {facts.pid: facts for facts in _descendants(os.getpid())}
        for pid in self._cgroup.members() if self._cgroup is not None else []:
            facts = pids.get(pid) or process_facts(pid)
            if facts is not None:
                pids[pid] = facts
        return [pids[pid] for pid in sorted(pids)]

    def pids(self) -> list[int]:
        """Pids of every living member, as cheaply as they can be had: from the cgroup, where there is one."""
        return self._cgroup.members() if self._cgroup is not None else [facts.pid for facts in self.members()]

    def signal_groups(self, number: signal.Signals, leaders: Iterable[int]) -> None:
        """Signal the process groups that the ranks `leaders` lead or led. A shell that wraps the real program and dies
        first must not keep the signal from it. Only members of the set are signalled, whatever a group's id now means.
        """
        groups = set(leaders)
        for facts in self.members():
            if facts.group_id in groups:
                _signal(facts, number)

    def signal_all(self, number: signal.Signals) -> None:
        """Signal every member."""
        for facts in self.members():
            _signal(facts, number)

    def kill_all(self) -> None:
        """SIGKILL every member once. What forks meanwhile is for the next round: call again until `is_empty`."""
        if self._cgroup is not None:
            self._cgroup.kill()
        self.signal_all(signal.SIGKILL)

    def oom_kills(self) -> int:
        """OOM kills counted so far; 0 without a cgroup."""
        return self._cgroup.oom_kills() if self._cgroup is not None else 0

    def close(self) -> list[Path]:
        """Remove the cgroup; returns the folders that could not be removed."""
        return self._cgroup.remove() if self._cgroup is not None else []


# --- Sets whose supervisor is gone -----------------------------------------------------------------------------------


def marked_attempts(pool_id: str, node_name: str) -> frozenset[int]:
    """Attempts of exactly this pool and node of which marked processes live here."""
    prefix = f"{pool_id}/{node_name}/"
    found: set[int] = set()
    for mark, _ in _marked_processes():
        number = mark[len(prefix) :]
        if mark.startswith(prefix) and number.isascii() and number.isdecimal():
            found.add(int(number))
    return frozenset(found)


def kill_marked(mark: str, *, recorded: Iterable[ProcessIdentity] = (), seconds: float = MARKED_KILL_SECONDS) -> int:
    """SIGKILL every process that carries `mark`, is in the attempt's cgroup, or descends from a rank in `recorded`,
    round after round until none is left or `seconds` passed. Returns how many it killed; removes the cgroup."""
    return end_marked(mark, recorded=recorded, seconds=seconds)[0]


def end_marked(
    mark: str,
    *,
    recorded: Iterable[ProcessIdentity] = (),
    cgroup: AttemptCgroup | None = None,
    seconds: float = MARKED_KILL_SECONDS,
) -> tuple[int, tuple[str, ...]]:
    """As `kill_marked`; returns also what could not be ended, as `pid command`. `cgroup`: where it is known; else it
    is looked for where this process would make it."""
    home = current_home()
    if cgroup is None and home is not None:
        cgroup = AttemptCgroup.existing(home, mark)
    known = tuple(recorded)
    killed: set[tuple[int, int]] = set()
    deadline = time.monotonic() + seconds
    while members := _members_by_mark(mark, cgroup, known):
        if cgroup is not None:
            cgroup.kill()
        for facts in members:
            if _signal(facts, signal.SIGKILL):
                killed.add((facts.pid, facts.start_time))
        if time.monotonic() > deadline:
            return len(killed), tuple(describe(facts) for facts in members)
        time.sleep(KILL_ROUND_SECONDS)
    if cgroup is not None:
        cgroup.remove()
    return len(killed), ()


def marked_pids(
    mark: str, *, recorded: Iterable[ProcessIdentity] = (), cgroup: AttemptCgroup | None = None
) -> frozenset[int]:
    """Pids of what `end_marked` would end."""
    return frozenset(facts.pid for facts in _members_by_mark(mark, cgroup, tuple(recorded)))


def describe(facts: ProcessFacts) -> str:
    """`pid command`, for a report."""
    return f"{facts.pid} {facts.name}"


def _members_by_mark(
    mark: str, cgroup: AttemptCgroup | None, recorded: tuple[ProcessIdentity, ...]
) -> list[ProcessFacts]:
    found = {facts.pid: facts for other, facts in _marked_processes() if other == mark}
    for pid in cgroup.members() if cgroup is not None else []:
        facts = process_facts(pid)
        if facts is not None:
            found[pid] = facts
    for identity in recorded:
        facts = process_facts(identity.pid)
        if facts is not None and facts.start_time == identity.start_time:
            found[facts.pid] = facts
            found.update((child.pid, child) for child in _descendants(facts.pid))
    found.pop(os.getpid(), None)
    return [found[pid] for pid in sorted(found)]


def _marked_processes() -> Iterator[tuple[str, ProcessFacts]]:
    """(mark, process) of every living process whose environment carries one. Names and arguments do not count."""
    for pid in _all_pids():
        try:
            # start time first: if the pid is reused in between, the later check of it fails and nothing is signalled
            facts = process_facts(pid)
            block = Path(f"/proc/{pid}/environ").read_bytes() if facts is not None else b""
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue  # gone, or another account's: no process of an attempt of this agent
        if facts is None or _MARK_PREFIX not in block:
            continue
        for entry in block.split(b"\0"):
            if entry.startswith(_MARK_PREFIX):
                yield os.fsdecode(entry[len(_MARK_PREFIX) :]), facts
                break


def _descendants(root: int) -> list[ProcessFacts]:
    """Living processes below `root`, from one look at the process table."""
    children: dict[int, list[ProcessFacts]] = {}
    for pid in _all_pids():
        facts = process_facts(pid)
        if facts is not None:
            children.setdefault(facts.parent_pid, []).append(facts)
    found: list[ProcessFacts] = []
    pending = [root]
    while pending:
        below = children.pop(pending.pop(), [])
        found += below
        pending += [facts.pid for facts in below]
    return found


def _all_pids() -> Iterator[int]:
    return (int(name) for name in os.listdir("/proc") if name.isdecimal())  # noqa: PTH208  # names are all it needs


def _signal(facts: ProcessFacts, number: signal.Signals) -> bool:
    """Send a signal to exactly that process, not to one that got its pid later. False when it is gone."""
    try:
        descriptor = os.pidfd_open(facts.pid)
    except ProcessLookupError:
        return False
    try:
        current = process_facts(facts.pid)
        if current is None or current.start_time != facts.start_time:
            return False
        with contextlib.suppress(ProcessLookupError):
            signal.pidfd_send_signal(descriptor, number)
            return True
    finally:
        os.close(descriptor)
    return False
