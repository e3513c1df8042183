"""Nodes, agents and supervisors that vanish, in every phase: what is lost is noticed, what lives is left alone.

Two pools of three nodes with two slots each; every test breaks parts of one, and afterwards all of them are mended. A
node reaches the API through a proxy of its own, so that it can be parted from it. What ran is read from evidence that
the jobs wrote themselves.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.child import die_with_parent, end
from tests.support.evidence import CLOCK, WRITER, Evidence, assert_log_is_evidence, gang
from tests.support.processes import is_alive
from tests.support.stack import PYTHON, TEST_SECONDS, Stack, kill
from tests.support.wait import stays_true, wait_until

PATIENT = {"UNREACHABLE_SECONDS": "2", "CLAIM_SECONDS": "8", "LOST_SECONDS": "30", "SETTLE_SECONDS": "3"}
"""No node is lost before others give up waiting for its claim, nor while its agent starts again. A node that stops by
itself is a tenth of LOST_SECONDS ahead of the service: three seconds, which a busy machine may well need."""
LOSING = {"UNREACHABLE_SECONDS": "2", "CLAIM_SECONDS": "60", "LOST_SECONDS": "8", "SETTLE_SECONDS": "3"}
"""Of the tests that wait for a node to be lost."""
DATABASES = ["sqlite", pytest.param("postgresql", marks=pytest.mark.full)]
Job = dict[str, Any]
pytestmark = pytest.mark.timeout(TEST_SECONDS)


def start(request: pytest.FixtureRequest, settings: dict[str, str]) -> Stack:
    """A pool of this file, on the database that `request` asks for."""
    database_url = ""
    if request.param == "postgresql":
        database_url = request.getfixturevalue("postgres_server").fresh_database()
    return Stack(database_url=database_url, num_nodes=3, has_proxies=True, settings=settings)


@pytest.fixture(scope="module", params=DATABASES)
def patient_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """What `pool` lends."""
    with start(request, PATIENT) as stack:
        yield stack


@pytest.fixture(scope="module", params=DATABASES)
def losing_stack(request: pytest.FixtureRequest) -> Iterator[Stack]:
    """What `losing_pool` lends."""
    with start(request, LOSING) as stack:
        yield stack


@pytest.fixture
def pool(patient_stack: Stack) -> Iterator[Stack]:
    """The pool that loses nodes late."""
    yield from lent(patient_stack)


@pytest.fixture
def losing_pool(losing_stack: Stack) -> Iterator[Stack]:
    """The pool that loses nodes soon."""
    yield from lent(losing_stack)


def lent(stack: Stack) -> Iterator[Stack]:
    """A pool, mended after the test. What cannot be mended fails the tests that follow at once, not by timeouts."""
    if not stack.is_mended:
        pytest.fail("the pool could not be mended after an earlier test")
    stack.is_mended = False
    yield stack
    stack.mend()


@pytest.fixture
def evidence(tmp_path: Path) -> Evidence:
    """Where the jobs of a test write."""
    return Evidence(tmp_path / "evidence")


# --- Looking ---------------------------------------------------------------------------------------------------------


def run_writer(pool: Stack, evidence: Evidence, **members: Any) -> Job:
    """A gang that writes until it is released, once it runs and every rank has stored output."""
    job_id = pool.python_job(WRITER, **gang(evidence, **members))
    job = pool.wait_state(job_id, "running")
    for rank in range(job["resources"]["gpus"]):
        pool.wait_log(job_id, "\n", rank)
    return pool.job(job_id)


def nodes_of(job: Job) -> list[str]:
    """Nodes of the job's present attempt, by node rank."""
    return [node["name"] for node in sorted(job["attempt"]["nodes"], key=lambda node: int(node["node_rank"]))]


def wait_attempt(pool: Stack, job_id: int, number: int, *, timeout: float = 120) -> Job:
    """Wait until the job runs in its attempt of this number."""

    def runs() -> Job | None:
        job = pool.job(job_id)
        is_there = job["state"] == "running" and job["attempt"] is not None and job["attempt"]["number"] == number
        return job if is_there else None

    return wait_until(runs, timeout, lambda: f"attempt {number} does not run: {pool.describe(job_id)}")


def logs(pool: Stack, job: Job, attempt: int) -> dict[int, bytes]:
    """The stored log of every rank in an attempt."""
    return {rank: pool.log_bytes(job["id"], rank, attempt) for rank in range(job["resources"]["gpus"])}


def told(pool: Stack, job: Job) -> str:
    """The job's history, in words."""
    return "\n".join(event["text"] for event in pool.events(job["id"]))


def charged(pool: Stack, job: Job) -> int:
    """Retries charged to the job's own budget."""
    return int(pool.sql("select num_charged_retries from jobs where id = :id", id=job["id"])[0][0])


def quarantined(pool: Stack, node: str) -> list[str]:
    """Why GPUs of a node are set aside."""
    return [gpu["quarantined"] for gpu in pool.node(node)["gpus"] if gpu["quarantined"]]


def finish(pool: Stack, evidence: Evidence, job: Job, *, attempts: int) -> Job:
    """Release the ranks: the job succeeds in its attempt of this number, and that one's log equals its evidence."""
    evidence.release()
    ended = pool.wait_end(job["id"])
    assert (ended["state"], ended["attempts"]) == ("succeeded", attempts), pool.describe(job["id"])
    assert_log_is_evidence(logs(pool, job, attempts), evidence.of_writer(attempts))
    return ended


# --- Agents and supervisors ------------------------------------------------------------------------------------------


def test_o03_stopping_an_agent_stops_no_job(pool: Stack, evidence: Evidence) -> None:
    job = run_writer(pool, evidence)
    node, attempt_id = nodes_of(job)[0], job["attempt"]["id"]

    for number in (signal.SIGTERM, signal.SIGINT):
        adopted = pool.adopted(node)
        pool.stop(node, number)
        pool.start_agent(node)
        wait_until(partial(_adopts_again, pool, node, adopted), 60, f"{node} adopts nothing after {number.name}")
        pool.wait_for_nodes()
        present = pool.job(job["id"])
        assert (present["state"], present["attempt"]["id"]) == ("running", attempt_id)

    finish(pool, evidence, job, attempts=1)


def _adopts_again(pool: Stack, node: str, before: list[int]) -> bool:
    return len(pool.adopted(node)) > len(before)


def test_o04_a_wiped_agent_ends_the_attempt_it_no_longer_knows(pool: Stack, evidence: Evidence) -> None:
    job = run_writer(pool, evidence)
    node, attempt_id = nodes_of(job)[1], job["attempt"]["id"]

    pool.kill9(node)
    # In one step: the supervisor on that node lives on, and writes files there while others are removed.
    pool.node_folder(node).rename(pool.folder / "wiped")
    pool.start_agent(node)
    wait_attempt(pool, job["id"], 2)

    assert "supervisor_lost" in told(pool, job)
    assert pool.marked(attempt_id) == []
    assert charged(pool, job) == 0
    finish(pool, evidence, job, attempts=2)


def test_a_killed_supervisor_is_supervisor_lost_retried_and_not_charged(pool: Stack, evidence: Evidence) -> None:
    """Its ranks are found by their marker and ended before the next attempt begins: the two never overlap.

    On one node, where no other part keeps the attempt open for a while.
    """
    job_id = pool.python_job(CLOCK, **gang(evidence, nodes=1))
    job = pool.wait_state(job_id, "running")
    attempt_id = job["attempt"]["id"]
    wait_until(lambda: evidence.of_clock(), 60, "the ranks leave no evidence")

    kill(pool.supervisor_pid(nodes_of(job)[0], attempt_id))
    wait_attempt(pool, job_id, 2)

    assert "supervisor_lost" in told(pool, job)
    assert pool.marked(attempt_id) == []
    assert charged(pool, job) == 0
    evidence.release()
    assert pool.wait_end(job_id)["state"] == "succeeded"
    assert_no_overlap(evidence)


def assert_no_overlap(evidence: Evidence) -> None:
    """No rank of the first attempt lived when one of the second did."""
    times = evidence.of_clock()
    assert times.keys() == {1, 2}
    overlap = max(times[1]) - min(times[2])
    assert overlap < 0, f"attempt 1 still ran {overlap:.3f} s after attempt 2 had begun"


def test_o53_processes_that_are_not_ours_are_never_touched(pool: Stack, evidence: Evidence) -> None:
    """Named like ours, with our ids in their arguments, with the mark of another pool; and one whose pid stands in our
    own state file, as after the reuse of a pid."""
    job = run_writer(pool, evidence)
    node, attempt_id = nodes_of(job)[1], job["attempt"]["id"]
    folder = pool.node_folder(node) / "attempts" / str(attempt_id)
    sleep = "import time; time.sleep(600)"
    others = [
        subprocess.Popen([PYTHON, "-c", sleep, *words], env=environment, preexec_fn=die_with_parent())
        for words, environment in (
            (["worker.supervisor", str(folder)], {}),
            (["gangline", f"--attempt={attempt_id}", f"--job={job['id']}"], {}),
            (["rank"], {"GANGLINE_ATTEMPT": f"another-pool/{node}/{attempt_id}"}),
            (["rank"], {"GANGLINE_JOB_ID": str(job["id"])}),
        )
    ]
    try:
        pool.kill9(node)
        kill(pool.supervisor_pid(node, attempt_id))
        state = json.loads((folder / "state.json").read_text())
        state["supervisor"]["pid"] = others[0].pid
        (folder / "state.json").write_text(json.dumps(state))
        pool.start_agent(node)
        wait_attempt(pool, job["id"], 2)
        assert pool.cancel(job["id"]).status_code == 202
        assert pool.wait_end(job["id"])["state"] == "cancelled"
        pool.stop(node)

        assert [other.poll() for other in others] == [None] * 4
        assert pool.marked(attempt_id) == []
    finally:
        for other in others:
            end(other, first=signal.SIGKILL)


# --- Nodes -----------------------------------------------------------------------------------------------------------


def test_a_node_lost_in_start_up_is_node_lost_and_the_gang_starts_on_others(
    losing_pool: Stack, evidence: Evidence
) -> None:
    """Node rank 0 is held back, so that node rank 1 has claimed and waits for it when it is lost."""
    pool = losing_pool
    first, second, third = pool.node_names
    os.kill(pool.processes[first].pid, signal.SIGSTOP)
    with aside(pool, third):
        job_id = pool.python_job(WRITER, **gang(evidence))
        pool.wait_placed(job_id, first)
        wait_until(partial(_is_supervised, pool, second, first), 60, "node rank 1 does not claim its part")
    assert pool.job(job_id)["state"] == "starting"
    pool.kill_node(second)
    os.kill(pool.processes[first].pid, signal.SIGCONT)

    job = wait_attempt(pool, job_id, 2)

    assert "node_lost" in told(pool, job)
    assert second not in nodes_of(job)
    assert charged(pool, job) == 0
    finish(pool, evidence, job, attempts=2)


@contextmanager
def aside(pool: Stack, node: str) -> Iterator[None]:
    """Meanwhile a node gets no new work, so that a gang of two nodes goes to the two others."""
    pool.request("POST", f"/nodes/{node}/cordon", json={"reason": "a test"}).raise_for_status()
    yield
    pool.request("POST", f"/nodes/{node}/resume").raise_for_status()


def _is_supervised(pool: Stack, node: str, held: str) -> bool:
    pool.vouch_for(held)
    states = [json.loads(path.read_text()) for path in pool.node_folder(node).glob("attempts/*/state.json")]
    return any(state["supervisor"] is not None for state in states)


def test_a_node_lost_in_training_is_node_lost_and_quarantined_until_it_proves_empty(
    losing_pool: Stack, evidence: Evidence
) -> None:
    """Agent and supervisor die, the ranks live on there: nobody gets those GPUs until they are gone."""
    pool = losing_pool
    job = run_writer(pool, evidence)
    lost, attempt_id = nodes_of(job)[1], job["attempt"]["id"]
    supervisor = pool.supervisor_pid(lost, attempt_id)
    pool.kill9(lost)
    kill(supervisor)

    second = wait_attempt(pool, job["id"], 2)
    assert "node_lost" in told(pool, job)
    assert pool.node(lost)["state"] == "lost"
    assert lost not in nodes_of(second)
    assert charged(pool, job) == 0
    assert len(quarantined(pool, lost)) == 2
    assert len(pool.marked(attempt_id, node=lost)) == 2, "the ranks were to live on"
    assert pool.marked(attempt_id) == pool.marked(attempt_id, node=lost)

    pool.start_agent(lost)
    wait_until(lambda: not quarantined(pool, lost), 60, lambda: f"still set aside: {pool.node(lost)}")
    assert pool.marked(attempt_id) == []
    finish(pool, evidence, job, attempts=2)
    assert_prefix(pool, evidence, job)


def assert_prefix(pool: Stack, evidence: Evidence, job: Job) -> None:
    """The stored log of the first attempt ends where it was fenced; up to there it is what the ranks wrote."""
    for rank, stored in logs(pool, job, 1).items():
        assert stored and evidence.of_writer(1)[rank].startswith(stored)


def test_o21_a_job_given_to_a_dead_idle_node_keeps_its_place(pool: Stack, evidence: Evidence) -> None:
    dead, _, third = pool.node_names
    pool.kill9(dead)
    with aside(pool, third):
        job_id = pool.python_job(WRITER, **gang(evidence))
        behind = pool.submit(run={"command": "true"}, resources={"nodes": 2, "gpus_per_node": 2})
        pool.wait_placed(job_id, dead)

    job = wait_attempt(pool, job_id, 2)

    assert f"{dead} did not claim its part" in told(pool, job)
    assert dead not in nodes_of(job)
    assert pool.job(behind)["state"] == "waiting", "a job from behind was faster"
    assert pool.node(dead)["state"] in ("unreachable", "lost")
    assert charged(pool, job) == 0
    finish(pool, evidence, job, attempts=2)
    assert pool.wait_end(behind)["state"] == "succeeded"


def test_o06_a_gang_that_does_not_fit_holds_nothing(pool: Stack, evidence: Evidence) -> None:
    holder = run_writer(pool, evidence, nodes=1)
    waiting = pool.submit(run={"command": "true"}, resources={"nodes": 3, "gpus_per_node": 2})
    wait_until(lambda: (pool.job(waiting)["reason"] or {}).get("code") == "needs_gpus", 60, "no reason is given")

    others = [pool.submit(run={"command": "true"}, resources={"gpus_per_node": 2}) for _ in range(4)]

    assert [pool.wait_end(job_id)["state"] for job_id in others] == ["succeeded"] * 4
    assert pool.job(waiting)["state"] == "waiting"
    finish(pool, evidence, holder, attempts=1)
    assert pool.wait_end(waiting)["state"] == "succeeded"


def test_o06_a_node_that_vanishes_before_the_start_releases_the_whole_gang(pool: Stack, evidence: Evidence) -> None:
    vanished = pool.node_names[2]
    pool.kill9(vanished)
    job_id = pool.python_job(WRITER, **gang(evidence, nodes=3))
    pool.wait_placed(job_id, vanished)

    wait_until(lambda: pool.job(job_id)["state"] == "waiting", 60, "the gang is not put back")
    probe = pool.submit(run={"command": "true"}, resources={"nodes": 2, "gpus_per_node": 2})
    assert pool.wait_end(probe)["state"] == "succeeded"
    job = pool.job(job_id)
    assert (job["state"], job["attempts"]) == ("waiting", 1)
    assert f"{vanished} did not claim its part" in told(pool, job)

    pool.start_agent(vanished)
    job = wait_attempt(pool, job_id, 2)
    assert charged(pool, job) == 0
    finish(pool, evidence, job, attempts=2)


# --- Partitions ------------------------------------------------------------------------------------------------------


def test_o15a_half_a_lease_of_silence_is_no_more_than_unreachable(pool: Stack, evidence: Evidence) -> None:
    job = run_writer(pool, evidence, on_disconnect="stop")
    node = nodes_of(job)[0]

    pool.cut(node)
    pool.wait_node(node, "unreachable")
    lease, silence = float(pool.settings["LOST_SECONDS"]), float(pool.settings["UNREACHABLE_SECONDS"])
    stays_true(lambda: pool.node(node)["state"] == "unreachable", lease / 2 - silence, "it counts as lost too early")
    pool.heal(node)
    pool.wait_node(node, "ready")

    finish(pool, evidence, job, attempts=1)
    assert_log_is_evidence(logs(pool, job, 1), evidence.of_writer(1))


def test_o15b_o16_a_node_cut_off_stops_by_itself_and_no_two_attempts_overlap(pool: Stack, evidence: Evidence) -> None:
    job_id = pool.python_job(CLOCK, **gang(evidence, on_disconnect="stop"))
    job = pool.wait_state(job_id, "running")
    node, attempt_id = nodes_of(job)[1], job["attempt"]["id"]

    pool.cut(node)
    wait_until(lambda: not pool.marked(attempt_id, node=node), 120, "the node that is cut off stops nothing")
    assert pool.job(job_id)["attempt"]["number"] == 1, "the service was faster than the node"
    second = wait_attempt(pool, job_id, 2)
    assert node not in nodes_of(second)

    pool.heal(node)
    wait_until(lambda: not quarantined(pool, node), 60, lambda: f"still set aside: {pool.node(node)}")
    present = pool.job(job_id)
    assert (present["state"], present["attempts"]) == ("running", 2)
    evidence.release()
    assert pool.wait_end(job_id)["state"] == "succeeded"
    assert_no_overlap(evidence)


def test_o16_a_stopped_machine_stays_quarantined_and_what_it_sends_later_is_refused(
    losing_pool: Stack, evidence: Evidence
) -> None:
    """SIGSTOP instead of a cut: nothing on the node can stop itself, so fencing has to do."""
    pool = losing_pool
    job = run_writer(pool, evidence)
    node, attempt_id = nodes_of(job)[1], job["attempt"]["id"]
    folder = pool.node_folder(node) / "attempts" / str(attempt_id)
    state = json.loads((folder / "state.json").read_text())
    stopped = [pool.processes[node].pid, int(state["supervisor"]["pid"])]
    for pid in stopped:
        os.kill(pid, signal.SIGSTOP)

    wait_attempt(pool, job["id"], 2)
    assert len(quarantined(pool, node)) == 2
    assert len(pool.marked(attempt_id, node=node)) == 2
    before = logs(pool, job, 1)
    for method, path, content in (
        ("PUT", f"streams/log/2?offset={len(before[2])}", b"from the past\n"),
        ("PUT", "streams/events/2?offset=0", b'{"step": 999, "total_steps": 1000}\n'),
        ("POST", "started", b'{"ranks": [], "sent_at": 0}'),
        ("POST", "ended", b'{"ranks": [], "failure": null, "stop_intent": null, "process_set_empty": true}'),
        ("GET", "directive?version=0&wait=0", b""),
    ):
        answer = send_as_supervisor(pool, state, method, path, content)
        assert (answer.status_code, answer.json().get("code")) == (409, "attempt_fenced"), (path, answer.text)
    assert len(quarantined(pool, node)) == 2

    for pid in stopped:
        os.kill(pid, signal.SIGCONT)
    wait_until(lambda: not pool.marked(attempt_id), 60, "the fenced ranks live on")
    wait_until(lambda: not quarantined(pool, node), 60, lambda: f"still set aside: {pool.node(node)}")
    assert logs(pool, job, 1) == before
    assert pool.job(job["id"])["attempts"] == 2
    finish(pool, evidence, job, attempts=2)
    assert_prefix(pool, evidence, job)


def send_as_supervisor(pool: Stack, state: Job, method: str, path: str, content: bytes) -> httpx.Response:
    """One request with the claim token of a state file."""
    url = f"{pool.url}/api/v1/agent/attempts/{state['attempt_id']}/nodes/{state['node_rank']}/{path}"
    headers = {"Authorization": f"Bearer {state['token']}"}
    return httpx.request(method, url, headers=headers, content=content, timeout=60)


@pytest.mark.parametrize("is_all", [pytest.param(True, marks=pytest.mark.full), False], ids=["all_nodes", "its_nodes"])
def test_o17_a_job_cancelled_while_its_nodes_are_cut_off_is_stopping_until_they_confirm(
    losing_pool: Stack, evidence: Evidence, is_all: bool
) -> None:
    """Whether the nodes count as lost meanwhile (its two of three) or not (all at once: the service is to blame)."""
    pool = losing_pool
    job = run_writer(pool, evidence)
    attempt_id = job["attempt"]["id"]
    pool.cut(*(pool.node_names if is_all else nodes_of(job)))
    assert pool.cancel(job["id"]).status_code == 202
    for node in nodes_of(job):
        pool.wait_node(node, "unreachable", "lost")
    wait_until(lambda: (pool.job(job["id"])["reason"] or {}).get("code") == "stop_unconfirmed", 60, "no reason")

    # The grace, the settle deadline and the time after which a node is lost pass, one after the other.
    times_out = sum(float(pool.settings[name]) for name in ("LOST_SECONDS", "SETTLE_SECONDS")) + 1.0
    stays_true(partial(_is_unconfirmed, pool, job), times_out, lambda: f"it was given up: {pool.describe(job['id'])}")
    assert len(pool.marked(attempt_id)) == 4, "the ranks were to live on"
    for node in nodes_of(job):
        pool.wait_node(node, "unreachable" if is_all else "lost")
    assert _is_unconfirmed(pool, job), pool.describe(job["id"])

    pool.heal(*pool.node_names)
    ended = pool.wait_end(job["id"])
    assert (ended["state"], ended["attempts"]) == ("cancelled", 1)
    assert pool.marked(attempt_id) == []


def _is_unconfirmed(pool: Stack, job: Job) -> bool:
    present = pool.job(job["id"])
    held = [gpu["job_id"] for name in nodes_of(job) for gpu in pool.node(name)["gpus"]]
    is_told = (present["reason"] or {}).get("code") == "stop_unconfirmed"
    return present["state"] == "stopping" and is_told and held == [job["id"]] * 4


# --- Rows that nobody should ever see --------------------------------------------------------------------------------


@pytest.mark.parametrize("is_unreadable", [False, True], ids=["without_its_node", "unreadable"])
def test_o05_a_poisoned_row_is_closed_and_holds_up_nobody(pool: Stack, evidence: Evidence, is_unreadable: bool) -> None:
    job = run_writer(pool, evidence, nodes=1)
    (node,) = nodes_of(job)
    pool.kill_node(node)
    assert pool.cancel(job["id"]).status_code == 202
    if is_unreadable:
        pool.sql("update attempts set stop_intent = 'no such word' where job_id = :job", job=job["id"])
    pool.sql("delete from nodes where name = :name", name=node)
    (pool.node_folder(node) / "credential.json").unlink()  # so that it enrols anew, when the pool is mended

    healthy = [pool.submit(run={"command": "true"}) for _ in range(5)]
    assert [pool.wait_end(job_id)["state"] for job_id in healthy] == ["succeeded"] * 5
    ended = pool.wait_end(job["id"])

    assert ended["state"] == "cancelled"
    if is_unreadable:
        assert "Reconcile failed" in ended["cause"]["sentence"]
        part = "scheduler" if pool.is_postgres else "server"
        assert 1 <= pool.log(part, 10_000_000).count(f"reconcile_failed attempt_id={job['attempt']['id']}") <= 5


# --- Retries ---------------------------------------------------------------------------------------------------------


def test_o22_the_retry_limit_and_the_filter_of_exit_codes_are_obeyed(pool: Stack) -> None:
    def run(code: int, **retry: Any) -> int:
        return pool.submit(run={"command": f"exit {code}"}, retry={"max": 2, **retry})

    cases = {
        run(137): 3,
        run(3, exit_codes=[75, 143]): 1,
        run(75, exit_codes=[75, 143]): 3,
        run(1, on=["out_of_memory"]): 1,
        run(0): 1,
    }

    assert {job_id: pool.wait_end(job_id)["attempts"] for job_id in cases} == cases
    always_137 = pool.job(next(iter(cases)))
    assert (always_137["state"], always_137["outcome"], always_137["cause"]["exit_code"]) == (
        "failed",
        "user_error",
        137,
    )


@pytest.mark.full
def test_o22_restarts_by_the_jobs_own_launcher_are_not_attempts(pool: Stack, evidence: Evidence) -> None:
    script = pool.code("import os\nopen(os.environ['EVIDENCE'] + '/ran', 'a').write('x\\n')\nraise SystemExit(1)\n")
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--max-restarts=1", "main.py"]
    job_id = pool.submit(
        code={"path": str(script)}, run={"command": torchrun}, retry={"max": 1}, env=evidence.env, stop_grace="1s"
    )

    job = pool.wait_end(job_id, timeout=600)

    assert (job["state"], job["attempts"]) == ("failed", 2)
    assert len(evidence.lines("ran")) == 4, "two attempts, each restarted once by its launcher"


SPEC_WITNESS = """
import os, pathlib, shutil, time
number, folder = os.environ["GANGLINE_ATTEMPT_NUMBER"], os.environ["EVIDENCE"]
attempt_folder = pathlib.Path(os.environ["GANGLINE_EVENTS_FILE"]).parents[1]
shutil.copy(attempt_folder / "launch.json", f"{folder}/part")
os.rename(f"{folder}/part", f"{folder}/launch-{number}.json")  # whoever sees it may kill us: it is whole
if number == "1":
    raise SystemExit(75)
while number == "2":
    time.sleep(0.1)
"""


def test_o23_every_attempt_runs_the_same_specification(pool: Stack, evidence: Evidence) -> None:
    """Attempt 1 fails by itself, attempt 2 by the loss of its supervisor, attempt 3 succeeds."""
    job_id = pool.python_job(
        SPEC_WITNESS,
        resources={"gpus_per_node": 1, "time": "97s", "cpus": 0.5},
        env={**evidence.env, "WORD": "é 漢"},
        tags={"project": "x"},
        priority=7,
        retry={"max": 3, "exit_codes": [75]},
        stop_grace="3s",
    )
    spec = stored_spec(pool, job_id)
    second = wait_attempt(pool, job_id, 2)
    wait_until(lambda: (evidence.folder / "launch-2.json").exists(), 60, "attempt 2 leaves no evidence")
    assert stored_spec(pool, job_id) == spec
    kill(pool.supervisor_pid(nodes_of(second)[0], second["attempt"]["id"]))
    job = pool.wait_end(job_id)

    assert (job["state"], job["attempts"]) == ("succeeded", 3)
    assert stored_spec(pool, job_id) == spec
    plans = [json.loads((evidence.folder / f"launch-{number}.json").read_text()) for number in (1, 2, 3)]
    differing = {key for plan in plans for key in plan if plan[key] != plans[0][key]}
    assert differing <= {"attempt_id", "attempt_number", "start_reason", "node_name", "gpus"}
    assert [plan["start_reason"] for plan in plans] == ["submitted", "user_error", "supervisor_lost"]
    assert (plans[2]["time_limit_seconds"], plans[2]["env"]["WORD"]) == (97.0, "é 漢")


def stored_spec(pool: Stack, job_id: int) -> str:
    """The specification as it lies in the database."""
    return str(pool.sql("select spec from jobs where id = :id", id=job_id)[0][0])


def test_the_processes_of_this_pool_are_found_by_its_tests(pool: Stack, evidence: Evidence) -> None:
    """What all tests here rely on: `marked` sees ranks that live, and none that have ended."""
    job = run_writer(pool, evidence)
    pids = pool.marked(job["attempt"]["id"])
    assert len(pids) == 4 and all(map(is_alive, pids))
    finish(pool, evidence, job, attempts=1)
    assert pool.marked(job["attempt"]["id"]) == []
