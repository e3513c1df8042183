"""The doorbell: a local datagram socket through which the Celery child tells the agent to look at an attempt now.

Losing, repeating or delaying a ring is harmless. Not for: anything that must arrive, or that a claim does not check.
"""

from __future__ import annotations

import os
import re
import shutil
import socket
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Final

# What the agent tells its Celery child, in the environment.
ENV_DOORBELL: Final = "GANGLINE_DOORBELL"
"""Path of the socket."""
ENV_NODE_NAME: Final = "GANGLINE_NODE_NAME"
ENV_PARENT_PIPE: Final = "GANGLINE_PARENT_PIPE"
"""Descriptor of an inherited pipe whose other end the agent alone holds: EOF there means that the agent is gone."""

SOCKET_NAME: Final = "doorbell.sock"
LONGEST_PATH_BYTES: Final = 100
"""AF_UNIX paths end at 108 bytes on Linux; some room is kept."""
LARGEST_ATTEMPT_ID: Final = 2**63 - 1
_LINK_NAME: Final = "doorbell"
_MESSAGE_BYTES: Final = 64
_LAUNCH: Final = re.compile(rb"launch ([0-9]{1,19})")


def launch_message(attempt_id: object) -> bytes | None:
    """The datagram for a hint, or None when `attempt_id` is no possible attempt id (a bool is none either). Pure."""
    if not isinstance(attempt_id, int) or isinstance(attempt_id, bool) or not 0 < attempt_id <= LARGEST_ATTEMPT_ID:
        return None
    return b"launch %d" % attempt_id


def parse_message(message: bytes) -> int | None:
    """The attempt id of a datagram, or None when it is not one of ours. Pure."""
    match = _LAUNCH.fullmatch(message)
    attempt_id = int(match[1]) if match else 0
    return attempt_id if 0 < attempt_id <= LARGEST_ATTEMPT_ID else None


def ring(path: str, message: bytes) -> None:
    """Send one datagram without waiting. Raises OSError when nobody listens or the socket's queue is full."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto(message, path)


class Doorbell:
    """The agent's end of the socket. One a data folder: whoever opens it holds the agent's lock, so a left-over file of
    an agent that was killed is simply replaced."""

    def __init__(self, folder: Path) -> None:
        """Bind the socket in `folder`, or in a short temporary folder when its path would be too long."""
        path = folder / SOCKET_NAME
        self._link = folder / _LINK_NAME
        if len(os.fsencode(path)) > LONGEST_PATH_BYTES:
            path = _short_folder(self._link) / SOCKET_NAME
        path.unlink(missing_ok=True)
        self.path = path
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(str(path))
        path.chmod(0o600)
        self._socket.setblocking(False)

    def fileno(self) -> int:
        """For select."""
        return self._socket.fileno()

    def messages(self) -> Iterator[bytes]:
        """Every datagram that waits now, in order; ends when there is none."""
        while True:
            try:
                yield self._socket.recv(_MESSAGE_BYTES)
            except BlockingIOError:
                return

    def close(self) -> None:
        """Stop listening and remove what was made."""
        self._socket.close()
        self.path.unlink(missing_ok=True)
        if self._link.is_symlink():
            shutil.rmtree(self._link.resolve(), ignore_errors=True)
            self._link.unlink()


def _short_folder(link: Path) -> Path:
    """A folder with a short path, remembered by `link` so that an agent that was killed leaves no more than one."""
    if link.is_symlink():
        target = link.readlink()
        if target.is_dir() and not target.is_symlink() and target.stat().st_uid == os.geteuid():
            return target
        link.unlink()
    target = Path(tempfile.mkdtemp(prefix="gl-bell-"))
    link.symlink_to(target)
    return target
