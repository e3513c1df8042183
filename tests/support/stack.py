"""A whole pool for a test: real API process, real Redis, real agents (and, on PostgreSQL, the scheduling process).

Every part can be killed, stopped and started again by name. Deadlines are shortened by settings, never by sleeping.
Leaving it checks that nothing of any attempt is left on the machine (I-31).
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx

from tests.support.child import die_with_parent, end
from tests.support.processes import all_processes, environment_of, is_alive
from tests.support.redis import RedisServer
from tests.support.wait import wait_until

FAST: Mapping[str, str] = {
    "HEARTBEAT_SECONDS": "0.4",
    "UNREACHABLE_SECONDS": "2",
    "LOST_SECONDS": "5",
    "CLAIM_SECONDS": "4",
    "START_SECONDS": "60",
    "SWEEP_SECONDS": "0.2",
    "SETTLE_SECONDS": "10",
    "MISSING_ATTEMPT_SECONDS": "1.5",
    "LEADER_LEASE_SECONDS": "2",
}
"""Deadlines of a test pool: as in production, in the same order, some thirty times shorter."""
READY_SECONDS = 60.0
TERMINAL = ("succeeded", "failed", "cancelled")
PYTHON = sys.executable


class Stack:
    """One pool. Use as a context manager."""

    def __init__(
        self,
        *,
        database_url: str = "",
        num_nodes: int = 2,
        slots: int = 2,
        has_broker: bool = True,
        settings: Mapping[str, str] | None = None,
    ) -> None:
        """`settings` overrides FAST, by the name of the setting in capitals."""
        self.folder = Path(tempfile.mkdtemp(prefix="gls-"))
        self.scratch = self.folder / "t"
        self.scratch.mkdir()
        self.data = self.folder / "data"
        self.data.mkdir(mode=0o700)
        self.database_url = database_url
        self.is_postgres = database_url.startswith("postgresql")
        self.node_names = [f"node-{number}" for number in range(1, num_nodes + 1)]
        self.slots = slots
        self.redis = RedisServer() if has_broker else None
        self.settings = {**FAST, **(settings or {})}
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self.url = ""
        self.token = ""
        self._port = 0

    # --- life ------------------------------------------------------------------------------------------------------

    def __enter__(self) -> Stack:
        try:
            if self.redis is not None:
                self.redis.start()
            self.start_server()
            if self.is_postgres:
                self.start_scheduler()
            for name in self.node_names:
                self.start_agent(name)
            self.wait_for_nodes()
        except BaseException:
            self._end_everything()
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            if kind is None:
                self.assert_nothing_left()
        finally:
            self._end_everything()

    def start_server(self) -> None:
        """Start the API, on the same port as before, and wait until it is ready."""
        environment = {
            **self._environment(),
            "GANGLINE_SERVER_DATA_FOLDER": str(self.data),
            "GANGLINE_SERVER_DATABASE_URL": self.database_url,
            "GANGLINE_SERVER_BROKER_URL": self.redis.url if self.redis else "",
            "GANGLINE_SERVER_PORT": str(self._port),
            "GANGLINE_SERVER_RUN_SCHEDULER": "false" if self.is_postgres else "true",
            **{f"GANGLINE_SERVER_{name}": value for name, value in self.settings.items()},
        }
        self._spawn("server", [PYTHON, "-P", "-m", "service.serve"], environment)
        wait_until(self._is_server_ready, READY_SECONDS, lambda: f"the API is not ready: {self.log('server')}")

    def start_scheduler(self) -> None:
        """Start the scheduling process (PostgreSQL only)."""
        environment = {
            **self._environment(),
            "GANGLINE_SERVER_DATA_FOLDER": str(self.data),
            "GANGLINE_SERVER_DATABASE_URL": self.database_url,
            "GANGLINE_SERVER_BROKER_URL": self.redis.url if self.redis else "",
            "GANGLINE_SERVER_RUN_SCHEDULER": "false",
            **{f"GANGLINE_SERVER_{name}": value for name, value in self.settings.items()},
        }
        self._spawn("scheduler", [PYTHON, "-P", "-m", "service.schedule"], environment)

    def start_agent(self, name: str) -> None:
        """Start (or start again) the agent of a node."""
        argv = [PYTHON, "-P", "-m", "worker", "agent", "--data", str(self.node_folder(name)), "--server", self.url]
        argv += ["--name", name, "--slots", str(self.slots)]
        argv += ["--enrolment-token-file", str(self.data / "enrolment.token")]
        if self.redis is not None:
            argv += ["--broker-url", self.redis.url]
        self._spawn(name, argv, self._environment())

    def kill9(self, part: str) -> None:
        """SIGKILL one part by name: `server`, `scheduler`, a node's name."""
        process = self.processes.pop(part)
        process.kill()
        process.wait()

    def stop(self, part: str, signal_number: int = signal.SIGTERM) -> None:
        """Stop one part as its owner would."""
        end(self.processes.pop(part), first=signal_number, grace=15)

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("GANGLINE_", "TORCHELASTIC_"))}
        return {**kept, "TMPDIR": str(self.scratch)}

    def _spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str]) -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                argv,
                env=dict(environment),
                cwd=self.folder,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                preexec_fn=die_with_parent(),
            )

    def _is_server_ready(self) -> bool:
        process = self.processes["server"]
        if process.poll() is not None:
            raise RuntimeError(f"the API ended with {process.returncode}: {self.log('server')}")
        try:
            facts = json.loads((self.data / "server.json").read_text())
            if facts["pid"] != process.pid:
                return False
            self.url = facts["url"]
            self._port = int(self.url.rsplit(":", 1)[1])
            self.token = (self.data / "admin.token").read_text().strip()
            return httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200
        except (FileNotFoundError, json.JSONDecodeError, httpx.HTTPError):
            return False

    def _end_everything(self) -> None:
        for name in [*self.node_names, "scheduler", "server"]:
            process = self.processes.pop(name, None)
            if process is not None:
                end(process, grace=10)
        for pid in self._stray_pids():
            os.kill(pid, signal.SIGKILL)
        if self.redis is not None:
            self.redis.stop()
        if os.environ.get("GANGLINE_TEST_KEEP") != "1":
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- requests --------------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, *, token: str | None = None, **options: Any) -> httpx.Response:
        """One request to the API; `path` without the prefix."""
        headers = {"Authorization": f"Bearer {token or self.token}", **options.pop("headers", {})}
        return httpx.request(method, f"{self.url}/api/v1{path}", headers=headers, timeout=70, **options)

    def get(self, path: str, **options: Any) -> Any:
        """GET as JSON; anything but success is an error."""
        response = self.request("GET", path, **options)
        assert response.is_success, (response.status_code, response.text)
        return response.json()

    def submit(self, spec: Mapping[str, Any] | None = None, /, **members: Any) -> int:
        """Submit a job; returns its id."""
        body = {"name": "test", **(spec or {}), **members}
        response = self.request("POST", "/jobs", json=body)
        assert response.status_code == 201, (response.status_code, response.text)
        return int(response.json()["id"])

    def python_job(self, source: str, **members: Any) -> int:
        """Submit a script job that runs this source, from a folder of its own on this machine."""
        return self.submit(
            code={"path": str(self.code(source))},
            python=PYTHON,
            run={"script": "main.py", **members.pop("run", {})},
            **members,
        )

    def code(self, source: str) -> Path:
        """A folder with `main.py` of this source."""
        folder = Path(tempfile.mkdtemp(prefix="code-", dir=self.folder))
        (folder / "main.py").write_text(source)
        return folder

    def job(self, job_id: int) -> dict[str, Any]:
        """The job as the API shows it."""
        result: dict[str, Any] = self.get(f"/jobs/{job_id}")
        return result

    def cancel(self, job_id: int) -> httpx.Response:
        """Cancel a job."""
        return self.request("POST", f"/jobs/{job_id}/cancel", json={})

    def wait_state(self, job_id: int, *states: str, timeout: float = 60.0) -> dict[str, Any]:
        """Wait until the job is in one of `states`; returns it."""
        return wait_until(
            lambda: (job := self._job_or_none(job_id)) and job["state"] in states and job,
            timeout,
            lambda: f"job {job_id} is not {' or '.join(states)}: {self.describe(job_id)}",
        )

    def wait_end(self, job_id: int, timeout: float = 90.0) -> dict[str, Any]:
        """Wait until the job has ended; returns it."""
        return self.wait_state(job_id, *TERMINAL, timeout=timeout)

    def wait_log(self, job_id: int, text: str, rank: int = 0, timeout: float = 60.0) -> None:
        """Wait until a rank's stored log holds `text`."""
        wait_until(
            lambda: text in self.log_text(job_id, rank),
            timeout,
            lambda: f"no {text!r} in the log of rank {rank}: {self.describe(job_id)}",
        )

    def log_text(self, job_id: int, rank: int = 0) -> str:
        """The stored log of a rank, as text."""
        return self.log_bytes(job_id, rank).decode("utf-8", "replace")

    def log_bytes(self, job_id: int, rank: int = 0, attempt: int | None = None) -> bytes:
        """The stored log of a rank, byte for byte; empty while the API is away."""
        query = f"?rank={rank}" + (f"&attempt={attempt}" if attempt else "")
        try:
            response = self.request("GET", f"/jobs/{job_id}/logs/raw{query}")
        except httpx.TransportError:
            return b""
        return response.content if response.is_success else b""

    def events(self, job_id: int) -> list[dict[str, Any]]:
        """The job's history."""
        items: list[dict[str, Any]] = self.get(f"/jobs/{job_id}/events?limit=1000")["items"]
        return items

    def node(self, name: str) -> dict[str, Any]:
        """A node as the API shows it."""
        return next(node for node in self.get("/nodes")["items"] if node["name"] == name)

    def wait_for_nodes(self) -> None:
        """Wait until every node is ready."""
        wait_until(
            lambda: sum(node["state"] == "ready" for node in self.get("/nodes")["items"]) >= len(self.node_names),
            READY_SECONDS,
            lambda: f"not all nodes joined: {[self.log(name) for name in self.node_names]}",
        )

    def wait_node(self, name: str, state: str, timeout: float = 30.0) -> None:
        """Wait until a node is in a state."""
        wait_until(
            lambda: self.node(name)["state"] == state, timeout, lambda: f"{name} is not {state}: {self.node(name)}"
        )

    def _job_or_none(self, job_id: int) -> dict[str, Any] | None:
        try:
            return self.job(job_id)
        except httpx.TransportError:
            return None

    # --- evidence --------------------------------------------------------------------------------------------------

    def node_folder(self, name: str) -> Path:
        """Data folder of a node's agent."""
        return self.folder / "nodes" / name

    def log(self, part: str, num_bytes: int = 3000) -> str:
        """The end of what a part wrote."""
        path = self.folder / f"{part}.log"
        return path.read_text(errors="replace")[-num_bytes:] if path.exists() else "(no log)"

    def describe(self, job_id: int) -> str:
        """What there is to know about a job, for the message of a failed wait."""
        try:
            job = {key: value for key, value in self.job(job_id).items() if key != "spec"}
            told = [event["text"] for event in self.events(job_id)]
        except (httpx.HTTPError, AssertionError) as error:
            job, told = {"unknown": str(error)}, []
        parts = "".join(f"\n--- {name}: {self.log(name, 1500)}" for name in [*self.node_names, "server"])
        return f"{json.dumps(job, indent=1)}\n{told}{parts}"

    def supervisor_pid(self, node: str, attempt_id: int) -> int:
        """Pid of the supervisor of an attempt on a node."""
        state = json.loads((self.node_folder(node) / "attempts" / str(attempt_id) / "state.json").read_text())
        return int(state["supervisor"]["pid"])

    def marked(self, attempt_id: int | None = None) -> list[int]:
        """Pids of live processes that carry the marker of an attempt of this pool (of any, without `attempt_id`)."""
        found = []
        for process in all_processes():
            marker = environment_of(process.pid).get("GANGLINE_ATTEMPT")
            is_ours = marker is not None and str(self.scratch) in environment_of(process.pid).get("TMPDIR", "")
            if is_ours and marker is not None and (attempt_id is None or marker.endswith(f"/{attempt_id}")):
                found.append(process.pid)
        return found

    def assert_nothing_left(self, timeout: float = 20.0) -> None:
        """No process, port, socket, cgroup, scratch or attempt folder of any attempt; no GPU held; no hint waiting."""
        wait_until(lambda: not self.leftovers(), timeout, lambda: f"left over: {self.leftovers()}")

    def leftovers(self) -> list[str]:
        """What is left of attempts, in words."""
        found = [f"process {pid}" for pid in self.marked() if is_alive(pid)]
        found += [f"attempt folder {path}" for path in self.folder.glob("nodes/*/attempts/[0-9]*")]
        found += [f"scratch {path}" for path in self.scratch.glob("gl-[0-9]*")]
        for cgroup_root in ("/sys/fs/cgroup", "/sys/fs/cgroup/unified"):
            found += [f"cgroup {path}" for path in Path(cgroup_root).glob(f"*gangline*/*{self._pool_id()}*")]
        if "server" in self.processes:
            for node in self.get("/nodes")["items"]:
                found += [f"{node['name']} GPU {gpu['index']} held" for gpu in node["gpus"] if gpu["held"]]
        return found

    def _pool_id(self) -> str:
        for name in self.node_names:
            path = self.node_folder(name) / "credential.json"
            if path.exists():
                return str(json.loads(path.read_text())["pool_id"])
        return "no-pool"

    def _stray_pids(self) -> list[int]:
        """Processes that only this stack can have started: they carry its scratch folder in their environment."""
        return [
            process.pid
            for process in all_processes()
            if process.pid != os.getpid()
            and environment_of(process.pid).get("TMPDIR", "").startswith(str(self.scratch))
        ]


def hold_source(seconds: float = 120.0) -> str:
    """A script that prints `holding` and waits, ending early only by a signal."""
    return (
        "import time\nprint('holding', flush=True)\n"
        f"end = time.monotonic() + {seconds}\nwhile time.monotonic() < end:\n    time.sleep(0.05)\n"
    )
