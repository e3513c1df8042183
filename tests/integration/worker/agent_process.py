"""A real agent for tests, as a process that may be stopped, killed and started again on its data folder."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.integration.worker.fake_api import ENROLMENT_TOKEN, POOL_ID, FakeApi
from tests.support.child import die_with_parent, end
from tests.support.processes import is_alive, processes_marked
from tests.support.wait import BUSY_SECONDS, wait_until
from worker.attempt_folder import read_record
from worker.doorbell import launch_message, ring

NODE_NAME = "node-1"


class AgentProcess:
    """One data folder and the agent on it. `close()` ends whatever was started through it."""

    def __init__(self, folder: Path, api: FakeApi) -> None:
        self.data = folder / "agent"
        self.log_path = folder / "agent.log"
        self.token_file = folder / "enrolment-token"
        self.token_file.write_text(ENROLMENT_TOKEN + "\n")
        self.api = api
        self.process: subprocess.Popen[bytes] | None = None

    def command(self, *options: str) -> list[str]:
        """Command line of an agent on this folder."""
        agent = [sys.executable, "-P", "-m", "worker", "agent", "--data", str(self.data), "--server", self.api.url]
        return [*agent, "--enrolment-token-file", str(self.token_file), *options]

    def start(self, *options: str, **environment: str) -> None:
        """Start it and return once a heartbeat of it was answered."""
        before = len(self.api.heartbeats)
        with self.log_path.open("ab") as log:
            self.process = subprocess.Popen(
                self.command("--name", NODE_NAME, "--slots", "2", *options),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **environment},
                preexec_fn=die_with_parent(),
            )
        self.until(lambda: len(self.api.heartbeats) > before and self.status()["pid"] == self.pid, "no heartbeat")

    def stop(self, number: int = signal.SIGTERM) -> int:
        """Signal it and return its exit status."""
        assert self.process is not None
        status = end(self.process, first=number, grace=BUSY_SECONDS)
        self.process = None
        return status

    @property
    def pid(self) -> int:
        """Process id of the running agent."""
        assert self.process is not None
        return self.process.pid

    def log(self) -> str:
        """Everything that agents on this folder have logged."""
        return self.log_path.read_text(errors="replace")

    def status(self) -> dict[str, Any]:
        """The agent's status file; zeros as long as there is none."""
        path = self.data / "status.json"
        return dict(json.loads(path.read_text())) if path.exists() else {"pid": 0}

    def ring(self, attempt_id: int, times: int = 1) -> None:
        """Ring the doorbell as the Celery child does."""
        message = launch_message(attempt_id)
        assert message is not None
        for _ in range(times):
            ring(self.status()["doorbell"], message)

    def attempt_folder(self, attempt_id: int) -> Path:
        """Folder of an attempt, whether or not it exists."""
        return self.data / "attempts" / str(attempt_id)

    def marked(self, attempt_id: int) -> list[int]:
        """Pids of the process set of an attempt."""
        mark = f"{POOL_ID}/{NODE_NAME}/{attempt_id}"
        return [process.pid for process in processes_marked("GANGLINE_ATTEMPT", mark)]

    def until(self, condition: Any, message: str, seconds: float = BUSY_SECONDS) -> Any:
        """Wait for a condition; a failure shows the agent's log."""
        return wait_until(condition, seconds, lambda: f"{message}; the agent's log:\n{self.log()[-4000:]}")

    def close(self) -> None:
        """End the agent, its supervisors and their ranks."""
        if self.process is not None:
            self.stop()
        for supervisor_pid in self._supervisor_pids():
            _kill(supervisor_pid)
        folders = list((self.data / "attempts").glob("*")) if self.data.exists() else []
        for folder in folders:
            scratch = read_record(folder).scratch_folder
            if scratch is not None:
                shutil.rmtree(scratch, ignore_errors=True)
        for attempt_id in self.api.attempts:
            for pid in self.marked(attempt_id):
                _kill(pid)

    def _supervisor_pids(self) -> list[int]:
        """Living supervisors and finishing runs that agents here have started, whether or not their folder exists."""
        text = self.log() if self.log_path.exists() else ""
        pids = {int(pid) for pid in re.findall(r"^(?:spawned_supervisor|finishing_attempt) .*?\bpid=(\d+)", text, re.M)}
        ours = (b"worker.nursery", b"worker.supervisor")
        return [pid for pid in pids if is_alive(pid) and any(name in command_of(pid) for name in ours)]


def _kill(pid: int) -> None:
    with contextlib.suppress(ProcessLookupError):  # it was ending by itself
        os.kill(pid, signal.SIGKILL)


def command_of(pid: int) -> bytes:
    """Command line of a process, words ended by NUL; empty when it is gone."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""
