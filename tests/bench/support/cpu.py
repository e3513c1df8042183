"""CPU time that processes have used, from /proc.

Not for: the share of a machine, or memory.
"""

from __future__ import annotations

import os
from pathlib import Path

from tests.support.processes import all_processes, environment_of
from tests.support.stack import Stack

TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


def cpu_seconds(pid: int) -> float:
    """User and system time of a process with all its threads. Raises FileNotFoundError when it has ended."""
    fields = (Path("/proc") / str(pid) / "stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS_PER_SECOND


def pids_of(stack: Stack) -> list[int]:
    """Every process of a pool: what carries its scratch folder in the environment, and its Redis."""
    ours = [
        process.pid
        for process in all_processes()
        if process.pid != os.getpid() and environment_of(process.pid).get("TMPDIR") == str(stack.scratch)
    ]
    return sorted({*ours, *([stack.redis.pid] if stack.redis else [])})


def command_of(pid: int) -> str:
    """The command line of a process, short."""
    words = (Path("/proc") / str(pid) / "cmdline").read_bytes().split(b"\0")
    return " ".join(word.decode(errors="replace") for word in words if word)[:70]
