"""A training that was started on four slots is asked to make room, and goes on with two, the whole way: REST to ranks.

The plan is made anew for the number of ranks, and the checkpoint that four wrote is where the two begin.
"""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.stack import PYTHON, TEST_SECONDS, Stack, hold_source
from tests.support.wait import wait_until

ENTRY = Path(__file__).parents[1] / "distributed" / "faulty_entry.py"
STEPS = 400


@pytest.fixture
def pool() -> Iterator[Stack]:
    with Stack(num_nodes=1, slots=4) as stack:
        yield stack


def submit_training(pool: Stack) -> int:
    """A data parallel training on 2 to 4 slots; a step takes 16 samples, of 4 ms each."""
    folder = Path(tempfile.mkdtemp(prefix="code-", dir=pool.folder))
    shutil.copy(ENTRY, folder / "mine.py")
    return pool.submit(
        code={"path": str(folder)},
        python=PYTHON,
        run={"entry": "mine:build", "args": {"seconds": 0.004}},
        resources={"gpus": {"min": 2, "max": 4}},
        parallel={"strategy": "ddp"},
        train={"steps": STEPS, "batch_size": 16, "report_every": 5},
        checkpoint={"every_steps": 20},
    )


def steps_of(pool: Stack, job_id: int, attempt: int) -> list[float]:
    """The steps that an attempt has told its loss of."""
    curve: dict[str, Any] = pool.get(f"/jobs/{job_id}/metrics?keys=loss&attempt={attempt}")["keys"].get("loss", {})
    return list(curve.get("step", []))


@pytest.mark.timeout(TEST_SECONDS)
def test_a_job_that_makes_room_resumes_on_what_is_left_and_finishes(pool: Stack) -> None:
    job_id = submit_training(pool)
    job = pool.wait_state(job_id, "running")
    assert (job["size"]["gpus"], job["size"]["processes_per_node"]) == (4, 4)
    wait_until(lambda: pool.job(job_id)["checkpoint"], 240, lambda: f"no checkpoint: {pool.describe(job_id)}")

    holder = pool.python_job(hold_source(600), resources={"gpus": 2}, priority=10)
    assert pool.request("POST", f"/jobs/{job_id}/requeue", json={}).status_code == 202
    pool.wait_log(holder, "holding")
    job = wait_until(
        lambda: (now := pool.job(job_id))["attempts"] == 2 and now,
        240,
        lambda: f"it does not start again: {pool.describe(job_id)}",
    )
    assert (job["size"]["gpus"], job["size"]["processes_per_node"]) == (2, 2)

    job = pool.wait_end(job_id, 400)

    assert (job["state"], job["outcome"]) == ("succeeded", "succeeded"), pool.describe(job_id)
    assert (job["attempts"], job["size"]["gpus"], job["resources"]["gpus"]) == (2, 2, 4)
    before, after = steps_of(pool, job_id, 1), steps_of(pool, job_id, 2)
    assert before[0] < before[-1] < after[0], "the second attempt goes on after the checkpoint of the first"
    assert after[-1] == STEPS
    pool.cancel(holder)
    pool.wait_end(holder)
