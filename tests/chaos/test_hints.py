"""Hints may be lost, repeated or late, and Redis may lose everything: every job still runs once, and all end.

What ran is read from a file to which the jobs themselves append (O_APPEND): one line for each process that ever was.
"""

from __future__ import annotations

from collections import Counter
from functools import partial
from pathlib import Path

import httpx
import pytest

from gangline.protocol.names import LAUNCH_TASK, node_queue
from service.events.dispatcher import make_producer_app
from tests.support.evidence import WRITER, Evidence, assert_log_is_evidence, gang
from tests.support.redis import RedisServer
from tests.support.stack import TEST_SECONDS, Stack, kill
from tests.support.tampering import Tamperer
from tests.support.wait import wait_until

pytestmark = pytest.mark.timeout(TEST_SECONDS)
NUM_ATTEMPTS = 60
NO_ATTEMPT = 424242
MARK = 'echo "$GANGLINE_ATTEMPT $$" >> "$EVIDENCE/ran"; sleep 0.2'
ORDER = 'echo "$GANGLINE_JOB_ID" >> "$EVIDENCE/ran"'


@pytest.fixture(params=["sqlite", pytest.param("postgresql", marks=pytest.mark.full)])
def hints_database(request: pytest.FixtureRequest) -> str:
    """`database_url` of a pool; hints work the same on both."""
    return "" if request.param == "sqlite" else str(request.getfixturevalue("postgres_server").fresh_database())


def submit_marks(stack: Stack, evidence: Evidence, num_jobs: int, command: str = MARK) -> list[int]:
    """Submit so many jobs of a fraction of a second that leave one line each."""
    return [stack.submit(run={"command": command}, env=evidence.env) for _ in range(num_jobs)]


def assert_each_ran_once(stack: Stack, evidence: Evidence, jobs: list[int]) -> None:
    """All jobs end well, by as many processes as there were attempts, each of another attempt."""
    ended = [stack.wait_end(job_id) for job_id in jobs]
    assert Counter(job["state"] for job in ended) == {"succeeded": len(jobs)}
    ran = Counter(line.split()[0].rpartition("/")[2] for line in evidence.lines("ran"))
    assert [attempt for attempt, times in ran.items() if times > 1] == [], "an attempt ran twice"
    assert sum(ran.values()) == len(jobs), "a job was lost, or ran in more than one attempt"
    assert [job["attempts"] for job in ended] == [1] * len(jobs)


def has_run(evidence: Evidence, num_jobs: int) -> bool:
    """Whether so many lines were left."""
    return len(evidence.lines("ran")) >= num_jobs


def celery_pid(stack: Stack, node: str) -> int:
    """Pid of the Celery worker of a node's agent."""
    return int(wait_until(lambda: stack.status(node)["celery_pid"], 60, f"{node} has no Celery worker"))


def test_o13_sixty_attempts_with_tripled_and_lost_hints_run_once_each(
    hints_database: str, redis_server: RedisServer, tmp_path: Path
) -> None:
    """On the way Redis is killed with its data, on both sides of the carrier, and a Celery worker too."""
    evidence = Evidence(tmp_path / "evidence")
    with Stack(database_url=hints_database, slots=4, server_broker=redis_server) as stack:
        assert stack.redis is not None
        with Tamperer(redis_server, stack.redis, stack.node_names) as tamperer:
            wait_until_heard(stack)
            jobs = submit_marks(stack, evidence, NUM_ATTEMPTS // 2)

            wait_until(partial(has_run, evidence, NUM_ATTEMPTS // 4), 120, "the jobs do not start")
            # The proof that hints were lost, and arrived thrice: claims dropped the rest. It is taken here since the
            # next hints may all be lost with Redis, and jobs do not wait for them.
            wait_until(lambda: tamperer.num_lost >= 5, 120, lambda: f"only {tamperer.num_taken} hints were sent")
            wait_until(lambda: num_duplicates(stack) >= 20, 120, lambda: f"only {num_duplicates(stack)} came again")
            jobs += submit_marks(stack, evidence, NUM_ATTEMPTS // 2)
            redis_server.restart(keep_data=False)
            stack.redis.restart(keep_data=False)
            at_least = NUM_ATTEMPTS // 2 + 1
            wait_until(partial(has_run, evidence, at_least), 120, "no job starts after the loss of Redis")
            kill(celery_pid(stack, "node-1"))

            assert_each_ran_once(stack, evidence, jobs)


def wait_until_heard(stack: Stack) -> None:
    """Until every node hears hints: its Celery worker takes seconds to start, in which jobs start by heartbeat."""
    for name in stack.node_names:
        celery_pid(stack, name)
        ring(stack, name, NO_ATTEMPT)
        wait_until(partial(num_received, stack, name), 120, f"{name} hears no hint")


def num_received(stack: Stack, node: str) -> int:
    """Hints that a node's agent has heard."""
    return int(stack.status(node)["hints"]["received"])


def num_duplicates(stack: Stack) -> int:
    """Hints that came again, or for what is not there."""
    return sum(int(stack.status(name)["hints"]["duplicates"]) for name in stack.node_names)


def test_o25_redis_restarts_again_and_again_and_jobs_start_before_during_and_after(tmp_path: Path) -> None:
    evidence = Evidence(tmp_path / "evidence")
    with Stack() as stack:
        assert stack.redis is not None
        jobs = []
        for _ in range(3):
            jobs += submit_marks(stack, evidence, 2)
            stack.redis.kill9()
            jobs += submit_marks(stack, evidence, 2)
            wait_until(lambda: hints_health(stack) == "failing", 120, "/readyz does not say that hints fail")
            stack.redis.start()
        jobs += submit_marks(stack, evidence, 2)

        assert_each_ran_once(stack, evidence, jobs)
        # Hints work again, and are consumed: without that, jobs would start by heartbeat only.
        before = sum(num_received(stack, name) for name in stack.node_names)

        def is_rung() -> bool:
            stack.wait_end(stack.submit(run={"command": "true"}))
            after = sum(num_received(stack, name) for name in stack.node_names)
            return after > before and hints_health(stack) == "ok"

        wait_until(is_rung, 180, "no hint arrives any more after Redis came back")


def hints_health(stack: Stack) -> str:
    """What `/readyz` says of the hints."""
    return str(httpx.get(f"{stack.url}/readyz", timeout=60).json()["hints"])


def test_o26_a_flushed_redis_loses_nothing_and_keeps_the_order(tmp_path: Path) -> None:
    """One slot only, so that the order is the queue's own; hints for all of them are flushed away again and again."""
    evidence = Evidence(tmp_path / "evidence")
    with Stack(num_nodes=1, slots=1) as stack:
        assert stack.redis is not None
        jobs = submit_marks(stack, evidence, 10, ORDER)
        for count in range(1, 11):
            assert stack.redis.command("FLUSHALL") == "+OK"
            wait_until(partial(has_run, evidence, count), 120, f"job {count} does not run")

        assert [stack.wait_end(job_id)["state"] for job_id in jobs] == ["succeeded"] * 10
        assert [int(line) for line in evidence.lines("ran")] == jobs


def test_o27_an_agent_killed_during_a_job_adopts_it(tmp_path: Path) -> None:
    evidence = Evidence(tmp_path / "evidence")
    with Stack(settings={"UNREACHABLE_SECONDS": "2"}) as stack:
        job_id = stack.python_job(WRITER, **gang(evidence))
        running = stack.wait_state(job_id, "running")
        attempt_id = running["attempt"]["id"]
        ranks = stack.marked(attempt_id)

        stack.kill9("node-1")
        stack.wait_node("node-1", "unreachable")
        stack.start_agent("node-1")
        stack.wait_node("node-1", "ready")

        assert stack.adopted("node-1") == [attempt_id]
        assert stack.marked(attempt_id) == ranks
        evidence.release()
        job = stack.wait_end(job_id)
        assert (job["state"], job["attempts"]) == ("succeeded", 1)
        assert_log_is_evidence({rank: stack.log_bytes(job_id, rank) for rank in range(4)}, evidence.of_writer())


def test_o13_a_forged_hint_starts_nothing(tmp_path: Path) -> None:
    """Whoever can write to Redis can ring for attempts that are not there, or not this node's: the claim refuses."""
    evidence = Evidence(tmp_path / "evidence")
    with Stack() as stack:
        assert stack.redis is not None
        job_id = stack.python_job(WRITER, **gang(evidence, nodes=1))
        running = stack.wait_state(job_id, "running")
        (used,) = [node["name"] for node in running["attempt"]["nodes"]]
        (other,) = set(stack.node_names) - {used}
        celery_pid(stack, other)

        ring(stack, other, running["attempt"]["id"], NO_ATTEMPT)
        wait_until(lambda: stack.status(other)["hints"]["duplicates"] >= 2, 120, "the rings did not arrive")

        assert stack.attempts_on(other) == []
        evidence.release()
        assert stack.wait_end(job_id)["attempts"] == 1
        assert sorted(evidence.of_writer()) == [0, 1]


def ring(stack: Stack, node: str, *attempt_ids: int) -> None:
    """Send hints as the service does, from outside of it."""
    assert stack.redis is not None
    app = make_producer_app(stack.redis.url)
    for attempt_id in attempt_ids:
        app.send_task(LAUNCH_TASK, args=[attempt_id], queue=node_queue(node), ignore_result=True)
