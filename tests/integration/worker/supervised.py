"""A real supervisor for tests: an attempt folder as the agent leaves it, started through the nursery.

Ranks are real processes. What they did is read from evidence files that they write themselves, and from what the fake
service received; never from the supervisor's own files.
"""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path
from typing import Any

from gangline.protocol.launch import LaunchPlan, encode
from gangline.protocol.names import ENV_ATTEMPT, LAUNCH_FILE
from tests.integration.worker.fake_api import FakeApi, FakeAttempt
from tests.support.processes import RunningProcess, is_alive, processes_marked
from tests.support.wait import BUSY_SECONDS, wait_until
from worker.nursery import Nursery
from worker.state import AttemptState, marker, write_json, write_state


class Supervised:
    """One attempt on one node."""

    def __init__(
        self, data: Path, api: FakeApi, plan: LaunchPlan, nursery: Nursery, *, server: str | None = None
    ) -> None:
        self.api = api
        self.plan = plan
        self.mark = marker(plan.pool_id, plan.node_name, plan.attempt_id)
        self.folder = data / "attempts" / str(plan.attempt_id)
        self.folder.mkdir(mode=0o700, parents=True)
        self.attempt: FakeAttempt = api.place(plan)
        self.attempt.token = "gla_test"
        self.attempt.state = "claimed"
        self.pid: int | None = None
        self._nursery = nursery
        write_json(self.folder / LAUNCH_FILE, encode(plan))
        write_state(
            self.folder,
            AttemptState(
                attempt_id=plan.attempt_id,
                node_rank=plan.node_rank,
                token="gla_test",
                pool_id=plan.pool_id,
                node_name=plan.node_name,
                server=server or api.url,
                phase="claimed",
            ),
        )

    def start(self) -> Supervised:
        """Start the supervisor."""
        self.pid = self._nursery.spawn_supervisor(self.folder)
        return self

    def report(self, seconds: float = BUSY_SECONDS) -> dict[str, Any]:
        """Wait for the final report, and until nothing of the attempt is left on the node."""
        wait_until(lambda: self.attempt.reports, seconds, lambda: f"no report; supervisor.log: {self.log()}")
        self.until_gone(seconds)
        return self.attempt.reports[-1]

    def only_rank(self, seconds: float = BUSY_SECONDS) -> dict[str, Any]:
        """The report of the single rank."""
        (rank,) = self.report(seconds)["ranks"]
        return dict(rank)

    def until_gone(self, seconds: float = BUSY_SECONDS) -> None:
        """Wait until the supervisor has ended and its folder is removed."""
        wait_until(
            lambda: not self.is_running() and not self.folder.exists(), seconds, lambda: f"still here: {self.log()}"
        )

    def is_running(self) -> bool:
        """Whether the supervisor lives."""
        return self.pid is not None and is_alive(self.pid)

    def marked(self) -> list[RunningProcess]:
        """Living processes that carry this attempt's mark."""
        return processes_marked(ENV_ATTEMPT, self.mark)

    def output(self, rank: int = 0) -> bytes:
        """What the service has of a rank's log."""
        return bytes(self.attempt.streams.get(f"log/{rank}", b""))

    def log(self) -> str:
        """The supervisor's own log."""
        path = self.folder / "supervisor.log"
        return path.read_text(errors="replace") if path.exists() else "(removed)"

    def close(self) -> None:
        """End whatever a failed test left."""
        for pid in [process.pid for process in self.marked()] + ([self.pid] if self.is_running() else []):
            if pid is not None:
                with contextlib.suppress(ProcessLookupError):  # it ended meanwhile
                    os.kill(pid, signal.SIGKILL)
