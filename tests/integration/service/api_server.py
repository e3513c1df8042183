"""The service in this process behind a real loopback port, and a driver for it: users, nodes, jobs, supervisors.

No agent and no thread of the scheduler runs: tests drive every step by hand (`Api.place`, `Api.sweeper`, `Supervisor`),
so that nothing happens between two steps, and hardly any time passes by the service's clock, however slow the machine
is. One server serves a whole module; `Api.reset` empties its database.
Not for: real processes on nodes (`tests.support.stack`).
"""

from __future__ import annotations

import contextlib
import json
import threading
import uuid
from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations
from pathlib import Path
from typing import Any

import httpx
import pytest
import uvicorn
from sqlalchemy import delete, insert, select

from gangline.protocol.launch import NodeReport, encode
from gangline.protocol.names import API_PREFIX
from service.api.deps import AppState
from service.app import create_app, create_state
from service.auth.tokens import make_token
from service.db.leadership import take_lease
from service.db.tables import METADATA, allocations, gpus
from service.operations.api_presence import note_presence
from service.operations.manage_identity import add_member, create_team, create_token, create_user
from service.operations.sweep import Sweeper
from service.scheduler.cycle import run_cycle
from service.settings import Settings
from tests.support.steady_clock import SteadyClock, steady_time
from tests.support.wait import wait_until
from tests.unit.service.endings import rank

BODY_LIMIT = 64 * 1024
BUNDLE_LIMIT = 256 * 1024
IDENTITY = ("users", "teams", "memberships", "tokens", "pool", "leader_lease")
PEOPLE = {"root": ("main",), "ann": ("red",), "amy": ("red",), "bob": ("blue",)}
"""Users and their teams; `root` is an admin. Ann and Amy are of one team, Bob is of another."""


def settings_for(folder: Path, database_url: str, **more: Any) -> Settings:
    """Settings of a server whose threads the test plays itself."""
    limits = {"body_limit_bytes": BODY_LIMIT, "bundle_limit_bytes": BUNDLE_LIMIT, "free_space_limit_bytes": 1}
    return Settings(data_folder=folder, database_url=database_url, run_scheduler=False, port=0, **{**limits, **more})


@contextlib.contextmanager
def serve(state: AppState) -> Iterator[str]:
    """Serve a state on a loopback port in a thread; yields the URL, and closes everything."""
    server = uvicorn.Server(
        uvicorn.Config(create_app(state), port=0, log_level="error", access_log=False, timeout_graceful_shutdown=2)
    )
    thread = threading.Thread(target=server.run, name="api", daemon=True)
    thread.start()
    try:
        wait_until(lambda: server.started or not thread.is_alive(), 60, "the API does not start")
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        state.bus.close()
        server.should_exit = True
        thread.join(60)
        state.database.dispose()


@contextlib.contextmanager
def serve_people(state: AppState) -> Iterator[Api]:
    """Serve a state with the people of `PEOPLE`, by a clock that knows nothing of the machine's pauses."""
    with steady_time(state.database) as steady, serve(state) as url:
        yield Api(state, url, steady)


class Api:
    """A served state with the people of `PEOPLE`; everything is empty after `reset`."""

    def __init__(self, state: AppState, url: str, steady: SteadyClock) -> None:
        self.state = state
        self.url = url
        self._steady = steady
        self.database = state.database
        self.client = httpx.Client(base_url=url, timeout=30)
        self.tokens: dict[str, str] = {}
        self._identity: dict[str, list[dict[str, Any]]] = {}
        self._make_people()

    def _make_people(self) -> None:
        for name, teams in PEOPLE.items():
            create_user(self.database, name=name, is_admin=name == "root", actor="test")
            for team in teams:
                with contextlib.suppress(Exception):
                    create_team(self.database, name=team, actor="test")
                add_member(self.database, team=team, user=name, actor="test")
            self.tokens[name] = self.make_token(name)
        self.tokens["enrolment"] = self.make_token("root", kind="enrolment")
        self.epoch = take_lease(self.database, "test", lease_seconds=0.0)
        with self.database.read() as connection:
            for name in IDENTITY:
                self._identity[name] = [dict(row._mapping) for row in connection.execute(select(METADATA.tables[name]))]

    def make_token(self, user: str, kind: str = "user") -> str:
        """A further token of a user."""
        secret, _ = create_token(
            self.database, user=user, label="test", kind=kind, expires_in_seconds=None, actor="test"
        )
        return secret

    def reset(self) -> None:
        """Only the people are left, and it is now."""
        self._steady.catch_up()
        with self.database.write() as tx:
            for table in reversed(METADATA.sorted_tables):
                tx.connection.execute(delete(table))
            for name in IDENTITY:
                if rows := self._identity[name]:
                    tx.connection.execute(insert(METADATA.tables[name]), rows)
        self.state.principals.forget()
        self.state.shapes.get(refresh=True)
        with self.state.held.lock:
            self.state.held.drop()

    def snapshot(self) -> dict[str, list[tuple[Any, ...]]]:
        """Every row of every table, to see that nothing was changed; not the sign of life of the API itself."""
        with self.database.read() as connection:
            return {
                name: sorted((tuple(row) for row in connection.execute(select(table))), key=repr)
                for name, table in METADATA.tables.items()
                if name != "pool"
            }

    # --- requests --------------------------------------------------------------------------------------------------

    def request(self, method: str, path: str, who: str | None = "ann", **options: Any) -> httpx.Response:
        """One request below the prefix (`//x`: to `/x` itself), as one of the people or with a token."""
        headers = dict(options.pop("headers", {}))
        if who is not None:
            headers["Authorization"] = f"Bearer {self.tokens.get(who, who)}"
        full = path[1:] if path.startswith("//") else API_PREFIX + path
        return self.client.request(method, full, headers=headers, **options)

    def get(self, path: str, who: str = "ann", **options: Any) -> Any:
        """GET as JSON; anything but success is an error."""
        response = self.request("GET", path, who, **options)
        assert response.status_code == 200, (response.status_code, response.text)
        return response.json()

    def submit(self, who: str = "ann", **members: Any) -> int:
        """Submit a job; returns its id."""
        body = {"name": "test", "run": {"command": ["true"]}, **members}
        response = self.request("POST", "/jobs", who, json=body)
        assert response.status_code == 201, response.text
        return int(response.json()["id"])

    def train(self, who: str = "ann", **members: Any) -> int:
        """Submit a recipe; returns its id."""
        body = {"run": {"recipe": "mlp"}, "train": {"steps": 100}, **members}
        return self.submit(who, **body)

    def job(self, job_id: int, who: str = "root") -> dict[str, Any]:
        """A job as JSON."""
        found: dict[str, Any] = self.get(f"/jobs/{job_id}", who)
        return found

    def requeue(self, job_id: int, who: str = "ann", **body: Any) -> httpx.Response:
        """Requeue a job."""
        return self.request("POST", f"/jobs/{job_id}/requeue", who, json=body)

    def checkpoints(self, job_id: int, who: str = "ann") -> list[int]:
        """The steps of the checkpoints that count, the one to resume from first."""
        return [item["step"] for item in self.get(f"/jobs/{job_id}/checkpoints", who)["items"]]

    def cancel(self, job_id: int, who: str = "ann") -> httpx.Response:
        """Cancel a job."""
        return self.request("POST", f"/jobs/{job_id}/cancel", who, json={"reason": "enough"})

    # --- the parts that the test plays -----------------------------------------------------------------------------

    def node(self, name: str = "node-1", slots: int = 2, **more: Any) -> FakeNode:
        """Enrol a node and let it beat once."""
        node = FakeNode(self, name, slots, **more)
        node.beat()
        self.state.shapes.get(refresh=True)  # what a submission sees is otherwise up to a second old
        return node

    def place(self) -> int:
        """One pass of the scheduler; returns how many jobs it placed."""
        assert self.epoch is not None
        return run_cycle(self.database, self.state.settings, self.epoch)

    def sweeper(self) -> Sweeper:
        """A sweeper; tests call `sweep` with a clock of their own."""
        assert self.epoch is not None
        return SweeperOfPresentApi(self.database, self.state.settings, self.epoch)

    def start(self, job_id: int, *nodes: FakeNode) -> list[Supervisor]:
        """Place a job on these nodes, claim all parts and report all ranks started."""
        self.place()
        parts = [node.claim(self.attempt_id(job_id)) for node in nodes]
        for part in parts:
            part.started()
        return parts

    def attempt_id(self, job_id: int) -> int:
        """The open attempt of a job."""
        attempt = self.job(job_id)["attempt"]
        assert attempt is not None, self.job(job_id)
        return int(attempt["id"])

    def held_gpus(self) -> list[tuple[int, int]]:
        """Node and index of every GPU that an attempt holds."""
        with self.database.read() as connection:
            query = select(allocations.c.node_id, allocations.c.gpu_index).where(allocations.c.released_at.is_(None))
            return sorted((row.node_id, row.gpu_index) for row in connection.execute(query))

    def quarantined_gpus(self) -> list[str]:
        """Reasons of the GPUs that are set aside."""
        with self.database.read() as connection:
            query = select(gpus.c.quarantine_reason).where(gpus.c.quarantine_reason.is_not(None))
            return sorted(row.quarantine_reason for row in connection.execute(query))


class SweeperOfPresentApi(Sweeper):
    """An API is there at each sweep, even if the thread that says so comes late."""

    def sweep(self, monotonic_now: float) -> None:
        """See `Sweeper`."""
        note_presence(self.database)
        super().sweep(monotonic_now)


class FakeNode:
    """An agent, played by the test."""

    def __init__(self, api: Api, name: str, slots: int, *, cpus: float = 8.0, model: str = "cpu_slot") -> None:
        self.api = api
        self.name = name
        self.attempts: set[int] = set()
        self.process_sets: set[int] = set()
        answer = api.request("POST", "/agent/enrol", "enrolment", json={"name": name, "address": "127.0.0.1"})
        assert answer.status_code == 200, answer.text
        self.credential = str(answer.json()["credential"])
        devices = [
            {"index": index, "uuid": f"{name}-{index}", "kind": "cpu_slot", "model": model, "memory_bytes": 0}
            for index in range(slots)
        ]
        self.inventory: dict[str, Any] = {"cpus": cpus, "memory_bytes": 8 * 2**30, "gpus": devices}

    def heartbeat(self, **more: Any) -> dict[str, Any]:
        """The body of a heartbeat."""
        told = {"attempts": sorted(self.attempts), "process_sets": sorted(self.process_sets), "quarantined": {}}
        return {
            "incarnation": "i", "boot_id": "b", "version": "0", "inventory": self.inventory, **told, **more,
        }  # fmt: skip

    def beat(self, **more: Any) -> dict[str, Any]:
        """Send a heartbeat; returns the answer."""
        answer = self.api.request("POST", "/agent/heartbeat", self.credential, json=self.heartbeat(**more))
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def try_claim(self, attempt_id: int, token: str) -> httpx.Response:
        """Send a claim."""
        body = {"token": token, "incarnation": "i"}
        return self.api.request("POST", f"/agent/attempts/{attempt_id}/claim", self.credential, json=body)

    def claim(self, attempt_id: int) -> Supervisor:
        """Claim this node's part."""
        token = make_token("attempt")
        answer = self.try_claim(attempt_id, token)
        assert answer.status_code == 200, answer.text
        self.attempts.add(attempt_id)
        return Supervisor(self, attempt_id, answer.json(), token)


class Supervisor:
    """The supervisor of a claimed part, played by the test."""

    def __init__(self, node: FakeNode, attempt_id: int, plan: Mapping[str, Any], token: str) -> None:
        self.node = node
        self.api = node.api
        self.plan = plan
        self.token = token
        self.attempt_id = attempt_id
        self.base = f"/agent/attempts/{attempt_id}/nodes/{plan['node_rank']}"
        self.num_event_bytes = 0
        first = int(plan["first_rank"])
        self.ranks = list(range(first, first + int(plan["processes_per_node"])))

    def call(self, method: str, path: str, **options: Any) -> httpx.Response:
        """A request with the claim token."""
        return self.api.request(method, f"{self.base}/{path}", options.pop("token", self.token), **options)

    def directive(self) -> dict[str, Any]:
        """What the service wants now."""
        answer = self.call("GET", "directive")
        assert answer.status_code == 200, answer.text
        found: dict[str, Any] = answer.json()
        return found

    def started(self) -> httpx.Response:
        """All ranks run."""
        return self.call("POST", "started", json={"ranks": [], "sent_at": 0.0})

    def append(self, data: bytes, offset: int, *, kind: str = "log", rank_number: int | None = None) -> httpx.Response:
        """Send bytes of a stream."""
        number = self.ranks[0] if rank_number is None else rank_number
        return self.call("PUT", f"streams/{kind}/{number}?offset={offset}", content=data)

    def tell(self, *events: dict[str, Any]) -> httpx.Response:
        """Append records to the events of rank 0, as the trainer's lines come."""
        data = "".join(json.dumps({"seq": 1, "at": 1.0, **event}) + "\n" for event in events).encode()
        answer = self.append(data, self.num_event_bytes, kind="events", rank_number=0)
        if answer.status_code == 200:
            self.num_event_bytes += len(data)
        return answer

    def checkpoint(self, step: int, **more: Any) -> httpx.Response:
        """Tell of a complete checkpoint in the folder of this attempt."""
        path = f"attempt-{self.attempt_id}/step-{step:08}"
        return self.tell(
            {"kind": "checkpoint", "step": step, "path": path, "samples_seen": step * 32, "num_bytes": 1000, **more}
        )

    def report(self, code: int = 0, **more: Any) -> dict[str, Any]:
        """A node report in which every rank ended with `code`; further fields of rank or report as they are named."""
        of_report = {name: more.pop(name) for name in ("failure", "stop_intent", "leftovers", "result") if name in more}
        ended = NodeReport(
            ranks=tuple(rank(number, code, **more) for number in self.ranks),
            failure=of_report.get("failure"),
            stop_intent=of_report.get("stop_intent"),
            process_set_empty=True,
            leftovers=of_report.get("leftovers", ()),
            result=of_report.get("result"),
        )
        return encode(ended)

    def ended(self, code: int = 0, **more: Any) -> httpx.Response:
        """The process set is empty; once that is accepted, the agent forgets the attempt."""
        answer = self.call("POST", "ended", content=json.dumps(self.report(code, **more)))
        if answer.status_code == 200:
            self.node.attempts.discard(self.attempt_id)
        return answer


def new_state(folder: Path, database_url: str, **more: Any) -> AppState:
    """A state over a database of its own data folder."""
    return create_state(settings_for(folder / uuid.uuid4().hex[:8], database_url, **more))


def in_every_order(events: Sequence[str]) -> list[Any]:
    """All orders as parameters; `make test` runs every eighth of them."""
    return [
        pytest.param(order, id="-".join(order), marks=() if number % 8 == 0 else pytest.mark.full)
        for number, order in enumerate(permutations(events))
    ]
