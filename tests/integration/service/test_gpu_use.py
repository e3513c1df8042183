"""What heartbeats tell of GPUs: latest use, busy GPU-seconds of attempts, idle holders, and the pool at a glance."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select, update

from service.db.tables import allocations, attempts, gpu_use, jobs, teams
from tests.integration.service.api_server import Api, FakeNode

TWO: dict[str, Any] = {"resources": {"gpus": 2}}
MEMORY = 3 * 2**30


def beat(node: FakeNode, *utilisations: float) -> None:
    """A heartbeat that tells how much each GPU works, from the first on."""
    use = [{"index": i, "utilisation": share, "memory_bytes": MEMORY} for i, share in enumerate(utilisations)]
    node.beat(gpu_use=use)


def pass_time(api: Api, seconds: float) -> None:
    """Everything that is known of use becomes so much older."""
    with api.database.write() as tx:
        tx.connection.execute(
            update(gpu_use).values(at=gpu_use.c.at - seconds, idle_since=gpu_use.c.idle_since - seconds)
        )
        tx.connection.execute(update(allocations).values(allocated_at=allocations.c.allocated_at - seconds))
        tx.connection.execute(update(attempts).values(running_at=attempts.c.running_at - seconds))


def busy(api: Api, job_id: int) -> float:
    with api.database.read() as connection:
        query = select(attempts.c.busy_gpu_seconds).where(attempts.c.job_id == job_id)
        return float(connection.execute(query).scalar_one())


def idle(api: Api, who: str = "ann") -> list[dict[str, Any]]:
    items: list[dict[str, Any]] = api.get("/idle", who)["items"]
    return items


@pytest.fixture
def idle_job(api: Api) -> tuple[int, FakeNode]:
    """A job of Ann's on two of three GPUs, that have done nothing for forty minutes."""
    node = api.node("node-1", slots=3)
    job_id = api.submit(**TWO)
    api.start(job_id, node)
    make_idle(api, node)
    return job_id, node


def make_idle(api: Api, node: FakeNode) -> None:
    """The job's two GPUs do nothing for forty minutes."""
    beat(node, 0.0, 0.0, 0.9)
    pass_time(api, 2_400)
    with api.database.write() as tx:
        tx.connection.execute(update(gpu_use).values(at=gpu_use.c.at + 2_400 - 2))
    beat(node, 0.04, 0.0, 0.9)


def test_the_latest_use_of_each_gpu_is_shown_with_its_node(api: Api) -> None:
    node = api.node(slots=3)
    beat(node, 0.25, 1.0)
    beat(node, 0.5, 1.0)

    first, second, third = api.get("/nodes")["items"][0]["gpus"]
    assert (first["utilisation"], first["memory_used_bytes"], first["idle_since"]) == (0.5, MEMORY, None)
    assert (second["utilisation"], third["utilisation"], third["memory_used_bytes"]) == (1.0, None, None)
    node.beat()
    assert api.get("/nodes")["items"][0]["gpus"][0]["utilisation"] is None, "nobody knows any more"


def test_a_gpu_that_was_idle_before_a_job_had_it_is_idle_since_the_job_runs(api: Api) -> None:
    node = api.node(slots=2)
    make_idle(api, node)
    before = api.get("/nodes")["items"][0]["gpus"][0]["idle_since"]
    job_id = api.submit(resources={"gpus": 1})
    assert api.place() == 1
    (free,) = [gpu for gpu in api.get("/nodes")["items"][0]["gpus"] if not gpu["held"]]
    (held,) = [gpu for gpu in api.get("/nodes")["items"][0]["gpus"] if gpu["held"]]
    assert (free["idle_since"], held["idle_since"]) == (before, None), "its ranks do not run yet"

    node.claim(api.attempt_id(job_id)).started()

    (held,) = [gpu for gpu in api.get("/nodes")["items"][0]["gpus"] if gpu["held"]]
    assert held["idle_since"] == api.job(job_id)["attempt"]["started_at"]


def test_work_is_added_to_the_attempt_that_holds_the_gpu_by_the_time_since_the_last_sample(api: Api) -> None:
    node = api.node(slots=3)
    job_id = api.submit(**TWO)
    api.start(job_id, node)
    beat(node, 1.0, 1.0, 1.0)
    assert busy(api, job_id) == 0.0, "nobody knows of what time the first sample tells"

    pass_time(api, 4)
    beat(node, 0.5, 0.25, 1.0)
    assert busy(api, job_id) == pytest.approx(4 * 0.75, abs=0.3)
    pass_time(api, 4)
    beat(node, 0.5, 0.25, 1.0)
    assert busy(api, job_id) == pytest.approx(8 * 0.75, abs=0.6)


def test_a_sample_stands_for_three_intervals_at_most_and_for_no_time_before_the_job(api: Api) -> None:
    node = api.node(slots=2)
    job_id = api.submit(**TWO)
    beat(node, 1.0, 1.0)
    api.start(job_id, node)
    with api.database.write() as tx:
        tx.connection.execute(update(gpu_use).values(at=gpu_use.c.at - 5))
    beat(node, 1.0, 1.0)
    assert busy(api, job_id) < 1.0, "the five seconds before it was placed are not its own"

    pass_time(api, 3_600)
    beat(node, 1.0, 1.0)
    assert busy(api, job_id) == pytest.approx(2 * 3 * 2.0, abs=1.5)


@pytest.mark.parametrize("told", [{"index": 0}, {"index": 0, "utilisation": "x", "memory_bytes": 1}, "x"])
def test_what_is_no_use_is_refused(api: Api, told: Any) -> None:
    node = api.node()
    answer = api.request("POST", "/agent/heartbeat", node.credential, json=node.heartbeat(gpu_use=[told]))
    assert answer.status_code == 422


def test_use_of_a_gpu_that_the_node_does_not_offer_is_not_kept(api: Api) -> None:
    node = api.node(slots=1)
    beat(node, 0.5, 0.5)
    with api.database.read() as connection:
        assert [row.gpu_index for row in connection.execute(select(gpu_use))] == [0]


# --- Idle holders ----------------------------------------------------------------------------------------------------


def test_a_job_none_of_whose_gpus_works_is_named_with_owner_gpus_since_when_and_waste(
    api: Api, idle_job: tuple[int, FakeNode]
) -> None:
    (found,) = idle(api, "bob")
    assert (found["job_id"], found["owner"], found["gpus"]) == (idle_job[0], "ann", 2)
    assert found["nodes"] == [{"name": "node-1", "gpus": [0, 1]}]
    assert found["idle_seconds"] == pytest.approx(2_400, abs=5)
    assert found["wasted_gpu_hours"] == pytest.approx(2 * 2_400 / 3600, abs=0.01)


def test_one_gpu_that_works_or_of_which_nothing_is_known_clears_the_job(
    api: Api, idle_job: tuple[int, FakeNode]
) -> None:
    _, node = idle_job
    beat(node, 0.0, 0.05, 0.0)
    assert idle(api) == []
    make_idle(api, node)
    assert len(idle(api)) == 1
    beat(node, 0.0)
    assert idle(api) == [], "its second GPU says nothing"


def test_time_without_samples_is_not_idle_time(api: Api, idle_job: tuple[int, FakeNode]) -> None:
    _, node = idle_job
    pass_time(api, 60)
    beat(node, 0.0, 0.0, 0.0)
    assert idle(api) == []


def test_idle_time_before_the_job_is_not_its_own(api: Api) -> None:
    node = api.node("node-1", slots=3)
    make_idle(api, node)
    api.start(api.submit(**TWO), node)
    beat(node, 0.0, 0.0, 0.0)
    assert idle(api) == []


def test_an_idle_job_is_told_of_once_per_attempt(api: Api, idle_job: tuple[int, FakeNode]) -> None:
    job_id, _ = idle_job
    for _ in range(2):  # a second sweeper is one that was started again
        sweeper = api.sweeper()
        sweeper.sweep(1.0)
        sweeper.sweep(1_000.0)

    (told,) = [event for event in api.get(f"/jobs/{job_id}/events")["items"] if event["kind"] == "idle_holder"]
    assert "ann holds 2 GPUs (node-1 GPU 0,1) that have worked less than 5% for 40 min" in told["text"]
    assert "1.3 GPU-hours" in told["text"]


def test_a_private_idle_job_of_another_team_has_no_name(api: Api) -> None:
    node = api.node("node-1", slots=3)
    api.start(api.submit(**TWO, private=True), node)
    make_idle(api, node)

    assert [(item["job_id"], item["name"], item["owner"]) for item in idle(api, "bob")] == [
        (None, "a private job of team red", None)
    ]
    assert idle(api, "amy")[0]["owner"] == "ann"


# --- The overview ----------------------------------------------------------------------------------------------------


def test_the_overview_tells_nodes_running_and_waiting_jobs_and_what_teams_hold(api: Api) -> None:
    node = api.node("node-1", slots=3)
    running, private = api.submit(**TWO), api.submit("bob", private=True)
    for job_id in (running, private):
        api.start(job_id, node)
    waiting = api.submit(resources={"gpus": 3})
    api.place()
    beat(node, 0.5, 0.25, 1.0)
    with api.database.write() as tx:
        tx.connection.execute(update(teams).where(teams.c.name == "red").values(quota_gpus=4))

    told = api.get("/overview", "amy")

    assert [gpu["owner"] for gpu in told["nodes"][0]["gpus"]] == ["ann", "ann", None]
    assert [(job["id"], job["owner"], job["gpus"]) for job in told["running"]] == [(running, "ann", 2), (None, None, 1)]
    assert [(job["id"], job["gpus"]) for job in told["waiting"]] == [(waiting, 3)]
    assert told["waiting"][0]["reason"]["text"]
    assert (told["num_running"], told["num_waiting"], told["num_gpus_waited_for"]) == (2, 1, 3)
    held = {team["name"]: (team["held_gpus"], team["quota_gpus"]) for team in told["teams"]}
    assert held == {"red": (2, 4), "blue": (1, None)}


def test_the_overview_shows_progress_to_the_team_alone(api: Api) -> None:
    node = api.node("node-1", slots=1)
    part = api.start(api.train(resources={"gpus": 1}), node)[0]
    part.tell({"kind": "progress", "step": 3, "total_steps": 100})
    assert api.get("/overview", "amy")["running"][0]["progress"]["step"] == 3
    assert api.get("/overview", "bob")["running"][0]["progress"] is None
    with api.database.read() as connection:
        assert len(connection.execute(select(jobs)).all()) == 1
