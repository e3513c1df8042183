"""`gang replay --history` against the API itself: jobs and nodes as they were, and no key that the API does not send.

Not for: the replay (`tests/unit/replay`).
"""

from __future__ import annotations

import json
from typing import Any

import pytest
from click.testing import CliRunner, Result
from sqlalchemy import update

from gangline.client import Client
from service.db.tables import jobs
from service.db.tables import nodes as NODES
from service.replay import command
from tests.integration.service.api_server import Api, FakeNode

GPUS = 4


@pytest.fixture
def nodes(api: Api) -> list[FakeNode]:
    """Two nodes of four GPUs."""
    return [api.node(name, slots=GPUS) for name in ("node-1", "node-2")]


def ran(api: Api, nodes: list[FakeNode], *, steps: int | None = None, seconds: float = 3600.0, **members: Any) -> int:
    """A job that held its GPUs for so long and succeeded; with `steps` it reported how far it was."""
    job_id = api.submit("root", **members)
    api.place()
    (where,) = api.job(job_id)["attempt"]["nodes"]
    part = next(node for node in nodes if node.name == where["name"]).claim(api.attempt_id(job_id))
    part.started()
    if steps is not None:
        part.tell({"kind": "progress", "step": 1, "total_steps": steps})
    part.ended()
    with api.database.write() as tx:
        gpus = members["resources"]["gpus"]
        tx.connection.execute(update(jobs).where(jobs.c.id == job_id).values(gpu_seconds=gpus * seconds))
    return job_id


def replay(api: Api, monkeypatch: pytest.MonkeyPatch, *words: str) -> Result:
    """Run the command as an admin would against this server."""
    monkeypatch.setattr(command.Session, "client", Client(api.url, api.tokens["root"]))
    result = CliRunner().invoke(command.replay, ["--history", "--jobs", "1", *words], prog_name="gang replay")
    assert result.exit_code == 0, result.exception
    return result


def heading(api: Api, monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    return replay(api, monkeypatch, *words).stdout.splitlines()[0]


def test_a_history_is_the_pools_own_past(api: Api, nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch) -> None:
    ran(api, nodes, resources={"gpus": 1, "time": "2h"})
    ran(api, nodes, resources={"gpus": 1, "time": "2h"}, preemptible=True, steps=10)
    ran(api, nodes, resources={"gpus": 4, "time": "3h"})
    ran(api, nodes, resources={"gpus": 2})

    told = heading(api, monkeypatch)

    assert told.startswith("history: 4 jobs on 2 x 4 GPUs, ")
    assert "recorded limits (1 of 4 jobs have none), recorded 25% report (±20%), recorded 25% preemptible (all)" in told
    as_json = json.loads(replay(api, monkeypatch, "-o", "json").stdout)
    assert (as_json["nodes"], as_json["gpus_per_node"], as_json["jobs_without_limit"]) == (2, 4, 1)
    assert (as_json["preemptible"], as_json["preemptible_recorded"]) == (0.25, True)
    assert (as_json["reports"], as_json["reports_recorded"]) == (0.25, True)


def test_a_limit_is_recorded_with_its_extensions(
    api: Api, nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = ran(api, nodes, resources={"gpus": 1, "time": "2h"})
    waiting = api.submit(resources={"gpus": 1, "time": "2h"})
    assert api.request("POST", f"/jobs/{waiting}/limit", "root", json={"seconds": 5 * 3600}).status_code == 200
    assert [api.job(number)["limit_seconds"] for number in (job_id, waiting)] == [2 * 3600.0, 5 * 3600.0]
    assert "recorded limits, " in heading(api, monkeypatch)


def test_cordoned_nodes_count_and_nodes_that_left_do_not(
    api: Api, nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    ran(api, nodes, resources={"gpus": 1, "time": "2h"})
    api.request("POST", "/nodes/node-2/cordon", "root", json={"reason": "fan"})
    gone = api.node("node-3", slots=GPUS)
    lose(api, gone)
    assert "1 jobs on 2 x 4 GPUs" in heading(api, monkeypatch)
    assert "1 jobs on 5 x 4 GPUs" in heading(api, monkeypatch, "--nodes", "5")


def lose(api: Api, node: FakeNode) -> None:
    """The machine has been silent for too long."""
    for state in ("unreachable", "lost"):
        with api.database.write() as tx:
            tx.connection.execute(update(NODES).where(NODES.c.name == node.name).values(state=state))


def test_a_pool_whose_nodes_differ_is_told_as_what_it_is_replayed_on(
    api: Api, nodes: list[FakeNode], monkeypatch: pytest.MonkeyPatch
) -> None:
    api.node("node-3", slots=8)
    ran(api, nodes, resources={"gpus": 1, "time": "2h"})
    result = replay(api, monkeypatch)
    assert "1 jobs on 4 x 4 GPUs" in result.stdout
    assert "The nodes differ (1 x 8 + 2 x 4 GPUs): replayed on 4 x 4." in result.stderr
