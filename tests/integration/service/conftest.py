"""One server per module and database for the tests of the API; each test finds only the people in it."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from service.db.migrate import migrate
from service.db.session import Database
from tests.integration.service.api_server import Api, new_state, serve_people
from tests.support.ci import cannot_run


def fill(url: str) -> None:
    """Bring an empty database to the present schema and let go of it."""
    database = Database(url)
    migrate(database)
    database.dispose()


@pytest.fixture(scope="session")
def sqlite_template(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A migrated SQLite file to copy."""
    path = tmp_path_factory.mktemp("template") / "gangline.db"
    fill(f"sqlite:///{path}")
    return path


@pytest.fixture(scope="module", params=["sqlite", "postgresql"])
def served(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Api]:
    """The server of this module, on SQLite and on PostgreSQL."""
    folder = tmp_path_factory.mktemp("served")
    if request.param == "sqlite":
        url = f"sqlite:///{folder / 'gangline.db'}"
        shutil.copy(request.getfixturevalue("sqlite_template"), folder / "gangline.db")
    else:
        server = request.getfixturevalue("postgres_server")
        url = server.fresh_database(server.template("gangline", fill))
    with serve_people(new_state(folder, url)) as served:
        yield served
    if request.param == "postgresql":
        server.drop_database(url)


@pytest.fixture
def api(served: Api) -> Api:
    """The server with nothing but the people in it."""
    served.reset()
    return served


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB: it can be filled, and made read-only even for root."""
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder)], capture_output=True, text=True
    )
    if done.returncode != 0:
        cannot_run(f"cannot mount a tmpfs: {done.stderr.strip()}", "run the tests as root, or in a user namespace")
    yield folder
    subprocess.run(["umount", "-l", str(folder)], check=True)
