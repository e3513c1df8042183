"""Starting and ending the servers that tests drive: nothing a test starts may outlive it.

Not for: processes that the product itself starts (see `processes`).
"""

from __future__ import annotations

import ctypes
import signal
import subprocess
from collections.abc import Callable

PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def die_with_parent(signal_number: int = signal.SIGKILL) -> Callable[[], None]:
    """A `preexec_fn` after which the child gets `signal_number` when the **thread** that started it ends.

    So call Popen from the main thread (fixtures do). It also covers a test run that is killed by its timeout.
    """

    def ask() -> None:
        _libc.prctl(PR_SET_PDEATHSIG, signal_number, 0, 0, 0)

    return ask


def hear_interrupts() -> None:
    """A `preexec_fn` after which Ctrl-C reaches the child as from a terminal.

    A test run that a shell started in the background ignores SIGINT, and its children would inherit that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)


def end(process: subprocess.Popen[bytes], *, first: int = signal.SIGTERM, grace: float = 5.0) -> int:
    """Signal a child that we started, SIGKILL it after `grace` seconds, reap it; returns its exit status."""
    if process.poll() is None:
        process.send_signal(first)
        try:
            process.wait(grace)
        except subprocess.TimeoutExpired:
            process.kill()
    return process.wait()
