"""The folder that several nodes share, verified: an id in it says whether two nodes really see the same one.

The first agent that is given the folder writes the id, all others read it. Not for: what lies in it (checkpoints, see
`worker.plan_file`), or local data (every node has its own).
"""

from __future__ import annotations

import contextlib
import os
import secrets
import time
from pathlib import Path
from typing import Final

from worker.credential import AgentError
from worker.state import SharedFolder

ID_FILE: Final = ".gangline-shared"
_ID_CHARS: Final = 32
_APPEAR_SECONDS: Final = 5.0
"""Between another agent's making of the file and its content, on a slow network file system."""
_LOOK_SECONDS: Final = 0.05


class SharedFolderError(RuntimeError):
    """The folder is not the one that the agent verified: not mounted any more, or another one."""


def verify_shared_folder(path: Path) -> SharedFolder:
    """Check that this account can read and write `path`, and read its id (made when there is none).

    Raises AgentError with the fix.
    """
    folder = path.absolute()
    if not folder.is_dir():
        raise AgentError(
            f"The shared folder {folder} does not exist. Fix: mount it on this node, or correct --shared-folder."
        )
    try:
        _make_id(folder / ID_FILE)
        _try_to_write(folder)
        folder_id = _wait_for_id(folder / ID_FILE)
    except OSError as error:
        raise AgentError(
            f"The shared folder {folder} cannot be read and written by this account ({error}). Fix: give the agent's "
            "account the right to both, or leave --shared-folder away."
        ) from error
    return SharedFolder(path=str(folder), folder_id=folder_id)


def check_shared_folder(shared: SharedFolder) -> None:
    """Raise SharedFolderError unless the folder is still the one that was verified. Raises OSError."""
    try:
        found = (Path(shared.path) / ID_FILE).read_text(encoding="ascii", errors="replace").strip()
    except FileNotFoundError as error:
        # What is written below a mount point without its mount goes to the local disk, and nobody finds it again.
        raise SharedFolderError(f"the shared folder {shared.path} is not mounted: its {ID_FILE} is gone") from error
    if found != shared.folder_id:
        raise SharedFolderError(f"the shared folder {shared.path} is another one than when the agent started")


def _make_id(path: Path) -> None:
    with contextlib.suppress(FileExistsError):
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o644)
        try:
            os.write(descriptor, f"{secrets.token_hex(_ID_CHARS // 2)}\n".encode("ascii"))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def _wait_for_id(path: Path) -> str:
    deadline = time.monotonic() + _APPEAR_SECONDS
    while True:
        text = path.read_text(encoding="ascii", errors="replace").strip()
        if len(text) == _ID_CHARS:
            return text
        if time.monotonic() >= deadline:
            raise AgentError(
                f"{path} holds no id of a shared folder but {text!r}. Fix: remove it and start the agents again, "
                "while no job runs."
            )
        time.sleep(_LOOK_SECONDS)


def _try_to_write(folder: Path) -> None:
    probe = folder / f"{ID_FILE}.{os.getpid()}.{secrets.token_hex(4)}"
    probe.touch(exist_ok=False)
    probe.unlink()
