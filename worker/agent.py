"""The agent of a node: one process a node that keeps the service and this node's processes in agreement.

It owns the heartbeat, the doorbell, the nursery of supervisors and the Celery child. All of that in one thread and one
loop, which sleeps in `select` until a ring, the end of a child, a signal or the next heartbeat. It holds nothing that
matters in memory: killed at any moment, its next start adopts what runs here by the state files. Stopping it stops no
job.

Not for: deciding (`worker.reconcile`), ranks (`worker.supervisor`), which attempt runs where (the service).
"""

from __future__ import annotations

import fcntl
import os
import random
import selectors
import time
import uuid
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Final

from gangline.protocol.launch import encode
from gangline.protocol.names import DATA_FOLDER_MARKER
from worker.agent_log import log
from worker.api import ApiError, HeartbeatAnswer, NodeApi
from worker.celery_child import CeleryChild
from worker.credential import AgentError, Credential
from worker.doorbell import Doorbell, parse_message
from worker.enrolment import LONGEST_RETRY_SECONDS, AgentSettings, node_credential, retry_delay
from worker.gpu_use import UseMeter, meter_for
from worker.local_attempts import ATTEMPTS_FOLDER, LocalAttempts, Start
from worker.nursery import Nursery
from worker.process_set import marked_attempts
from worker.reconcile import Answer, Observed, SupervisorState, reconcile
from worker.shared_folder import verify_shared_folder
from worker.state import SharedFolder, current_boot_id, write_json
from worker.wake import Wake

LOCK_FILE: Final = "agent.lock"
STATUS_FILE: Final = "status.json"
"""Counters and pids of the running agent, for people and tests. Nothing reads it to decide."""
SHORTEST_INTERVAL_SECONDS: Final = 0.1
"""Whatever the service says, heartbeats come no faster."""
IDLE_SCAN_SECONDS: Final = 30.0
"""With no attempt here there is nothing to find, so processes are looked at this seldom."""


@dataclass(kw_only=True)
class HintCounters:
    """Rings of the doorbell since the agent's start."""

    received: int = 0
    duplicates: int = 0
    """For attempts that were here already, or are not this node's."""
    dropped: int = 0
    """Not one of our messages."""


def run_agent(settings: AgentSettings) -> int:
    """Run until SIGTERM or SIGINT; returns the exit code. Raises AgentError when the agent cannot run as asked."""
    data = settings.data.absolute()
    data.mkdir(mode=0o700, parents=True, exist_ok=True)
    (data / DATA_FOLDER_MARKER).touch(0o600)
    with open(data / LOCK_FILE, "ab") as lock, Wake() as wake:
        _take_lock(lock.fileno(), data)
        offered = settings.inventory.read()
        inventory = encode(offered)
        shared = None if settings.shared_folder is None else verify_shared_folder(settings.shared_folder)
        inventory["shared_folder_id"] = None if shared is None else shared.folder_id
        # Before enrolment, so that it is loaded by the time that the first attempt comes.
        with Nursery() as nursery:
            credential = node_credential(settings, data, wake)
            if credential is None:
                return 0
            agent = Agent(
                data=data,
                credential=credential,
                inventory=inventory,
                meter=meter_for(offered.gpus, settings.nvml, data / ATTEMPTS_FOLDER),
                shared_folder=shared,
                broker_url=settings.broker_url,
                nursery=nursery,
                wake=wake,
            )
            agent.run()
    return 0


class Agent:
    """The loop. Made once the node is enrolled."""

    def __init__(
        self,
        *,
        data: Path,
        credential: Credential,
        inventory: dict[str, object],
        meter: UseMeter,
        shared_folder: SharedFolder | None,
        broker_url: str | None,
        nursery: Nursery,
        wake: Wake,
    ) -> None:
        self._data = data
        self._credential = credential
        self._inventory = inventory
        self._meter = meter
        self._shared_folder = shared_folder
        self._wake = wake
        self._incarnation = str(uuid.uuid4())
        self._boot_id = current_boot_id()
        self._version = version("gangline")
        self._api = NodeApi(credential.server, credential.credential)
        self._attempts = LocalAttempts(
            data=data,
            credential=credential,
            incarnation=self._incarnation,
            api=self._api,
            spawner=nursery,
            shared_folder=shared_folder,
        )
        self._doorbell = Doorbell(data)
        self._celery = (
            None
            if broker_url is None
            else CeleryChild(
                broker_url=broker_url, node_name=credential.node_name, doorbell=self._doorbell.path, folder=data
            )
        )
        self._hints = HintCounters()
        self._failures = 0
        self._interval_seconds = LONGEST_RETRY_SECONDS
        """As the service told last."""
        self._is_expecting = True
        """Whether processes of attempts may live here: some did at the last look, or something was started since."""
        self._process_sets: frozenset[int] = frozenset()
        self._scan_due_at = 0.0
        self._heartbeat_due_at = 0.0
        self._status: dict[str, object] = {}

    def run(self) -> None:
        """Until asked to stop. Jobs go on under their supervisors afterwards."""
        log(
            "agent_started",
            node=self._credential.node_name,
            pool=self._credential.pool_id,
            server=self._credential.server,
            incarnation=self._incarnation,
            pid=os.getpid(),
            shared_folder=None if self._shared_folder is None else self._shared_folder.path,
        )
        self._log_adopted()
        with selectors.DefaultSelector() as selector:
            selector.register(self._wake, selectors.EVENT_READ)
            selector.register(self._doorbell, selectors.EVENT_READ)
            try:
                while not self._wake.is_stopping:
                    self._turn(selector)
            finally:
                if self._celery is not None:
                    self._celery.stop()
                self._doorbell.close()
                self._api.close()
        log(
            "agent_stopped",
            node=self._credential.node_name,
            started_attempts=self._attempts.started,
            hints=self._hints.received,
        )

    def _turn(self, selector: selectors.BaseSelector) -> None:
        now = time.monotonic()
        if self._celery is not None:
            self._celery.poll(now)
        if now >= self._heartbeat_due_at:
            self._heartbeat(now)
        self._write_status()
        if self._wake.is_stopping:
            return
        dues = [self._heartbeat_due_at]
        if self._celery is not None and self._celery.due_at is not None:
            dues.append(self._celery.due_at)
        selector.select(max(0.0, min(dues) - time.monotonic()))
        self._wake.clear()
        self._answer_doorbell()

    def _log_adopted(self) -> None:
        for attempt in self._attempts.observe(time.monotonic()):
            if attempt.supervisor is SupervisorState.ALIVE:
                log("adopted_attempt", attempt_id=attempt.attempt_id, phase=attempt.phase)

    # --- Doorbell ----------------------------------------------------------------------------------------------------

    def _answer_doorbell(self) -> None:
        for message in self._doorbell.messages():
            self._hints.received += 1
            attempt_id = parse_message(message)
            if attempt_id is None:
                self._hints.dropped += 1
                log("dropped_hint", message=message, dropped=self._hints.dropped)
                continue
            result = self._attempts.start(attempt_id, time.monotonic())
            self._hints.duplicates += result in (Start.DUPLICATE, Start.NOT_OURS)
            log("answered_hint", attempt_id=attempt_id, result=result, duplicates=self._hints.duplicates)
            self._is_expecting = True

    # --- Heartbeat ---------------------------------------------------------------------------------------------------

    def _heartbeat(self, now: float) -> None:
        """Say what lives here, hear what is wanted, and bring the two together. Without an answer only what can be
        known here is acted on, and jobs are left alone."""
        observed = self._observe(now)
        answer = Answer()
        try:
            heard = self._api.heartbeat(
                incarnation=self._incarnation,
                boot_id=self._boot_id,
                version=self._version,
                inventory=self._inventory,
                attempts=[attempt.attempt_id for attempt in observed.attempts],
                process_sets=observed.process_sets,
                quarantined={},
                gpu_use=[asdict(use) for use in self._meter.read(now)],
            )
            answer = self._hear(heard)
            self._interval_seconds = max(heard.interval_seconds, SHORTEST_INTERVAL_SECONDS)
            self._heartbeat_due_at = now + self._interval_seconds
        except ApiError as error:
            self._failures += 1
            # A service that is back counts silence from then on: a node must not be later than it is told to be.
            delay_seconds = retry_delay(self._failures, random.random(), longest_seconds=self._interval_seconds)
            self._heartbeat_due_at = time.monotonic() + delay_seconds
            # What happened meanwhile to processes here is worth a fresh look once the service answers again.
            self._scan_due_at = 0.0
            log("heartbeat_failed", failures=self._failures, retry_in_seconds=round(delay_seconds, 2), error=error)
        actions = reconcile(observed, answer)
        for action in actions:
            self._attempts.apply(action, now)
        self._is_expecting = bool(observed.attempts or observed.process_sets or actions)

    def _observe(self, now: float) -> Observed:
        # Processes before folders, see Observed.
        if self._is_expecting or now >= self._scan_due_at:
            self._process_sets = marked_attempts(self._credential.pool_id, self._credential.node_name)
            self._scan_due_at = now + IDLE_SCAN_SECONDS
        return Observed(attempts=self._attempts.observe(now), process_sets=self._process_sets)

    def _hear(self, heard: HeartbeatAnswer) -> Answer:
        if heard.pool_id != self._credential.pool_id:
            raise AgentError(
                f"{self._credential.server} is pool {heard.pool_id}, but {self._data} belongs to node "
                f"{self._credential.node_name!r} of pool {self._credential.pool_id}. Fix: check --server, or give "
                "--data another folder and enrol the node there."
            )
        if self._failures:
            log("heartbeat_recovered", failures=self._failures)
        self._failures = 0
        return Answer(launch=heard.launch, fenced=frozenset(heard.fenced))

    def _write_status(self) -> None:
        status: dict[str, object] = {
            "pid": os.getpid(),
            "node_name": self._credential.node_name,
            "incarnation": self._incarnation,
            "doorbell": str(self._doorbell.path),
            "celery_pid": None if self._celery is None else self._celery.pid,
            "hints": asdict(self._hints),
            "started_attempts": self._attempts.started,
            "shared_folder": None if self._shared_folder is None else asdict(self._shared_folder),
            "is_connected": self._failures == 0,
        }
        if status == self._status:
            return
        try:
            write_json(self._data / STATUS_FILE, status)
        except OSError as error:
            log("status_not_written", error=error)
        self._status = status


# --- Before the loop -------------------------------------------------------------------------------------------------


def _take_lock(lock: int, data: Path) -> None:
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise AgentError(
            f"Another agent already runs on {data}. Fix: stop it, or give this one a folder of its own by --data."
        ) from error
