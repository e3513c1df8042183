"""Trainings that go wrong, through the whole pool: the class of each failure is right, and the rank that caused it.

Each kind is injected three times here and twenty times under `make test-full`, at random samples, on either rank, on
one node and on two. Afterwards nothing of the job is left on the machine.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import die_with_parent, end
from tests.support.processes import environment_of
from tests.support.stack import PYTHON, Stack, kill
from tests.support.wait import wait_until

ENTRY = Path(__file__).parents[1] / "distributed" / "faulty_entry.py"
NUM_RANKS = 2
AT_ONCE = 3
"""Trainings that the pool runs at once, each on one node or on two."""
SECONDS = 600.0
HANG_AFTER = "12s"
"""Only where a hang is the point: filling a gigabyte on a busy machine may take as long. Longer than the machine may
stand still for the supervisor to hold it against the ranks."""
MEMORY = "1536MiB"
RIGHT_RANKS = 0.95
"""Part of the injections of a kind in which the rank is right."""


@dataclass(frozen=True, kw_only=True)
class Kind:
    """A fault, and how the attempt must end."""

    fault: str
    outcome: str
    text: str
    """In the sentence of the cause."""
    train: dict[str, Any] = field(default_factory=dict)


KINDS = {
    "kill": Kind(fault="kill", outcome="user_error", text="ended by signal SIGKILL"),
    "raise": Kind(fault="raise", outcome="user_error", text="ValueError: the sample cannot be decoded"),
    "hang": Kind(fault="hang", outcome="hang", text="no progress", train={"hang_after": HANG_AFTER}),
    "sigstop": Kind(fault="stop", outcome="hang", text="no progress", train={"hang_after": HANG_AFTER}),
    "out_of_memory": Kind(fault="allocate", outcome="out_of_memory", text="memory"),
    "nan": Kind(fault="nan", outcome="nan_loss", text="the loss is not finite"),
}
TIMES = [3, pytest.param(20, marks=pytest.mark.full)]
pytestmark = pytest.mark.timeout(3600)


@pytest.fixture(scope="module")
def pool() -> Iterator[Stack]:
    with Stack(num_nodes=2, slots=AT_ONCE) as stack:
        yield stack


def submit(
    pool: Stack, *, num_nodes: int = 1, steps: int = 400, train: dict[str, Any] | None = None, **args: Any
) -> int:
    """A job of two ranks that trains what `faulty_entry` builds."""
    folder = Path(tempfile.mkdtemp(prefix="code-", dir=pool.folder))
    shutil.copy(ENTRY, folder / "mine.py")
    return pool.submit(
        code={"path": str(folder)},
        python=PYTHON,
        run={"entry": "mine:build", "args": args},
        resources={"nodes": num_nodes, "gpus_per_node": NUM_RANKS // num_nodes, "memory": MEMORY},
        train={"steps": steps, "batch_size": 8, **(train or {})},
        checkpoint={"every_steps": 5},
        stop_grace="20s",
    )


def first_ends(pool: Stack, job_ids: list[int]) -> Iterator[tuple[int, str, dict[str, Any]]]:
    """Job, outcome and cause of each job's first attempt, in the order in which they end."""
    left = set(job_ids)

    def ended() -> list[Any]:
        query = "select job_id, outcome, cause from attempts where number = 1 and outcome is not null"
        return [row for row in pool.sql(query) if row[0] in left]

    while left:
        for job_id, outcome, cause in wait_until(ended, SECONDS, lambda: pool.describe(min(left))):
            left.remove(job_id)
            yield job_id, outcome, json.loads(cause) if isinstance(cause, str) else cause


def first_end(pool: Stack, job_id: int) -> tuple[str, dict[str, Any]]:
    """Outcome and cause of the job's first attempt, once it has ended."""
    _, outcome, cause = next(first_ends(pool, [job_id]))
    return outcome, cause


def finish(pool: Stack, job_id: int) -> None:
    """End the job if it was started again, and see that nothing is left."""
    pool.cancel(job_id)
    pool.wait_end(job_id, SECONDS)
    pool.assert_nothing_left()


@pytest.mark.parametrize("times", TIMES)
@pytest.mark.parametrize("name", sorted(KINDS))
def test_each_fault_is_classed_right_and_its_rank_is_named(pool: Stack, name: str, times: int) -> None:
    kind, draw = KINDS[name], random.Random(f"{name} {times}")
    injected = {}
    for number in range(times):
        rank, at = draw.randrange(NUM_RANKS), draw.randrange(20, 60)
        # Memory is held to its limit by node: on two of them each rank has its own.
        job_id = submit(pool, num_nodes=1 + number % 2, fault=kind.fault, rank=rank, at=at, train=kind.train)
        injected[job_id] = rank

    num_right = 0
    for job_id, outcome, cause in first_ends(pool, list(injected)):
        where = f"{name}: rank {injected[job_id]}: {cause['sentence']}"
        assert outcome == kind.outcome, f"{where}\n{pool.describe(job_id)}"
        assert kind.text in cause["sentence"], where
        num_right += cause["rank"] == injected[job_id]
        pool.cancel(job_id)  # or it may be started again

    for job_id in injected:
        pool.wait_end(job_id, SECONDS)
    pool.assert_nothing_left()
    assert num_right >= RIGHT_RANKS * times, f"{num_right} of {times} ranks right"


@pytest.mark.parametrize("times", TIMES)
def test_a_killed_agent_ends_no_training(pool: Stack, times: int) -> None:
    """Each of `times` trainings has an agent killed under it; three run at once."""
    draw = random.Random(times)
    ids = [submit(pool, num_nodes=2, steps=250, seconds=0.002) for _ in range(times)]
    for job_id in ids:
        wait_for_step(pool, job_id, draw.randrange(1, 30))
        name = draw.choice(pool.node_names)
        pool.kill9(name)
        pool.start_agent(name)

    ended = [pool.wait_end(job_id, SECONDS) for job_id in ids]
    assert [(job["state"], job["attempts"]) for job in ended] == [("succeeded", 1)] * times
    pool.assert_nothing_left()


@pytest.mark.parametrize("times", TIMES)
def test_sigterm_to_one_rank_in_an_evaluation_is_a_preemption_that_loses_no_step(pool: Stack, times: int) -> None:
    draw = random.Random(times)
    for begin in range(0, times, AT_ONCE):
        ids = [
            submit_evaluating(pool, num_nodes=1 + number % 2) for number in range(begin, min(begin + AT_ONCE, times))
        ]
        left = set(ids)
        while left:  # whichever comes to it first: it might be through with it before another begins
            job_id = wait_until(partial(first_in_phase, pool, left, "evaluation"), SECONDS, "no job evaluates")
            kill(rank_pid(pool, job_id, draw.randrange(NUM_RANKS)), signal.SIGTERM)
            left.remove(job_id)

        for job_id, outcome, _ in first_ends(pool, ids):
            assert outcome == "preempted", pool.describe(job_id)
        for job_id in ids:
            job = pool.wait_end(job_id, SECONDS)
            assert (job["state"], job["attempts"]) == ("succeeded", 2), pool.describe(job_id)
            assert reported_steps(pool, job_id) == list(range(1, 7))
    pool.assert_nothing_left()


def submit_evaluating(pool: Stack, num_nodes: int) -> int:
    """A job that spends most of its time in two evaluations."""
    train = {"eval_every": 3, "report_every": 1}
    return submit(pool, num_nodes=num_nodes, steps=6, train=train, eval_length=500, eval_seconds=0.02)


@pytest.mark.parametrize("phase", ["training", pytest.param("evaluation", marks=pytest.mark.full)])
def test_a_requeued_training_goes_on_where_it_was_and_pays_no_retry(pool: Stack, phase: str) -> None:
    evaluation: dict[str, Any] = {"eval_length": 400, "eval_seconds": 0.02} if phase == "evaluation" else {}
    job_id = submit(pool, num_nodes=2, steps=1_000_000, train={"eval_every": 6, "report_every": 1}, **evaluation)
    wait_for_step(pool, job_id, 6)
    wait_for_phase(pool, job_id, phase)

    answer = pool.request("POST", f"/jobs/{job_id}/requeue", json={"reason": "to see"})

    assert answer.status_code == 202, answer.text
    assert first_end(pool, job_id)[0] == "preempted"
    wait_for_attempt(pool, job_id, 2)
    wait_for_step(pool, job_id, 8, attempt=2)
    before, after = reported_steps(pool, job_id, 1), reported_steps(pool, job_id, 2)
    assert after[0] == before[-1] + 1, "no step is lost or done twice"
    assert pool.sql("select num_charged_retries from jobs where id = :id", id=job_id)[0][0] == 0
    finish(pool, job_id)


@pytest.mark.parametrize("times", [2, pytest.param(10, marks=pytest.mark.full)])
def test_o52_a_lost_launcher_stops_both_nodes_and_one_new_attempt_resumes(pool: Stack, times: int) -> None:
    """SIGTERM and SIGKILL in turn, to the supervisor of the second node, while both ranks train."""
    draw = random.Random(times)
    job_id = submit(pool, num_nodes=2, steps=1_000_000, train={"report_every": 1})
    run_ids, ports = set(), set()
    for number in range(1, times + 2):
        wait_for_attempt(pool, job_id, number)
        first = 1 if number == 1 else newest_step(pool, job_id) + 1
        wait_for_step(pool, job_id, first + draw.randrange(6, 15), attempt=number)
        assert reported_steps(pool, job_id, number)[0] == first, "it goes on after its last accepted checkpoint"
        variables = environment_of(rank_pid(pool, job_id, 0))
        run_ids.add(variables["TORCHELASTIC_RUN_ID"])
        ports.add(variables["MASTER_PORT"])
        if number <= times:
            attempt_id = attempt_id_of(pool, job_id)
            name = next(one["name"] for one in pool.job(job_id)["attempt"]["nodes"] if one["node_rank"] == 1)
            kill(pool.supervisor_pid(name, attempt_id), signal.SIGTERM if number % 2 else signal.SIGKILL)
            wait_until(partial(is_gone, pool, attempt_id), SECONDS, lambda: pool.describe(job_id))
    assert len(run_ids) == len(ports) == times + 1, "each attempt met under a name and port of its own"
    finish(pool, job_id)


@pytest.mark.parametrize("times", [4, pytest.param(50, marks=pytest.mark.full)])
def test_trainings_that_end_well_on_a_loaded_machine_are_never_called_failed(pool: Stack, times: int) -> None:
    burner = [sys.executable, "-c", "while True: pass"]
    burners = [subprocess.Popen(burner, preexec_fn=die_with_parent()) for _ in range(os.cpu_count() or 1)]
    try:
        ids = [submit(pool, steps=5, eval_length=20, num_nodes=1 + number % 2) for number in range(times)]
        ended = [pool.wait_end(job_id, SECONDS + 60.0 * times) for job_id in ids]
    finally:
        for process in burners:
            end(process, first=signal.SIGKILL)

    assert [(job["state"], job["attempts"]) for job in ended] == [("succeeded", 1)] * times
    pool.assert_nothing_left()


def wait_for_phase(pool: Stack, job_id: int, phase: str) -> None:
    """Until the job reports that it is in this phase."""

    wait_until(partial(first_in_phase, pool, {job_id}, phase), SECONDS, lambda: pool.describe(job_id))


def first_in_phase(pool: Stack, job_ids: set[int], phase: str) -> int | None:
    """A job of these that reports that it is in this phase; None while there is none."""
    for job_id in sorted(job_ids):
        progress = pool.job(job_id).get("progress") or {}
        if progress.get("phase") == phase:
            return job_id
    return None


def wait_for_step(pool: Stack, job_id: int, step: int, attempt: int = 1) -> None:
    """Until the job has reported this step in this attempt."""

    def there() -> bool:
        job = pool.job(job_id)
        progress = job.get("progress") or {}
        return job["attempts"] == attempt and (progress.get("step") or 0) >= step

    wait_until(there, SECONDS, lambda: pool.describe(job_id))


def wait_for_attempt(pool: Stack, job_id: int, number: int) -> None:
    """Until this attempt runs."""

    def runs() -> bool:
        job = pool.job(job_id)
        return job["state"] == "running" and job["attempts"] == number

    wait_until(runs, SECONDS, lambda: pool.describe(job_id))


def is_gone(pool: Stack, attempt_id: int) -> bool:
    """Whether no process of an attempt lives on any node."""
    return not pool.marked(attempt_id)


def newest_step(pool: Stack, job_id: int) -> int:
    """Step that the job's present attempt resumed from."""
    row = pool.sql("select resume_from from attempts where job_id = :id order by number desc limit 1", id=job_id)[0]
    points = json.loads(row[0]) if isinstance(row[0], str) else row[0]
    return int(points[0]["step"])


def attempt_id_of(pool: Stack, job_id: int) -> int:
    """Id of the job's newest attempt."""
    return int(pool.sql("select max(id) from attempts where job_id = :id", id=job_id)[0][0])


def rank_pid(pool: Stack, job_id: int, rank: int) -> int:
    """Process of a rank of the job."""
    attempt_id = attempt_id_of(pool, job_id)
    wanted = {"RANK": str(rank), "GANGLINE_JOB_ID": str(job_id)}
    for pid in pool.marked(attempt_id):
        if wanted.items() <= environment_of(pid).items():
            return pid
    raise AssertionError(f"rank {rank} of job {job_id} does not run")


def reported_steps(pool: Stack, job_id: int, *attempts: int) -> list[int]:
    """Steps of which these attempts (none given: all of the job's) reported a loss, in order."""
    rows = pool.sql("select number from attempts where job_id = :id order by number", id=job_id)
    numbers = attempts or [row[0] for row in rows]
    found = []
    for number in numbers:
        curve = pool.get(f"/jobs/{job_id}/metrics?keys=loss&attempt={number}")["keys"].get("loss", {"step": []})
        found += curve["step"]
    return found
