"""Start, watch and stop the processes of a local pool. Not for: what `gang up` prints (`service.up.command`)."""

from __future__ import annotations

import json
import os
import shutil
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from gangline.protocol.names import ENV_BROKER_URL
from service.errors import SettingsError
from service.first_start import ADMIN_TOKEN_FILE, ENROLMENT_TOKEN_FILE, write_private
from service.serve import SERVER_FILE, SHUTDOWN_GRACE_SECONDS
from service.settings import ENV_PREFIX
from service.up.child import Child
from service.up.redis_server import find_redis_server, redis_command

UP_FILE = "up.json"
SHARED_FOLDER = "shared"
"""Below the data folder: all local agents see it, so a job finds its checkpoints on each of them."""
START_SECONDS = 30.0
SETTINGS_REFUSED = 2
DRAIN_SECONDS = SHUTDOWN_GRACE_SECONDS + 10.0


@dataclass(frozen=True, kw_only=True)
class PoolOptions:
    """What `gang up` was asked for."""

    data_folder: Path
    host: str
    port: int
    num_nodes: int
    slots: int
    has_broker: bool


@dataclass
class LocalPool:
    """The processes of a local pool, in starting order."""

    options: PoolOptions
    server: Child
    broker: Child | None
    agents: list[Child]
    socket_folder: Path
    url: str = ""
    tell: Callable[[str], None] = field(default=lambda text: None)

    @property
    def children(self) -> list[Child]:
        """All parts."""
        return [child for child in (self.broker, self.server, *self.agents) if child is not None]

    def start(self) -> None:
        """Broker, API, agents. Raises SettingsError when the API refuses to start; what was started is stopped then."""
        if self.broker is not None:
            self.broker.start()
        self.server.start()
        self.url = self._wait_for_server()
        # Started again it must be where its agents and users look for it, also when the port was chosen freely.
        port = self.url.rsplit(":", 1)[1]
        self.server.environment = {**self.server.environment, f"{ENV_PREFIX}PORT": port}
        for agent in self.agents:
            agent.argv = [*agent.argv, "--server", self.url]
            agent.start()
        self._wait_for_nodes()
        self.write_state()

    def write_state(self) -> None:
        """Tell others what runs: `up.json`."""
        facts = {
            "url": self.url,
            "admin_token_file": str(self.options.data_folder / ADMIN_TOKEN_FILE),
            "pids": {child.name: child.pid for child in self.children},
            "pid": os.getpid(),
        }
        write_private(self.options.data_folder / UP_FILE, json.dumps(facts, indent=2) + "\n")

    def watch(self) -> None:
        """Restart what has died."""
        is_changed = False
        for child in self.children:
            was_dead = child.process is None
            code = child.restart_if_dead()
            if code is not None:
                self.tell(f"{child.name} ended ({code}); starting it again. Its log: {child.log_path}")
            is_changed = is_changed or (was_dead and child.process is not None)
        if is_changed:
            self.write_state()

    def drain(self) -> Iterator[int]:
        """Stop all jobs and put them back into the queue; yields how many attempts still run here, until none does."""
        self.server.send(signal.SIGUSR1)
        deadline = time.monotonic() + DRAIN_SECONDS
        quiet_since: float | None = None
        while time.monotonic() < deadline:
            num_left = self.num_attempts()
            now = time.monotonic()
            quiet_since = None if num_left else (quiet_since or now)
            # A claim on its way when the pool was cordoned shows its folder a moment later.
            if quiet_since is not None and now - quiet_since >= 0.3:
                return
            yield num_left
            time.sleep(0.05)

    def num_attempts(self) -> int:
        """Attempts that have a folder on one of the local nodes."""
        return sum(
            1
            for agent in range(1, self.options.num_nodes + 1)
            for _ in (node_folder(self.options, agent) / "attempts").glob("[0-9]*")
        )

    def stop(self) -> None:
        """Agents, API, Redis; then the socket."""
        for agent in self.agents:
            agent.send(signal.SIGTERM)
        for child in (*self.agents, self.server, self.broker):
            if child is not None:
                child.stop()
        shutil.rmtree(self.socket_folder, ignore_errors=True)
        (self.options.data_folder / UP_FILE).unlink(missing_ok=True)

    def _wait_for_server(self) -> str:
        deadline = time.monotonic() + START_SECONDS
        path = self.options.data_folder / SERVER_FILE
        while time.monotonic() < deadline:
            code = self.server.process.poll() if self.server.process else None
            if code is not None:
                tail = self.server.log_tail()
                self.stop()
                if code == SETTINGS_REFUSED:
                    raise SettingsError(tail.rsplit("\n\n", 1)[-1])
                raise SettingsError(f"the server ended with exit code {code}:\n{tail}")
            url = _read_url(path, self.server.pid)
            if url is not None and _answers(f"{url}/readyz"):
                return url
            time.sleep(0.02)
        self.stop()
        raise SettingsError(f"the server was not ready within {START_SECONDS:g} s. Its log: {self.server.log_path}")

    def _wait_for_nodes(self) -> None:
        token = (self.options.data_folder / ADMIN_TOKEN_FILE).read_text().strip()
        deadline = time.monotonic() + START_SECONDS
        while time.monotonic() < deadline:
            if _ready_nodes(self.url, token) >= self.options.num_nodes:
                return
            for agent in self.agents:
                agent.restart_if_dead()
            time.sleep(0.05)
        tails = "\n".join(agent.log_tail(600) for agent in self.agents)
        self.stop()
        raise SettingsError(f"the agents did not join within {START_SECONDS:g} s:\n{tails}")


def node_folder(options: PoolOptions, number: int) -> Path:
    """Data folder of the local agent `number` (from 1)."""
    return options.data_folder / "nodes" / f"node-{number}"


def build_pool(options: PoolOptions, environment: dict[str, str]) -> LocalPool:
    """The processes as they will be started. Reads the file system, starts nothing."""
    logs = options.data_folder / "logs"
    logs.mkdir(parents=True, exist_ok=True, mode=0o700)
    shared = options.data_folder / SHARED_FOLDER
    shared.mkdir(exist_ok=True, mode=0o700)
    socket_folder = Path(tempfile.mkdtemp(prefix="gl-up-"))
    broker_url = ""
    broker = None
    binary = find_redis_server() if options.has_broker else None
    if binary is not None:
        redis_folder = options.data_folder / "redis"
        redis_folder.mkdir(exist_ok=True, mode=0o700)
        socket_path = socket_folder / "redis.sock"
        broker = Child("redis", redis_command(binary, socket_path, redis_folder), environment, logs / "redis.log")
        broker_url = f"redis+socket://{socket_path}"
    server_environment = {
        **environment,
        f"{ENV_PREFIX}DATA_FOLDER": str(options.data_folder),
        f"{ENV_PREFIX}HOST": options.host,
        f"{ENV_PREFIX}PORT": str(options.port),
        f"{ENV_PREFIX}BROKER_URL": broker_url,
    }
    python = (sys.executable, "-P", "-m")
    server = Child("server", (*python, "service.serve"), server_environment, logs / "server.log")
    (options.data_folder / SERVER_FILE).unlink(missing_ok=True)
    agent_environment = {key: value for key, value in environment.items() if not key.startswith(ENV_PREFIX)}
    if broker_url:
        # By environment: arguments are seen by every user of the machine.
        agent_environment[ENV_BROKER_URL] = broker_url
    agents = []
    for number in range(1, options.num_nodes + 1):
        folder = node_folder(options, number)
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        argv = [
            *python,
            "worker",
            "agent",
            "--data",
            str(folder),
            "--name",
            f"node-{number}",
            "--slots",
            str(options.slots),
            "--enrolment-token-file",
            str(options.data_folder / ENROLMENT_TOKEN_FILE),
            "--shared-folder",
            str(shared),
        ]
        agents.append(Child(f"node-{number}", argv, agent_environment, logs / f"node-{number}.log"))
    return LocalPool(options, server, broker, agents, socket_folder)


def _read_url(path: Path, pid: int | None) -> str | None:
    try:
        facts = json.loads(path.read_text())
    except (FileNotFoundError, json.JSONDecodeError):
        return None
    return str(facts["url"]) if facts.get("pid") == pid else None


def _answers(url: str) -> bool:
    try:
        with urllib.request.urlopen(url, timeout=2) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def _ready_nodes(url: str, token: str) -> int:
    request = urllib.request.Request(f"{url}/api/v1/nodes", headers={"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=2) as answer:
            items = json.loads(answer.read())["items"]
    except (urllib.error.URLError, OSError):
        return 0
    return sum(item["state"] == "ready" for item in items)
