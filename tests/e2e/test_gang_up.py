"""`gang up` as a user runs it: it starts all parts, refuses a second one, and stops in order with nothing left."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.child import end
from tests.support.processes import all_processes, environment_of, is_alive
from tests.support.stack import kill
from tests.support.wait import wait_until

pytestmark = pytest.mark.timeout(900)
GANG = str(Path(sys.executable).parent / "gang")


class Up:
    """A `gang up` and the commands of a user who is logged in to it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.work = folder / "work"
        self.work.mkdir()
        self.data = self.work / ".data"
        (folder / "tmp").mkdir(exist_ok=True)
        self.environment = {
            **{key: value for key, value in os.environ.items() if not key.startswith("GANGLINE_")},
            "GANGLINE_CONFIG_FOLDER": str(folder / "config"),
            "TMPDIR": str(folder / "tmp"),
        }
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> dict[str, Any]:
        """Start it; returns `up.json` once it is ready."""
        argv = [GANG, "up", "--data", str(self.data), "--port", "0", "--nodes", "2", "--slots", "1"]
        with open(self.folder / "up.log", "ab") as log:
            self.process = subprocess.Popen(argv, env=self.environment, cwd=self.work, stdout=log, stderr=log)
        path = self.data / "up.json"
        wait_until(lambda: path.exists() or self.process_ended(), 120, lambda: f"gang up is not ready: {self.log()}")
        facts: dict[str, Any] = json.loads(path.read_text())
        self.gang("login", "--server", facts["url"], "--token-file", facts["admin_token_file"])
        return facts

    def process_ended(self) -> bool:
        """Whether it has ended, which is an error while it should run."""
        assert self.process is not None
        assert self.process.poll() is None, f"gang up ended with {self.process.returncode}: {self.log()}"
        return False

    def stop(self) -> int:
        """Ctrl-C; returns its exit code."""
        assert self.process is not None
        self.process.send_signal(signal.SIGINT)
        return self.process.wait(120)

    def log(self) -> str:
        """What it has printed."""
        return (self.folder / "up.log").read_text()

    def gang(self, *words: str, code: int = 0) -> str:
        """Run a `gang` command; returns its stdout."""
        done = subprocess.run(
            [GANG, *words],
            env=self.environment,
            cwd=self.work,
            capture_output=True,
            text=True,
            check=False,
            timeout=240,
        )
        assert done.returncode == code, (words, done.returncode, done.stdout, done.stderr)
        return done.stdout

    def processes(self) -> list[int]:
        """Live processes that it started, directly or not."""
        scratch = str(self.folder / "tmp")
        return [
            process.pid
            for process in all_processes()
            if process.pid != os.getpid()
            and is_alive(process.pid)
            and environment_of(process.pid).get("TMPDIR", "").startswith(scratch)
        ]


def is_ready(url: str) -> bool:
    """Whether the API answers that it is ready."""
    try:
        return httpx.get(f"{url}/readyz", timeout=2).status_code == 200
    except httpx.HTTPError:
        return False


@pytest.fixture
def up() -> Iterator[Up]:
    """A folder for one `gang up`; short, since unix sockets lie in it."""
    folder = Path(tempfile.mkdtemp(prefix="gup-"))
    running = Up(folder)
    try:
        yield running
    finally:
        if running.process is not None and running.process.poll() is None:
            end(running.process, first=signal.SIGINT, grace=40)
        for pid in running.processes():
            kill(pid)
        shutil.rmtree(folder, ignore_errors=True)


def test_a_day_with_gang_up(up: Up) -> None:
    facts = up.start()
    assert Path(facts["admin_token_file"]).stat().st_mode & 0o777 == 0o600
    assert up.data.stat().st_mode & 0o777 == 0o700

    (up.work / "job.yaml").write_text(
        "name: day\nrun: {command: 'echo hello from $GANGLINE_NODE_RANK'}\nresources: {nodes: 2, gpus_per_node: 1}\n"
    )
    assert "is valid" in up.gang("check", "job.yaml")
    submitted = up.gang("submit", "job.yaml", "--wait")
    assert "Submitted 1" in submitted
    assert "succeeded" in up.gang("ls")
    assert "hello from 1" in up.gang("logs", "day", "--rank", "1")
    assert json.loads(up.gang("show", "day", "-o", "json"))["outcome"] == "succeeded"
    assert "node-2" in up.gang("node", "ls")
    assert "admin" in up.gang("admin", "user", "list")
    up.gang("show", "no-such-job", code=3)

    assert up.stop() == 0
    assert up.processes() == []
    assert list((up.folder / "tmp").iterdir()) == []


def test_a_running_job_goes_back_into_the_queue_and_runs_at_the_next_start(up: Up) -> None:
    up.start()
    go = up.folder / "go"
    (up.work / "job.yaml").write_text(
        f"name: long\nrun: {{command: 'while [ ! -e {go} ]; do sleep 0.1; done'}}\nstop_grace: 2s\n"
    )
    up.gang("submit", "job.yaml")
    wait_until(lambda: "running" in up.gang("ls"), 120, "the job does not run")

    assert up.stop() == 0
    assert up.processes() == []
    go.touch()
    up.start()
    up.gang("wait", "long")
    job = json.loads(up.gang("show", "long", "-o", "json"))

    assert (job["state"], job["attempts"]) == ("succeeded", 2)
    assert up.stop() == 0


def test_a_second_gang_up_on_the_same_folder_is_refused_with_the_fix(up: Up) -> None:
    up.start()

    done = subprocess.run(
        [GANG, "up", "--data", str(up.data), "--port", "0"],
        env=up.environment,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 5
    assert "in use by another gang up" in done.stderr
    assert "--data" in done.stderr
    assert up.stop() == 0


def test_a_part_that_is_killed_is_started_again(up: Up) -> None:
    facts = up.start()

    for part in ("server", "redis", "node-1"):
        os.kill(facts["pids"][part], signal.SIGKILL)
    wait_until(
        lambda: (
            all(json.loads((up.data / "up.json").read_text())["pids"].values())
            and json.loads((up.data / "up.json").read_text())["pids"]["server"] != facts["pids"]["server"]
        ),
        120,
        lambda: f"not started again: {up.log()}",
    )
    wait_until(lambda: is_ready(facts["url"]), 120, lambda: f"the API is not back: {up.log()}")
    (up.work / "job.yaml").write_text("name: after\nrun: {command: 'echo ok'}\n")
    up.gang("submit", "job.yaml", "--wait")

    assert up.stop() == 0
    assert up.processes() == []


@pytest.mark.parametrize(
    ("variable", "value", "rule"),
    [
        ("GANGLINE_SERVER_LOST_SECONDS", "1", "unreachable_seconds < lost_seconds"),
        ("GANGLINE_SERVER_HEARTBEAT_SECONDS", "0", "greater than 0"),
        ("GANGLINE_SERVER_NO_SUCH", "1", "unknown setting"),
    ],
)
def test_o28_contradictory_settings_are_refused_by_name(up: Up, variable: str, value: str, rule: str) -> None:
    done = subprocess.run(
        [GANG, "up", "--data", str(up.data), "--port", "0"],
        env={**up.environment, variable: value},
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 5
    assert rule in done.stderr
