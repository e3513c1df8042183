"""A whole pool for a test: real API process, real Redis, real agents (and, on PostgreSQL, the scheduling process).

Every part can be killed, stopped and started again by name. Deadlines are shortened by settings, never by sleeping.
Leaving it checks that nothing of any attempt is left on the machine (I-31).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any

import httpx
from sqlalchemy import NullPool, create_engine
from sqlalchemy import text as sql_text

from tests.support.child import die_with_parent, end
from tests.support.cuttable_proxy import CuttableProxy
from tests.support.namespaces import Network
from tests.support.processes import CGROUP_ROOTS, all_processes, environment_of, folders_named, is_alive
from tests.support.redis import RedisServer
from tests.support.wait import wait_until
from worker.cgroup import group_name

FAST: Mapping[str, str] = {
    "HEARTBEAT_SECONDS": "0.4",
    "HEARTBEAT_LARGE_POOL_SECONDS": "1",
    "UNREACHABLE_SECONDS": "15",
    "LOST_SECONDS": "60",
    "CLAIM_SECONDS": "30",
    "START_SECONDS": "180",
    "SWEEP_SECONDS": "0.2",
    "SETTLE_SECONDS": "10",
    "MISSING_ATTEMPT_SECONDS": "1.5",
    "LEADER_LEASE_SECONDS": "2",
}
"""Deadlines of a test pool. Those of claims, starts and silence are long: a test that does not wait for them must not
meet them, however busy the machine is. One that waits for them sets them itself."""
READY_SECONDS = 120.0
LOCK_SECONDS = 60.0
"""How long a look into a SQLite file waits for whoever writes."""
TEST_SECONDS = 900.0
"""For `pytest.mark.timeout` of a test with a pool: what it waits for here comes first. That fails one test, while
pytest's timeout ends the whole run."""
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
        has_proxies: bool = False,
        server_broker: RedisServer | None = None,
        network: Network | None = None,
    ) -> None:
        """`settings` overrides FAST, by the name of the setting in capitals.

        `has_proxies`: each node reaches the API through a proxy of its own, so that `cut` can part them.
        `server_broker`: a running Redis that the service sends its hints to, in place of the one that nodes listen on;
        whoever gives it carries the messages over. `network`: the API runs in its host `service`, each agent in the
        host of its name.
        """
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
        self.server_broker = server_broker or self.redis
        self.has_proxies = has_proxies
        self.proxies: dict[str, CuttableProxy] = {}
        self.network = network
        self.pool_id = ""
        self.is_mended = True
        """False from the moment on which a test may break parts until `mend` has succeeded."""
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
            self.pool_id = str(self.sql("select pool_id from pool")[0][0])
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
            "GANGLINE_SERVER_BROKER_URL": self.server_broker.url if self.server_broker else "",
            "GANGLINE_SERVER_PORT": str(self._port),
            "GANGLINE_SERVER_RUN_SCHEDULER": "false" if self.is_postgres else "true",
            **{f"GANGLINE_SERVER_{name}": value for name, value in self.settings.items()},
        }
        if self.network is not None:
            environment["GANGLINE_SERVER_HOST"] = self.network.address("service")
            environment["GANGLINE_SERVER_BEHIND_PROXY"] = "true"
        self._spawn("server", [PYTHON, "-P", "-m", "service.serve"], environment, host="service")
        wait_until(self._is_server_ready, READY_SECONDS, lambda: f"the API is not ready: {self.log('server')}")

    def start_scheduler(self, name: str = "scheduler") -> None:
        """Start a scheduling process (PostgreSQL only); several may run, one leads."""
        environment = {
            **self._environment(),
            "GANGLINE_SERVER_DATA_FOLDER": str(self.data),
            "GANGLINE_SERVER_DATABASE_URL": self.database_url,
            "GANGLINE_SERVER_BROKER_URL": self.server_broker.url if self.server_broker else "",
            "GANGLINE_SERVER_RUN_SCHEDULER": "false",
            **{f"GANGLINE_SERVER_{name}": value for name, value in self.settings.items()},
        }
        self._spawn(name, [PYTHON, "-P", "-m", "service.schedule"], environment)

    def start_agent(self, name: str) -> None:
        """Start (or start again) the agent of a node."""
        if self.has_proxies and name not in self.proxies:
            self.proxies[name] = CuttableProxy(self.url).__enter__()
        url = self.proxies[name].url if self.has_proxies else self.url
        argv = [PYTHON, "-P", "-m", "worker", "agent", "--data", str(self.node_folder(name)), "--server", url]
        argv += ["--name", name, "--slots", str(self.slots)]
        argv += ["--enrolment-token-file", str(self.data / "enrolment.token")]
        if self.redis is not None:
            argv += ["--broker-url", self.redis.url]
        self._spawn(name, argv, self._environment(), host=name)

    def kill9(self, part: str) -> None:
        """SIGKILL one part by name: `server`, `scheduler`, a node's name."""
        process = self.processes.pop(part)
        process.kill()
        process.wait()

    def stop(self, part: str, signal_number: int = signal.SIGTERM) -> None:
        """Stop one part as its owner would."""
        end(self.processes.pop(part), first=signal_number, grace=15)

    def cut(self, *names: str) -> None:
        """Part nodes from the API, agent and supervisors alike (`has_proxies`)."""
        for name in names:
            self.proxies[name].cut()

    def heal(self, *names: str) -> None:
        """Undo `cut`."""
        for name in names:
            self.proxies[name].restore()

    def kill_node(self, name: str) -> list[int]:
        """SIGKILL everything of a node at once, as a lost machine does; returns the ids of its attempts."""
        attempt_ids = self.attempts_on(name)
        supervisors = [self.supervisor_pid(name, attempt_id) for attempt_id in attempt_ids]
        self.kill9(name)
        for pid in (*supervisors, *self.marked(node=name)):
            kill(pid)
        return attempt_ids

    def mend(self) -> None:
        """Bring everything back: no cut, no stopped process, all parts running, no job, nothing held."""
        self.heal(*self.proxies)
        for pid in self.own_pids():
            kill(pid, signal.SIGCONT)
        for name in [name for name, process in self.processes.items() if process.poll() is not None]:
            del self.processes[name]
        if self.redis is not None and not self.redis.is_running:
            self.redis.start()
        if "server" not in self.processes:
            self.start_server()
        if self.is_postgres and "scheduler" not in self.processes:
            self.start_scheduler()
        for name in self.node_names:
            if name not in self.processes:
                self.start_agent(name)
        for state in ("waiting", "starting", "running"):
            for job in self.get(f"/jobs?state={state}&limit=200")["items"]:
                self.cancel(job["id"])
        self.wait_for_nodes()
        self.assert_nothing_left()
        self.is_mended = True

    def _environment(self) -> dict[str, str]:
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("GANGLINE_", "TORCHELASTIC_"))}
        return {**kept, "TMPDIR": str(self.scratch)}

    def _spawn(self, name: str, argv: Sequence[str], environment: Mapping[str, str], *, host: str = "") -> None:
        with open(self.folder / f"{name}.log", "ab") as log:
            self.processes[name] = subprocess.Popen(
                self.network.hosts[host].enter(argv) if self.network is not None else argv,
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
            with self._at_the_service():
                return httpx.get(f"{self.url}/readyz", timeout=2).status_code == 200
        except (FileNotFoundError, json.JSONDecodeError, httpx.HTTPError):
            return False

    def _end_everything(self) -> None:
        for name in self.node_names:  # all are told before the first is waited for
            if name in self.processes:
                self.processes[name].terminate()
        for name in [*self.node_names, *sorted(self.processes.keys() - {*self.node_names, "server"}), "server"]:
            process = self.processes.pop(name, None)
            if process is not None:
                end(process, grace=10)
        for proxy in self.proxies.values():
            proxy.__exit__(None, None, None)
        for pid in self.own_pids():
            kill(pid)
        if self.redis is not None:
            self.redis.stop()
        if self.pool_id:  # what a failed test may leave
            for path in Path("/tmp").glob(f"gl-{self.pool_id}-*"):
                shutil.rmtree(path, ignore_errors=True)
        if os.environ.get("GANGLINE_TEST_KEEP") != "1":
            shutil.rmtree(self.folder, ignore_errors=True)

    # --- requests --------------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, *, token: str | None = None, **options: Any) -> httpx.Response:
        """One request to the API; `path` without the prefix."""
        headers = {"Authorization": f"Bearer {token or self.token}", **options.pop("headers", {})}
        with self._at_the_service():
            return httpx.request(method, f"{self.url}/api/v1{path}", headers=headers, timeout=70, **options)

    def _at_the_service(self) -> AbstractContextManager[None]:
        """Where requests start from: here, or inside the host of the service."""
        return contextlib.nullcontext() if self.network is None else self.network.inside("service")

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

    def wait_state(self, job_id: int, *states: str, timeout: float = 120.0) -> dict[str, Any]:
        """Wait until the job is in one of `states`; returns it."""
        return wait_until(
            lambda: (job := self._job_or_none(job_id)) and job["state"] in states and job,
            timeout,
            lambda: f"job {job_id} is not {' or '.join(states)}: {self.describe(job_id)}",
        )

    def wait_end(self, job_id: int, timeout: float = 180.0) -> dict[str, Any]:
        """Wait until the job has ended; returns it."""
        return self.wait_state(job_id, *TERMINAL, timeout=timeout)

    def wait_log(self, job_id: int, text: str, rank: int = 0, timeout: float = 120.0) -> None:
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
        """Wait until every node is ready, and heard of from the agent that runs now."""
        wait_until(
            lambda: all(map(self._has_joined, self.node_names)),
            READY_SECONDS,
            lambda: f"not all nodes joined: {[self.log(name) for name in self.node_names]}",
        )

    def _has_joined(self, name: str) -> bool:
        rows = self.sql("select incarnation from nodes where name = :name and state = 'ready'", name=name)
        try:
            status = self.status(name)
        except FileNotFoundError:
            return False
        return status["pid"] == self.processes[name].pid and rows == [(status["incarnation"],)]

    def wait_node(self, name: str, *states: str, timeout: float = 60.0) -> None:
        """Wait until a node is in one of `states`."""
        wait_until(
            lambda: self.node(name)["state"] in states,
            timeout,
            lambda: f"{name} is not {' or '.join(states)}: {self.node(name)}",
        )

    def wait_placed(self, job_id: int, *silent: str, timeout: float = 60.0) -> None:
        """Wait until the job has its first attempt; the nodes `silent` are vouched for until then."""

        def is_placed() -> bool:
            self.vouch_for(*silent)
            return bool(self.job(job_id)["attempts"])

        wait_until(is_placed, timeout, lambda: f"the job is not placed: {self.describe(job_id)}")

    def vouch_for(self, *names: str) -> None:
        """Let nodes count as heard of just now, though their agents are held or gone: their silence begins here.

        A node that is late with its heartbeat gets no work, so that placing something on it would race with the clock.
        """
        for name in names:
            statement = "update nodes set last_heartbeat_at = :now, state = 'ready' where name = :name"
            self.sql(statement, now=time.time(), name=name)

    def _job_or_none(self, job_id: int) -> dict[str, Any] | None:
        try:
            return self.job(job_id)
        except httpx.TransportError:
            return None

    # --- the database ----------------------------------------------------------------------------------------------

    def sql(self, statement: str, **values: Any) -> list[tuple[Any, ...]]:
        """Run one statement behind the service's back and commit; the rows, if it gives any.

        Foreign keys are not enforced: it is there to look, and to damage rows as nobody should.
        """
        if self.is_postgres:
            engine = create_engine(self.database_url, poolclass=NullPool)
        else:
            path = self.data / "gangline.db"
            engine = create_engine(f"sqlite:///{path}", poolclass=NullPool, connect_args={"timeout": LOCK_SECONDS})
        with engine.begin() as connection:
            if self.is_postgres:
                connection.execute(sql_text("SET LOCAL session_replication_role = replica"))
            result = connection.execute(sql_text(statement), values)
            return [tuple(row) for row in result] if result.returns_rows else []

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

    def attempts_on(self, node: str) -> list[int]:
        """Ids of the attempts that have a folder on a node."""
        return sorted(int(path.name) for path in (self.node_folder(node) / "attempts").glob("[0-9]*"))

    def adopted(self, node: str) -> list[int]:
        """Attempts that an agent of the node found running when it started, in the order of its log."""
        return [int(number) for number in re.findall(r"adopted_attempt .*attempt_id=(\d+)", self.log(node, 1_000_000))]

    def status(self, node: str) -> dict[str, Any]:
        """What a node's agent says of itself: pids, counters of hints."""
        result: dict[str, Any] = json.loads((self.node_folder(node) / "status.json").read_text())
        return result

    def marked(self, attempt_id: int | None = None, *, node: str | None = None) -> list[int]:
        """Pids of live processes that carry the marker of an attempt of this pool: of any attempt and node, or one."""
        found = []
        for process in all_processes():
            parts = environment_of(process.pid).get("GANGLINE_ATTEMPT", "").split("/")
            if len(parts) != 3 or parts[0] != self.pool_id:
                continue
            if attempt_id in (None, int(parts[2])) and node in (None, parts[1]):
                found.append(process.pid)
        return found

    def assert_nothing_left(self, timeout: float = 60.0) -> None:
        """No process, port, socket, cgroup, scratch or attempt folder of any attempt; no GPU held; no hint waiting."""
        wait_until(lambda: not self.leftovers(), timeout, lambda: f"left over: {self.leftovers()}")

    def leftovers(self) -> list[str]:
        """What is left of attempts, in words."""
        found = [f"process {pid}" for pid in self.marked() if is_alive(pid)]
        found += [f"attempt folder {path}" for path in self.folder.glob("nodes/*/attempts/[0-9]*")]
        found += [f"scratch {path}" for path in Path("/tmp").glob(f"gl-{self.pool_id}-*")]
        found += [f"cgroup {path}" for path in self._cgroups()]
        if "server" in self.processes:
            for node in self.get("/nodes")["items"]:
                found += [f"{node['name']} GPU {gpu['index']} held" for gpu in node["gpus"] if gpu["held"]]
        return found

    def _cgroups(self) -> list[Path]:
        """Groups of attempts of this pool, wherever they lie."""
        ids = range(1, int(self.sql("select coalesce(max(id), 0) from attempts")[0][0]) + 1)
        names = {group_name(f"{self.pool_id}/{node}/{number}") for node in self.node_names for number in ids}
        return [path for path in folders_named("gangline-*", CGROUP_ROOTS[:1]) if path.name in names]

    def own_pids(self) -> list[int]:
        """Processes that only this stack can have started: its scratch folder or its pool is in their environment."""
        parts = [
            process.pid
            for process in all_processes()
            if process.pid != os.getpid()
            and environment_of(process.pid).get("TMPDIR", "").startswith(str(self.scratch))
        ]
        return [*parts, *self.marked()]


def kill(pid: int, number: signal.Signals = signal.SIGKILL) -> None:
    """Signal a process of ours; that it has ended by itself is fine."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)


def hold_source(seconds: float = 120.0) -> str:
    """A script that prints `holding` and waits, ending early only by a signal."""
    return (
        "import time\nprint('holding', flush=True)\n"
        f"end = time.monotonic() + {seconds}\nwhile time.monotonic() < end:\n    time.sleep(0.05)\n"
    )
