"""A running gang notices nothing of the death of any other part: same attempt, and its log byte for byte.

One job lives through everything in turn, for the faults must not add up to one either. It writes until it is released,
so it outlasts them on a machine of any speed.
"""

from __future__ import annotations

import os
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.support.evidence import WRITER, Evidence, assert_log_is_evidence, gang
from tests.support.follower import Follower
from tests.support.stack import TEST_SECONDS, Stack, kill
from tests.support.wait import stays_true, wait_until

SETTINGS = {"UNREACHABLE_SECONDS": "6", "LOST_SECONDS": "12"}
API_DOWN_SECONDS = 37.0
RANKS = range(4)
pytestmark = pytest.mark.timeout(TEST_SECONDS)


class Ordeal:
    """One pool with one running gang of four ranks on two nodes, and a third slot on each node for small jobs."""

    def __init__(self, stack: Stack, evidence: Evidence) -> None:
        self.stack = stack
        self.evidence = evidence
        self.job_id = stack.python_job(WRITER, **gang(evidence))
        stack.wait_state(self.job_id, "running")
        for rank in RANKS:
            stack.wait_log(self.job_id, "\n", rank)
        self.attempt_id = stack.job(self.job_id)["attempt"]["id"]

    def assert_goes_on(self) -> None:
        """The same attempt runs on, its new lines get stored, and the pool still starts other jobs."""
        for rank in RANKS:
            size = len(self.stack.log_bytes(self.job_id, rank))
            wait_until(partial(self._has_more, rank, size), 60, f"rank {rank} gets no more log than its {size} bytes")
        job = self.stack.job(self.job_id)
        assert (job["state"], job["attempt"]["id"]) == ("running", self.attempt_id), self.stack.describe(self.job_id)
        probe = self.stack.submit(run={"command": "true"})
        assert self.stack.wait_end(probe)["state"] == "succeeded"

    def _has_more(self, rank: int, size: int) -> bool:
        return len(self.stack.log_bytes(self.job_id, rank)) > size

    def assert_keeps_writing(self) -> bool:
        """Whether the ranks have written something since the last call."""
        before = self.evidence.num_bytes()
        return wait_until(lambda: self.evidence.num_bytes() > before, 60, "the ranks have stopped writing")


def test_o30_a_running_gang_and_its_follower_survive_the_death_of_every_other_part(
    stack_database: str, tmp_path: Path
) -> None:
    with Stack(database_url=stack_database, slots=3, settings=SETTINGS) as stack:
        ordeal = Ordeal(stack, Evidence(tmp_path / "evidence"))
        with Follower(stack.url, stack.token, ordeal.job_id) as follower:
            kill_redis_and_lose_its_data(ordeal)
            kill_an_agent(ordeal)
            kill_a_celery_worker(ordeal)
            kill_the_api(ordeal)
            if stack.is_postgres:
                kill_the_scheduler(ordeal)
            take_the_api_down(ordeal)

            ordeal.evidence.release()
            job = stack.wait_end(ordeal.job_id)
            follower.join(timeout=120)

        assert (job["state"], job["attempts"]) == ("succeeded", 1), stack.describe(ordeal.job_id)
        written = ordeal.evidence.of_writer()
        assert_log_is_evidence({rank: stack.log_bytes(ordeal.job_id, rank) for rank in RANKS}, written)
        assert_log_is_evidence(follower.texts(), written)
        assert follower.end is not None and follower.end.state == "succeeded"
        assert follower.attempts == [1]


def test_o04_an_outage_of_the_api_does_not_use_up_the_time_to_claim(tmp_path: Path) -> None:
    """The attempt was allocated, then nobody could claim it for longer than a claim may take; nor can anybody for the
    first moment after it, since the agents are held by SIGSTOP."""
    claim_seconds = 10.0
    evidence = Evidence(tmp_path / "evidence")
    with Stack(has_proxies=True, settings={"CLAIM_SECONDS": str(claim_seconds)}) as stack:
        stack.cut(*stack.node_names)
        job_id = stack.python_job(WRITER, **gang(evidence))
        stack.wait_placed(job_id, *stack.node_names)
        assert stack.job(job_id)["state"] == "starting"
        stack.kill9("server")
        stack.heal(*stack.node_names)
        agents = [stack.processes[name].pid for name in stack.node_names]
        for pid in agents:
            os.kill(pid, signal.SIGSTOP)
        stays_true(lambda: "server" not in stack.processes, 1.5 * claim_seconds, "who started the API?")
        stack.start_server()
        stays_true(lambda: stack.job(job_id)["state"] == "starting", 1.0, "the outage is held against the attempt")
        for pid in agents:
            os.kill(pid, signal.SIGCONT)

        stack.wait_state(job_id, "running")
        evidence.release()
        job = stack.wait_end(job_id)

    assert (job["state"], job["attempts"]) == ("succeeded", 1)


def kill_redis_and_lose_its_data(ordeal: Ordeal) -> None:
    assert ordeal.stack.redis is not None
    ordeal.stack.redis.kill9()
    ordeal.assert_goes_on()
    ordeal.stack.redis.restart(keep_data=False)
    ordeal.assert_goes_on()


def kill_an_agent(ordeal: Ordeal) -> None:
    ordeal.stack.kill9("node-1")
    ordeal.stack.wait_node("node-1", "unreachable")
    ordeal.stack.start_agent("node-1")
    ordeal.stack.wait_node("node-1", "ready")
    assert ordeal.stack.adopted("node-1") == [ordeal.attempt_id]
    ordeal.assert_goes_on()


def kill_a_celery_worker(ordeal: Ordeal) -> None:
    pid = wait_until(lambda: ordeal.stack.status("node-2")["celery_pid"], 60, "the agent has no Celery child")
    kill(pid)
    wait_until(
        lambda: ordeal.stack.status("node-2")["celery_pid"] not in (None, pid), 60, "no other Celery child was started"
    )
    ordeal.assert_goes_on()


def kill_the_api(ordeal: Ordeal) -> None:
    ordeal.stack.kill9("server")
    ordeal.assert_keeps_writing()
    ordeal.stack.start_server()
    ordeal.assert_goes_on()


def kill_the_scheduler(ordeal: Ordeal) -> None:
    """A second one stands by, and takes over within the lease."""
    ordeal.stack.start_scheduler("standby")
    wait_until(lambda: "standby" in ordeal.stack.processes, 1, "the second scheduler did not start")
    ordeal.stack.kill9("scheduler")
    ordeal.assert_goes_on()
    ordeal.stack.start_scheduler()


def take_the_api_down(ordeal: Ordeal) -> None:
    """For several times as long as a node may be silent before it counts as lost. An agent that is a little late when
    it is back (held by SIGSTOP) shows that nothing of the outage is held against its node."""
    assert float(ordeal.stack.settings["LOST_SECONDS"]) * 3 < API_DOWN_SECONDS
    ordeal.stack.kill9("server")
    stays_true(ordeal.assert_keeps_writing, API_DOWN_SECONDS, "the ranks have stopped writing")
    late = ordeal.stack.processes["node-2"].pid
    os.kill(late, signal.SIGSTOP)
    ordeal.stack.start_server()
    # Several sweeps: whoever counted the outage would call it unreachable at the first. Its own silence counts since
    # the API came back, beside the second before the outage was noticed; after six of it, it is unreachable by right.
    stays_true(lambda: ordeal.stack.node("node-2")["state"] == "ready", 0.5, "the outage is held against a node")
    os.kill(late, signal.SIGCONT)
    ordeal.stack.wait_for_nodes()
    ordeal.assert_goes_on()
