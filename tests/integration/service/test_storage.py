"""A data folder that cannot be written: refused at the start with the fix, and while running without any loss."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from gangline.protocol.bundles import pack_folder
from service.app import create_state
from service.errors import SettingsError, StorageFull
from service.folder import lock_data_folder, prepare_data_folder
from service.settings import Settings
from service.storage.bundles import BundleFiles
from service.storage.streams import StreamFiles
from tests.integration.service.api_server import Api, serve_people, settings_for
from tests.support.wait import wait_until


def fill_up(folder: Path) -> None:
    """Leave no byte free."""
    with (folder / "filler").open("wb", buffering=0) as filler:
        for size in (65_536, 512, 1):
            try:
                while True:
                    filler.write(b"x" * size)
            except OSError:
                continue


def make_read_only(folder: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", str(folder)], check=True)


# --- at the start --------------------------------------------------------------------------------------------------


def test_the_data_folder_is_private(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "data"
    prepare_data_folder(Settings(data_folder=folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    folder.chmod(0o755)
    prepare_data_folder(Settings(data_folder=folder))
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert not [path for path in folder.iterdir() if "probe" in path.name]


@pytest.mark.parametrize("where", ["", "deeper/data"])
def test_a_read_only_mount_is_refused_with_the_fix(tiny_disk: Path, where: str) -> None:
    make_read_only(tiny_disk)
    with pytest.raises(SettingsError, match=r"cannot be written: Read-only file system.*--data"):
        create_state(settings_for(tiny_disk / where, ""))


def test_a_full_disk_is_refused_with_the_fix_and_nothing_is_left(tiny_disk: Path) -> None:
    fill_up(tiny_disk)
    with pytest.raises(SettingsError, match=r"cannot be written: No space left on device"):
        create_state(settings_for(tiny_disk, ""))
    assert [path.name for path in tiny_disk.iterdir()] == ["filler"]


def test_a_disk_with_too_little_space_is_refused_with_the_numbers(tiny_disk: Path) -> None:
    with pytest.raises(SettingsError, match=r"has \d MiB free, less than free_space_limit_bytes \(64 MiB\)"):
        prepare_data_folder(Settings(data_folder=tiny_disk))


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_a_data_folder_that_is_a_file_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(SettingsError, match="cannot be written"):
        prepare_data_folder(Settings(data_folder=tmp_path / name))


def test_a_second_lock_on_one_folder_is_refused_with_the_pid_of_the_first(tmp_path: Path) -> None:
    with lock_data_folder(tmp_path):
        with pytest.raises(SettingsError, match=rf"in use by another gang up \(pid {os.getpid()}\)"):
            lock_data_folder(tmp_path)
    lock_data_folder(tmp_path).close()


def test_a_lock_goes_with_its_process(tmp_path: Path) -> None:
    script = (
        "import sys, time; from pathlib import Path; from service.folder import lock_data_folder\n"
        "held = lock_data_folder(Path(sys.argv[1])); print('held', flush=True); time.sleep(60)\n"
    )
    holder = subprocess.Popen([sys.executable, "-c", script, str(tmp_path)], stdout=subprocess.PIPE)
    try:
        assert holder.stdout is not None
        assert holder.stdout.readline() == b"held\n"
        with pytest.raises(SettingsError, match=f"pid {holder.pid}"):
            lock_data_folder(tmp_path)
    finally:
        holder.kill()
        holder.wait()
    lock_data_folder(tmp_path).close()


@pytest.mark.parametrize(
    ("variables", "rule"),
    [
        ({"HEARTBEAT_SECONDS": "60"}, "heartbeat_seconds × 3 ≤ unreachable_seconds"),
        ({"HOST": "0.0.0.0"}, "behind_proxy=true"),
        ({"NO_SUCH_SETTING": "1"}, "unknown setting"),
    ],
)
@pytest.mark.parametrize("module", ["service.serve", "service.schedule"])
def test_o28_a_process_with_contradictory_settings_refuses_to_start_in_one_line(
    tmp_path: Path, module: str, variables: dict[str, str], rule: str
) -> None:
    environment = {"PATH": os.environ["PATH"], "GANGLINE_SERVER_DATA_FOLDER": str(tmp_path / "data")}
    environment |= {f"GANGLINE_SERVER_{name}": value for name, value in variables.items()}
    done = subprocess.run(
        [sys.executable, "-m", module], env=environment, cwd=Path.cwd(), capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 2
    assert rule in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "data").exists()


# --- while running -------------------------------------------------------------------------------------------------


def test_log_bytes_that_a_full_disk_refuses_are_not_stored_and_come_again(tiny_disk: Path) -> None:
    files = StreamFiles(tiny_disk)
    files.write_at(1, "log", 0, 0, b"before")
    fill_up(tiny_disk)
    with pytest.raises(StorageFull, match="No space left"):
        files.write_at(1, "log", 0, 6, b"x" * 100_000)
    (tiny_disk / "filler").unlink()
    files.write_at(1, "log", 0, 6, b"x" * 100_000)
    assert files.read_at(1, "log", 0, 0, 200_000) == b"before" + b"x" * 100_000


@pytest.mark.parametrize("spoil", [fill_up, make_read_only])
def test_a_bundle_that_the_disk_refuses_leaves_nothing(tiny_disk: Path, spoil: Any) -> None:
    files = BundleFiles(tiny_disk)
    files.begin().drop()
    spoil(tiny_disk)
    with pytest.raises(StorageFull):
        upload = files.begin()
        try:
            upload.write(b"x" * 3_000)  # stays in the buffer: the disk says no only at the end
            upload.keep("sha256:" + "0" * 64)
        finally:
            upload.drop()
    assert list((tiny_disk / "bundles").iterdir()) == []


@pytest.fixture
def on_tiny_disk(tiny_disk: Path) -> Any:
    """A server whose whole data folder lies on a disk that the test can spoil."""
    state = create_state(settings_for(tiny_disk, ""))
    with serve_people(state) as served:
        yield served


def test_on_a_full_disk_the_server_refuses_and_goes_on_when_there_is_room_again(
    on_tiny_disk: Api, tmp_path: Path
) -> None:
    api = on_tiny_disk
    part = api.start(api.submit(), api.node())[0]
    part.append(b"before\n", 0)
    disk = api.state.settings.data_folder
    fill_up(disk)
    (tmp_path / "x.py").write_bytes(os.urandom(50_000))
    bundle = pack_folder(tmp_path)

    refused = {
        "log": part.append(b"x" * 60_000, 7),
        "bundle": api.request("PUT", f"/bundles/{bundle.digest}", content=bundle.path.read_bytes()),
        "jobs": next(
            answer
            for answer in (
                api.request(
                    "POST", "/jobs", json={"name": "x", "run": {"command": ["true"]}, "env": {"A": "x" * 50_000}}
                )
                for _ in range(200)
            )
            if answer.status_code != 201
        ),
    }

    assert {name: answer.status_code for name, answer in refused.items()} == {"log": 507, "bundle": 507, "jobs": 503}
    for answer in refused.values():
        assert answer.headers["content-type"] == "application/problem+json"
        assert answer.json()["fix"]
        assert "retry-after" in answer.headers
    assert api.get("/jobs")["items"], "reading goes on"
    (disk / "filler").unlink()
    wait_until(lambda: part.append(b"after\n", 7).status_code == 200, 60, "it does not go on")
    assert api.get(f"/jobs/{part.plan['job_id']}/logs")["text"] == "before\nafter\n"
    assert part.ended().status_code == 200
