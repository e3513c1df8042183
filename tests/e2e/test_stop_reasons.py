"""Why a job was stopped is data: its ranks read it, the API tells it, and what follows is decided by it alone.

Every stop here sends the same signal to the same script, which ends with exit code 0 each time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest

from tests.support.stack import PYTHON, TEST_SECONDS, Stack
from tests.support.wait import wait_until

pytestmark = pytest.mark.timeout(TEST_SECONDS)
LIMIT = "20s"
"""Counts from the start of the rank's process, which must have come to listen to its signal by then."""
SOURCE = (
    "import os, signal, time\n"
    "from gangline import stop_reason\n"
    "is_told = []\n"
    "signal.signal(signal.SIGTERM, lambda *_: is_told.append(True))\n"
    "print('holding', os.environ['GANGLINE_START_REASON'], flush=True)\n"
    "while not is_told:\n    time.sleep(0.02)\n"
    "print('stopped for', stop_reason(), flush=True)\n"
)


@pytest.fixture(scope="module")
def ann(pool: Stack) -> str:
    """The token of a user who is no admin."""
    for path, body in (("/users", {"name": "ann"}), ("/teams", {"name": "red"})):
        assert pool.request("POST", path, json=body).status_code == 201
    assert pool.request("PUT", "/teams/red/members/ann").is_success
    answer = pool.request("POST", "/tokens", json={"user": "ann", "label": "test"})
    return str(answer.json()["token"])


@pytest.fixture
def drained_node_back(pool: Stack) -> Iterator[None]:
    yield
    for name in pool.node_names:
        assert pool.request("POST", f"/nodes/{name}/resume", json={}).is_success


def as_user(pool: Stack, token: str, path: str, **body: Any) -> dict[str, Any]:
    answer = pool.request("POST", path, json=body, headers={"Authorization": f"Bearer {token}"})
    assert answer.is_success, answer.text
    told: dict[str, Any] = answer.json()
    return told


def hold(pool: Stack, token: str, **members: Any) -> int:
    """A job of Ann's that holds a slot until it is told to stop."""
    spec = {"name": "test", "code": {"path": str(pool.code(SOURCE))}, "python": PYTHON, "run": {"script": "main.py"}}
    job_id = int(as_user(pool, token, "/jobs", **spec, **members)["id"])
    pool.wait_log(job_id, "holding submitted")
    return job_id


def last_stop(pool: Stack, job_id: int, attempt: int = 1) -> str:
    """The reason that the ranks of an attempt read."""

    def told() -> str:
        return pool.log_bytes(job_id, attempt=attempt).decode().partition("stopped for ")[2].strip()

    return wait_until(told, 120, lambda: f"it was not told why: {pool.describe(job_id)}")


def test_o24_each_reason_to_stop_is_data_and_ends_in_its_own_way_and_only_preemption_and_drain_requeue(
    pool: Stack, ann: str, drained_node_back: None
) -> None:
    limited = hold(pool, ann, resources={"time": LIMIT})
    cancelled, stopped_by_admin, preempted = (hold(pool, ann) for _ in range(3))

    as_user(pool, ann, f"/jobs/{cancelled}/cancel", reason="enough")
    pool.request("POST", f"/jobs/{stopped_by_admin}/cancel", json={"reason": "smoke"})
    as_user(pool, ann, f"/jobs/{preempted}/requeue", reason="make room")
    for job_id, reason, state, outcome, words in (
        (cancelled, "cancel", "cancelled", "cancelled", "cancelled by ann: enough"),
        (stopped_by_admin, "admin_stop", "cancelled", "cancelled", "cancelled by the admin admin: smoke"),
        (limited, "time_limit", "failed", "time_limit", f"time limit of {LIMIT}"),
    ):
        job = pool.wait_end(job_id)
        assert (last_stop(pool, job_id), job["cause"]["stop_reason"]) == (reason, reason)
        assert (job["state"], job["outcome"], job["attempts"]) == (state, outcome, 1)
        assert words in job["cause"]["sentence"]
    assert_runs_again(pool, preempted, "preempt", "make room")

    drained = hold(pool, ann)
    node = pool.job(drained)["attempt"]["nodes"][0]["name"]
    assert pool.request("POST", f"/nodes/{node}/drain", json={"reason": "new driver", "now": True}).is_success
    again = assert_runs_again(pool, drained, "drain", f"{node} is drained: new driver")
    assert again != node
    pool.assert_nothing_left()


def assert_runs_again(pool: Stack, job_id: int, reason: str, words: str) -> str:
    """Its first attempt was stopped for `reason`, and a second one runs, whose node is returned; it is ended."""
    assert last_stop(pool, job_id) == reason
    pool.wait_log(job_id, "holding preempted")
    job = pool.job(job_id)
    assert (job["state"], job["attempts"], job["cause"]["stop_reason"]) == ("running", 2, reason)
    assert words in job["cause"]["sentence"]
    pool.cancel(job_id)
    pool.wait_end(job_id)
    return str(job["attempt"]["nodes"][0]["name"])
