"""A job with a range of GPUs: each attempt has a size of its own, the largest that is free when it starts."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select

from service.db.tables import attempt_nodes, attempts
from tests.integration.service.api_server import Api, FakeNode, Supervisor

RANGE: dict[str, Any] = {"gpus": {"min": 2, "max": 4}}
TRAINING: dict[str, Any] = {"run": {"recipe": "mlp"}, "train": {"steps": 100, "batch_size": 32}}


def dry_run(api: Api, **members: Any) -> dict[str, Any]:
    """The answer to a dry run of a training."""
    body = {"name": "x", **TRAINING, **members}
    answer = api.request("POST", "/jobs", json=body, params={"dry_run": "true"})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def size_of(part: Supervisor) -> tuple[int, int, int, int]:
    """Nodes, ranks of each, ranks in all and copies of the model, as the node is told."""
    plan = part.plan
    return (
        plan["num_nodes"],
        plan["processes_per_node"],
        plan["world_size"],
        plan["training"]["parallel"]["dp_replicate"],
    )


def requeued(api: Api, job_id: int, *parts: Supervisor) -> None:
    """Stop the attempt at a checkpoint; the job waits again."""
    assert api.requeue(job_id).status_code == 202
    for part in parts:
        assert part.ended(75, stopped_by_us=True, result="preempted").status_code == 200
    assert api.job(job_id)["state"] == "waiting"


# --- Submitting ----------------------------------------------------------------------------------------------------


def test_a_dry_run_tells_every_size_and_the_plan_of_the_largest(api: Api) -> None:
    api.node(slots=4)
    told = dry_run(api, resources={"gpus": {"min": 2, "max": 8}})

    assert told["resources"] == {
        "nodes": 1, "gpus_per_node": 4, "gpus": 4, "min_gpus": 2, "gpu": None, "sizes": [4, 3, 2],
    }  # fmt: skip
    assert (told["plan"]["ranks"], told["plan"]["notes"], told["reason"]) == (4, [], None)


def test_sizes_over_which_a_training_cannot_be_split_are_left_out_and_named(api: Api) -> None:
    api.node(slots=4)
    told = dry_run(api, resources={"gpus": {"min": 1, "max": 4}}, train={"steps": 100, "batch_size": 2})

    assert told["resources"]["sizes"] == [2, 1]
    (note,) = told["plan"]["notes"]
    assert note.startswith("It never runs on 4 and 3 GPUs: train.batch_size is 2")


def test_a_training_that_no_size_can_hold_is_refused_with_the_problems_of_the_largest(api: Api) -> None:
    api.node(slots=4)
    body = {"name": "x", **TRAINING, "resources": {"gpus": {"min": 3, "max": 4}}}
    answer = api.request("POST", "/jobs", json={**body, "train": {"steps": 100, "batch_size": 2}})

    assert answer.status_code == 422
    (problem,) = answer.json()["errors"]
    assert problem["pointer"] == "train.batch_size"
    assert "4" in problem["message"]
    assert api.get("/jobs", "root")["items"] == []


def test_a_range_of_which_nothing_could_ever_run_here_is_refused(api: Api) -> None:
    api.node(slots=2)
    answer = api.request("POST", "/jobs", json={"name": "x", **TRAINING, "resources": {"gpus": {"min": 3, "max": 4}}})

    assert (answer.status_code, answer.json()["code"]) == (422, "does_not_fit")
    assert answer.json()["fix"] == "Set resources.gpus.min to at most 2."


def test_a_waiting_job_shows_the_range_and_no_size(api: Api) -> None:
    api.node(slots=4)
    api.submit(resources={"gpus": 3})
    job_id = api.train(resources=RANGE)
    api.place()

    job = api.job(job_id)
    assert (job["resources"]["gpus"], job["resources"]["min_gpus"], job["size"]) == (4, 2, None)
    assert job["reason"]["text"] == "It needs 2 to 4 GPUs; jobs ahead of it in the queue take what is free."
    (waiting,) = [one for one in api.get(f"/jobs/{api.submit()}/why")["ahead"]["jobs"] if one["id"] == job_id]
    assert (waiting["gpus"], waiting["min_gpus"]) == (4, 2)


def test_a_job_of_one_number_has_no_range(api: Api) -> None:
    node = api.node()
    job_id = api.train(resources={"gpus": 2})
    assert api.job(job_id)["resources"] == {"nodes": 1, "gpus_per_node": 2, "gpus": 2, "min_gpus": None, "gpu": None}
    api.start(job_id, node)
    assert api.job(job_id)["size"] == {"nodes": 1, "gpus_per_node": 2, "gpus": 2, "processes_per_node": 2}


# --- Each attempt has a size of its own ----------------------------------------------------------------------------


def test_a_job_starts_on_all_that_is_free_and_resumes_on_less_under_a_plan_for_that(api: Api) -> None:
    node = api.node(slots=4)
    job_id = api.train(resources=RANGE)
    (first,) = api.start(job_id, node)
    assert size_of(first) == (1, 4, 4, 4)
    assert (first.plan["cpus"], len(first.plan["gpus"])) == (4.0, 4)
    first.checkpoint(10)

    other = api.submit(resources={"gpus": 2}, priority=10)
    requeued(api, job_id, first)
    assert api.place() == 2
    (second,) = [node.claim(api.attempt_id(job_id))]

    assert size_of(second) == (1, 2, 2, 2)
    assert (second.plan["cpus"], len(second.plan["gpus"])) == (2.0, 2)
    assert [point["step"] for point in second.plan["training"]["resume_from"]] == [10]
    job = api.job(job_id)
    assert job["size"] == {"nodes": 1, "gpus_per_node": 2, "gpus": 2, "processes_per_node": 2}
    assert job["resources"]["gpus"] == 4, "what it asks for stays"
    held = {one["id"]: one["gpus"] for one in api.get(f"/jobs/{api.submit()}/why")["holders"] if one["id"]}
    assert (held[job_id], held[other]) == (2, 2)


def test_a_job_that_resumes_may_also_get_more(api: Api) -> None:
    node = api.node(slots=4)
    holder = api.submit(resources={"gpus": 1})
    (held,) = api.start(holder, node)
    job_id = api.train(resources=RANGE)
    (first,) = api.start(job_id, node)
    assert size_of(first) == (1, 3, 3, 3)
    held.ended()
    requeued(api, job_id, first)

    (second,) = api.start(job_id, node)
    assert size_of(second) == (1, 4, 4, 4)
    told = [event["text"] for event in api.get(f"/jobs/{job_id}/events")["items"] if event["kind"] == "job_starting"]
    assert told == [
        "Attempt 1 starts with 3 GPUs on node-1 GPU 1,2,3.",
        "Attempt 2 starts with 4 GPUs on node-1 GPU 0,1,2,3.",
    ]


def spread(api: Api, **members: Any) -> tuple[int, list[FakeNode], list[Supervisor]]:
    """A job of 2 to 2 GPUs, which would take one node of two, on two nodes with one free GPU each."""
    nodes = [api.node(name) for name in ("node-1", "node-2")]
    for _ in nodes:
        api.submit(resources={"gpus": 1, "cpus": 5})
    assert api.place() == 2
    job_id = api.train(resources={"gpus": {"min": 2, "max": 2}}, **members)
    return job_id, nodes, api.start(job_id, *nodes)


def test_one_size_has_several_layouts_and_each_rank_belongs_to_its_node(api: Api) -> None:
    job_id, _, parts = spread(api)
    assert [size_of(part) for part in parts] == [(2, 1, 2, 2)] * 2
    assert [part.plan["first_rank"] for part in parts] == [0, 1]
    assert api.job(job_id)["resources"]["nodes"] == 1, "its first choice was one node"

    assert parts[1].append(b"hello\n", 0, rank_number=1).status_code == 200
    assert parts[0].append(b"hello\n", 0, rank_number=1).status_code == 422
    assert api.get(f"/jobs/{job_id}/logs?rank=1")["text"] == "hello\n"


def test_an_attempt_runs_once_the_nodes_that_it_has_run(api: Api) -> None:
    """Its largest layout has one node: one start report must not be enough."""
    nodes = [api.node(name) for name in ("node-1", "node-2")]
    for _ in nodes:
        api.submit(resources={"gpus": 1, "cpus": 5})
    api.place()
    job_id = api.train(resources={"gpus": {"min": 2, "max": 2}})
    api.place()
    parts = [node.claim(api.attempt_id(job_id)) for node in nodes]
    parts[0].started()
    assert api.job(job_id)["state"] == "starting"
    parts[1].started()
    assert api.job(job_id)["state"] == "running"


def test_the_logs_of_an_attempt_are_those_of_its_own_ranks(api: Api) -> None:
    node = api.node(slots=4)
    job_id = api.train(resources=RANGE)
    (first,) = api.start(job_id, node)
    for rank in first.ranks:
        first.append(f"first {rank}\n".encode(), 0, rank_number=rank)
    api.submit(resources={"gpus": 2}, priority=10)
    requeued(api, job_id, first)
    api.place()
    second = node.claim(api.attempt_id(job_id))
    second.append(b"second\n", 0)
    second.ended(result="succeeded")
    assert api.job(job_id)["state"] == "succeeded"

    with api.client.stream("GET", f"{api.url}/api/v1/jobs/{job_id}/logs/stream?rank=all", headers={
        "Authorization": f"Bearer {api.tokens['ann']}"}) as stream:  # fmt: skip
        text = "".join(stream.iter_text())
    assert '"attempt": 1, "ranks": [0, 1, 2, 3]' in text
    assert '"attempt": 2, "ranks": [0, 1]' in text


def test_each_attempt_keeps_the_size_that_it_had_and_holds_no_more(api: Api) -> None:
    node = api.node(slots=4)
    job_id = api.train(resources=RANGE)
    (first,) = api.start(job_id, node)
    api.submit(resources={"gpus": 2}, priority=10)
    requeued(api, job_id, first)
    api.place()
    with api.database.read() as connection:
        rows = connection.execute(
            select(attempts.c.number, attempts.c.num_nodes, attempts.c.gpus_per_node, attempt_nodes.c.cpus)
            .join(attempt_nodes, attempt_nodes.c.attempt_id == attempts.c.id)
            .where(attempts.c.job_id == job_id)
            .order_by(attempts.c.number)
        ).all()
    assert [tuple(row) for row in rows] == [(1, 1, 4, 4.0), (2, 1, 2, 2.0)]
    assert len(api.held_gpus()) == 4


# --- Where it resumes ----------------------------------------------------------------------------------------------


def test_a_job_resumes_on_fewer_of_the_nodes_that_hold_its_checkpoint_and_on_no_other(api: Api) -> None:
    nodes = [api.node(name) for name in ("node-1", "node-2")]
    job_id = api.train(resources=RANGE)
    parts = api.start(job_id, *nodes)
    assert size_of(parts[0]) == (2, 2, 4, 4)
    parts[0].checkpoint(10)
    requeued(api, job_id, *parts)
    api.node("node-3", slots=4)
    api.submit(resources={"gpus": 2}, priority=10)  # takes all of node-1

    (second,) = api.start(job_id, nodes[1])
    assert size_of(second) == (1, 2, 2, 2)
    assert [point["step"] for point in second.plan["training"]["resume_from"]] == [10]
    second.checkpoint(20)
    (newest, _) = api.get(f"/jobs/{job_id}/checkpoints")["items"]
    assert (newest["step"], newest["nodes"]) == (20, ["node-2"])


def seeing(api: Api, name: str, folder: str) -> FakeNode:
    """A node whose agent tells of this shared folder."""
    node = api.node(name)
    node.inventory["shared_folder_id"] = folder
    node.beat()
    return node


SPLIT: dict[str, Any] = {
    "run": {"recipe": "transformer"},
    "train": {"steps": 100, "batch_size": 64},
    "resources": RANGE,
}


@pytest.mark.parametrize("parallel", [{"strategy": "fsdp"}, {"pp": 2}], ids=repr)
def test_a_model_is_split_over_nodes_only_where_its_checkpoints_can_be_whole(
    api: Api, parallel: dict[str, Any]
) -> None:
    blind = [api.node(name) for name in ("node-1", "node-2")]
    job_id = api.submit(**SPLIT, parallel=parallel)
    (alone,) = api.start(job_id, blind[0])
    assert (alone.plan["num_nodes"], alone.plan["world_size"]) == (1, 2), "node-2 is free, and sees no folder"
    api.submit(resources={"gpus": 2})
    api.place()

    sharing = [seeing(api, name, "nfs") for name in ("node-3", "node-4")]
    parts = api.start(api.submit(**SPLIT, parallel=parallel), *sharing)
    assert [part.plan["world_size"] for part in parts] == [4, 4]
    assert [part.plan["shared_folder_id"] for part in parts] == ["nfs", "nfs"]


def test_a_model_of_which_every_node_has_all_parts_needs_no_shared_folder(api: Api) -> None:
    nodes = [api.node(name) for name in ("node-1", "node-2")]
    parts = api.start(api.submit(**SPLIT, parallel={"strategy": "tensor"}), *nodes)
    assert [part.plan["world_size"] for part in parts] == [4, 4]


@pytest.mark.parametrize("run", [{"command": ["true"]}, {"script": "train.py"}], ids=["command", "script"])
def test_a_script_or_command_may_have_a_range_too(api: Api, run: dict[str, Any]) -> None:
    node = api.node(slots=4)
    api.start(api.submit(resources={"gpus": 1}), node)
    job_id = api.submit(run=run, code={"path": "/shared"}, resources=RANGE)
    (part,) = api.start(job_id, node)

    processes = 1 if "command" in run else 3
    assert (part.plan["processes_per_node"], part.plan["world_size"], len(part.plan["gpus"])) == (
        processes,
        processes,
        3,
    )
