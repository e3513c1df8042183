"""The data folder: private, writable, with room, and held by one server at a time."""

from __future__ import annotations

import fcntl
import os
import shutil
from pathlib import Path
from typing import IO

from gangline.protocol.names import DATA_FOLDER_MARKER
from service.errors import SettingsError
from service.settings import Settings

LOCK_FILE = "server.lock"


def prepare_data_folder(settings: Settings) -> None:
    """Make the folder 0700 and prove that it can be written. Raises SettingsError with the fix."""
    folder = settings.data_folder
    try:
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        folder.chmod(0o700)
        probe = folder / f".probe-{os.getpid()}"
        try:
            probe.write_bytes(b"x" * 4096)
        finally:
            probe.unlink(missing_ok=True)
        (folder / DATA_FOLDER_MARKER).touch(0o600)
    except OSError as error:
        raise SettingsError(
            f"data folder {folder} cannot be written: {error.strerror}. Give another one with --data, or mount it "
            "writable."
        ) from error
    free = shutil.disk_usage(folder).free
    if free < settings.free_space_limit_bytes:
        raise SettingsError(
            f"data folder {folder} has {free // 2**20} MiB free, less than free_space_limit_bytes "
            f"({settings.free_space_limit_bytes // 2**20} MiB). Free space, or give another folder with --data."
        )


def lock_data_folder(folder: Path) -> IO[str]:
    """Hold the folder for this process until the returned file is closed. Raises SettingsError when it is held."""
    handle = (folder / LOCK_FILE).open("a+")
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        handle.seek(0)
        holder = handle.read().strip() or "unknown"
        handle.close()
        raise SettingsError(
            f"data folder {folder} is in use by another gang up (pid {holder}). Stop that one, or give another folder "
            "with --data."
        ) from error
    handle.truncate(0)
    handle.write(str(os.getpid()))
    handle.flush()
    return handle
