"""The state file of an attempt on a node, and the identity of a process: pid + start time + boot id.

`state.json` is how a restarted agent finds what runs here. The agent writes it before it claims, and again after; from
the moment it asks the nursery for a supervisor, only the supervisor (or a `--finish` run) writes it.

Not for: the launch plan (`launch.json`) or what only a supervisor knows of its ranks (`worker.attempt_folder`).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from gangline.protocol.launch import decode
from gangline.protocol.names import STATE_FILE

PHASES: Final = ("claiming", "claimed", "supervised", "ended")
_DEAD_STATES: Final = frozenset("ZXx")
"""States of /proc/<pid>/stat in which a process runs nothing more: a zombie has a pid and a start time, but is dead."""


class StateError(ValueError):
    """The state file is not one: its text is not JSON, or a field is missing or of another type."""


@dataclass(frozen=True, kw_only=True)
class ProcessIdentity:
    """Names one process for ever: a pid is reused, a pid with its start time and boot is not."""

    pid: int
    start_time: int
    """Clock ticks since boot (field 22 of /proc/<pid>/stat)."""
    boot_id: str


@dataclass(frozen=True, kw_only=True)
class SharedFolder:
    """A folder that several nodes see (`worker.shared_folder` verifies it)."""

    path: str
    """Absolute, on this node."""
    folder_id: str
    """Lies in the folder itself: nodes that read the same id see the same folder, whatever they call it."""


@dataclass(frozen=True, kw_only=True)
class AttemptState:
    """The content of `state.json`."""

    attempt_id: int
    node_rank: int | None
    """None until the claim was answered."""
    token: str
    """Claim token, made by the agent before it claims. The only copy on the node."""
    pool_id: str
    node_name: str
    server: str
    """URL of the API."""
    supervisor: ProcessIdentity | None = None
    phase: str = "claiming"
    """One of `PHASES`."""
    shared_folder: SharedFolder | None = None
    """The agent's, when it claimed."""

    @property
    def marker(self) -> str:
        """Value of GANGLINE_ATTEMPT in the environment of every process of this attempt."""
        return marker(self.pool_id, self.node_name, self.attempt_id)


@dataclass(frozen=True, kw_only=True)
class ProcessFacts:
    """What /proc/<pid>/stat says of a living process."""

    pid: int
    parent_pid: int
    group_id: int
    session_id: int
    start_time: int
    name: str
    state: str
    """One letter: R runs, S sleeps, D waits in the kernel, T is stopped by a signal, t by a debugger."""


def marker(pool_id: str, node_name: str, attempt_id: int) -> str:
    """Value of GANGLINE_ATTEMPT for an attempt on a node."""
    return f"{pool_id}/{node_name}/{attempt_id}"


def read_state(attempt_folder: Path) -> AttemptState:
    """Read `state.json`. Raises FileNotFoundError when there is none, StateError when it cannot be read as one."""
    path = attempt_folder / STATE_FILE
    try:
        state = decode(AttemptState, json.loads(path.read_bytes()))
    except ValueError as error:
        raise StateError(f"{path} is not a state file: {error}") from error
    if state.phase not in PHASES:
        raise StateError(f"{path} is not a state file: phase {state.phase!r} is none of {', '.join(PHASES)}")
    return state


def write_state(attempt_folder: Path, state: AttemptState) -> None:
    """Replace `state.json` in one step, mode 0600 (it holds the token)."""
    write_json(attempt_folder / STATE_FILE, dataclasses.asdict(state))


def write_json(path: Path, value: Any) -> None:
    """Write `value` as JSON so that a reader sees the file before or after, never between. Mode 0600.

    It is not synced to the disk: after a power loss no process of the attempt lives, so nothing here is needed.
    """
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    try:
        with os.fdopen(descriptor, "w", encoding="utf-8") as file:
            json.dump(value, file)
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            temporary.unlink()
        raise


def current_boot_id() -> str:
    """An id that changes with each boot of the machine."""
    return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()


def process_facts(pid: int) -> ProcessFacts | None:
    """What the kernel says of process `pid`; None when there is none or it is a zombie."""
    try:
        text = Path(f"/proc/{pid}/stat").read_bytes().decode("utf-8", "replace")
    except (FileNotFoundError, ProcessLookupError):
        return None
    # The name stands in parentheses and may itself hold spaces and parentheses: the fields begin after the last one.
    name, _, rest = text.partition("(")[2].rpartition(")")
    fields = rest.split()
    if fields[0] in _DEAD_STATES:
        return None
    return ProcessFacts(
        pid=pid,
        parent_pid=int(fields[1]),
        group_id=int(fields[2]),
        session_id=int(fields[3]),
        start_time=int(fields[19]),
        name=name,
        state=fields[0],
    )


def identify(pid: int) -> ProcessIdentity | None:
    """Identity of the living process `pid`; None when there is none or it is a zombie."""
    facts = process_facts(pid)
    return None if facts is None else ProcessIdentity(pid=pid, start_time=facts.start_time, boot_id=current_boot_id())


def is_alive(identity: ProcessIdentity) -> bool:
    """Whether exactly that process still runs: not one that got its pid later, not a zombie, not from before a boot."""
    return identify(identity.pid) == identity
