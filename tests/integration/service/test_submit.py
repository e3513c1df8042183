"""Submitting: all faults at once with their places, nothing stored unless all is right."""

from __future__ import annotations

import json
import socket
from typing import Any

import httpx
import pytest

from tests.integration.service.api_server import BODY_LIMIT, Api
from trainer.plan.model_profile import profile_as_dict
from trainer.plan.recipe_profiles import recipe_profile

JOB: dict[str, Any] = {"name": "x", "run": {"command": ["true"]}}


def post(api: Api, body: Any, *, key: str | None = None, **options: Any) -> httpx.Response:
    """Submit `body`: bytes or text as YAML, anything else as JSON."""
    headers = {"Idempotency-Key": key} if key else {}
    if isinstance(body, str | bytes):
        headers["Content-Type"] = options.pop("content_type", "application/yaml")
        return api.request("POST", "/jobs", content=body, headers=headers, **options)
    return api.request("POST", "/jobs", json=body, headers=headers, **options)


def num_jobs(api: Api) -> int:
    return len(api.get("/jobs", "root")["items"])


def problems(answer: httpx.Response) -> dict[str, dict[str, Any]]:
    """Field problems by pointer."""
    assert answer.status_code == 422, answer.text
    return {problem["pointer"]: problem for problem in answer.json()["errors"]}


def test_a_dry_run_stores_nothing_and_says_why_it_would_wait(api: Api) -> None:
    api.node(slots=1)
    api.submit()
    api.place()
    before = api.snapshot()

    answer = post(api, JOB, key="k1", params={"dry_run": "true"})

    assert answer.status_code == 200
    told = answer.json()
    assert (told["valid"], told["resources"]["gpus"], told["reason"]["code"]) == (True, 1, "needs_gpus")
    assert api.snapshot() == before


# --- trainings -----------------------------------------------------------------------------------------------------

TRAINING: dict[str, Any] = {"name": "x", "run": {"recipe": "mlp"}, "train": {"steps": 10, "batch_size": 6}}


@pytest.mark.parametrize(
    ("members", "strategy", "ranks"),
    [
        ({}, "single", 1),
        ({"resources": {"gpus": 2}}, "ddp", 2),
        ({"resources": {"nodes": 2, "gpus_per_node": 2}}, "ddp", 4),
        ({"processes_per_node": 3, "parallel": {"strategy": "dp"}}, "ddp", 3),
    ],
)
def test_a_dry_run_shows_how_a_training_is_split(api: Api, members: dict[str, Any], strategy: str, ranks: int) -> None:
    for name in ("node-1", "node-2"):
        api.node(name)

    plan = post(api, {**TRAINING, **members}, params={"dry_run": "true"}).json()["plan"]

    told = {name: plan[name] for name in ("strategy", "ranks", "precision", "grad_accum_steps", "batch_size")}
    assert told == {
        "strategy": strategy, "ranks": ranks, "precision": "fp32", "grad_accum_steps": 1, "batch_size": 6,
    }  # fmt: skip
    assert plan["parallel"]["dp_replicate"] == ranks
    assert plan["memory_bytes"] > 0
    assert plan["lines"], "layout, memory, what is sent"
    assert bool(plan["notes"]) is (members.get("parallel") == {"strategy": "dp"})
    assert post(api, JOB, params={"dry_run": "true"}).json()["plan"] is None


@pytest.mark.parametrize(
    ("members", "pointer", "message"),
    [
        ({"parallel": {"strategy": "single"}}, "parallel.strategy", "the job's resources make 2"),
        ({"train": {"steps": 10, "batch_size": 1}}, "train.batch_size", "need at least one sample each: 2"),
        ({"parallel": {"grad_accum_steps": 4}}, "train.batch_size", "8"),
    ],
)
def test_what_does_not_go_with_the_number_of_ranks_is_refused_before_anything_is_stored(
    api: Api, members: dict[str, Any], pointer: str, message: str
) -> None:
    """With only `gpus: 2`, how many ranks there are is known once the gang is resolved."""
    api.node()
    answer = post(api, {**TRAINING, "resources": {"gpus": 2}, **members})

    problem = problems(answer)[pointer]
    assert message in problem["message"]
    assert problem["suggestion"]
    assert answer.json()["code"] == "invalid_spec"
    assert num_jobs(api) == 0


AUTO: dict[str, Any] = {
    "name": "x",
    "run": {"recipe": "transformer", "args": {"size": "tiny"}},
    "train": {"steps": 10, "batch_size": 8},
    "parallel": {"strategy": "auto"},
    "resources": {"gpus": 2},
}


def test_auto_is_decided_at_submission_where_the_model_is_known_and_again_for_the_gpus_of_an_attempt(api: Api) -> None:
    node = api.node()

    plan = post(api, AUTO, params={"dry_run": "true"}).json()["plan"]
    (part,) = api.start(api.submit(**AUTO), node)

    assert plan["strategy"] == "ddp"
    assert plan["why"]
    assert any(note.startswith("Strategy auto: ") for note in plan["notes"])
    training = part.plan["training"]
    assert training["parallel"] == plan["parallel"]
    assert any(note.startswith("Strategy auto: ") for note in training["notes"])


def test_auto_of_an_entry_without_a_profile_is_left_to_the_ranks(api: Api) -> None:
    node = api.node()
    entry = {**AUTO, "run": {"entry": "mine:build"}, "code": {"path": "/code"}}

    (part,) = api.start(api.submit(**entry), node)

    assert part.plan["training"]["parallel"]["strategy"] == "auto"
    assert any("decided by the ranks" in note for note in part.plan["training"]["notes"])


def test_the_profile_of_an_entry_decides_its_plan_and_a_wrong_one_is_refused(api: Api) -> None:
    api.node()
    known = recipe_profile("transformer", {"size": "tiny"})
    assert known is not None
    profile = profile_as_dict(known)
    entry = {**AUTO, "run": {"entry": "mine:build"}, "code": {"path": "/code"}, "profile": profile}

    assert post(api, entry, params={"dry_run": "true"}).json()["plan"]["strategy"] == "ddp"
    wrong = problems(post(api, {**entry, "profile": {"layers": 3}}))
    assert "is no model profile" in wrong["profile"]["message"]
    foreign = problems(post(api, {**JOB, "profile": profile}))
    assert "belongs to run.recipe and run.entry" in foreign["profile"]["message"]


@pytest.mark.parametrize(
    ("parallel", "pointer", "message"),
    [
        ({"strategy": "pipeline", "cut_points": [99]}, "parallel.cut_points", "the last layer is"),
        ({"strategy": "pipeline", "schedule": "Interleaved1F1B", "stages_per_rank": 9}, "parallel.pp", "layers"),
        ({"strategy": "tensor", "tp": 2}, None, ""),
    ],
)
def test_what_does_not_go_with_the_model_is_refused_at_submission(
    api: Api, parallel: dict[str, Any], pointer: str | None, message: str
) -> None:
    api.node()
    answer = post(api, {**AUTO, "parallel": parallel})

    if pointer is None:
        assert answer.status_code == 201
    else:
        assert message in problems(answer)[pointer]["message"]


def test_a_training_is_told_whole_to_the_node_that_claims_it(api: Api) -> None:
    node = api.node()
    job_id = api.submit(**{**TRAINING, "resources": {"gpus": 2}, "checkpoint": {"every_steps": 5, "async": False}})
    (part,) = api.start(job_id, node)

    plan, training = part.plan, part.plan["training"]
    assert (plan["run"]["kind"], plan["processes_per_node"], plan["world_size"]) == ("recipe", 2, 2)
    assert training["run"] == {"recipe": "mlp", "entry": None, "args": {}}
    assert (training["parallel"]["strategy"], training["parallel"]["dp_replicate"]) == ("ddp", 2)
    assert (training["train"]["steps"], training["train"]["batch_size"]) == (10, 6)
    assert training["checkpoint"] == {"every_steps": 5, "every_seconds": None, "keep": 3, "is_async": False}
    stored = api.job(job_id, "ann")["spec"]
    assert (stored["preemptible"], stored["training"]["train"]["steps"]) == (True, 10)


# --- all faults at once --------------------------------------------------------------------------------------------

FAULTY = """\
name: x
run:
  comand: [true]
resources:
  num_gpu: 4
  nodes: two
retry: {max: 2, on: [user_eror]}
priority: 1000
"""


def test_all_faults_of_a_yaml_file_come_at_once_with_line_place_and_suggestion(api: Api) -> None:
    found = problems(post(api, FAULTY))

    lines = {pointer: problem.get("line") for pointer, problem in found.items()}
    assert {"resources.num_gpu": 5, "resources.nodes": 6, "priority": 8, "run.comand": 3}.items() <= lines.items()
    assert found["resources.num_gpu"]["suggestion"] == "Did you mean resources.gpus?"
    assert "run.command" in found["run.comand"]["suggestion"]
    assert num_jobs(api) == 0


def test_all_faults_of_a_json_body_come_at_once_with_line_place_and_suggestion(api: Api) -> None:
    body = json.dumps({"name": "x", "run": {"comand": ["true"]}, "resources": {"num_gpu": 4, "nodes": "two"}}, indent=1)
    found = problems(post(api, body, content_type="application/json"))

    assert {pointer: problem["line"] for pointer, problem in found.items() if pointer.startswith("resources")} == {
        "resources.num_gpu": 9,
        "resources.nodes": 10,
    }


def test_a_fault_of_an_override_points_at_the_override(api: Api) -> None:
    answer = post(api, JOB, params=[("set", "resources.nodes=two"), ("set", "tags.a=b")])
    assert list(problems(answer)) == ["--set resources.nodes"]


@pytest.mark.parametrize("value", [-1, 0.5, "two", 10**9, True, [1]])
@pytest.mark.parametrize("key", ["gpus", "gpus_per_node"])
def test_o37_a_number_of_gpus_that_is_none_is_refused_with_the_field_named(api: Api, key: str, value: Any) -> None:
    assert f"resources.{key}" in problems(post(api, {**JOB, "resources": {key: value}}))
    assert num_jobs(api) == 0


def test_o37_a_job_may_ask_for_no_gpu(api: Api) -> None:
    node = api.node()
    job_id = api.submit(resources={"gpus": 0})
    (part,) = api.start(job_id, node)
    assert (part.plan["gpus"], api.held_gpus(), api.job(job_id)["resources"]["gpus"]) == ([], [], 0)


# --- names ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["Ünï/côdé 漢字", "🚀 run", "-rf", "..", "a b", "Robert'); DROP TABLE jobs;--", "x" * 200, "%s{0}"]
)
def test_o38_an_odd_name_is_shown_unchanged_everywhere(api: Api, name: str) -> None:
    job_id = api.submit(name=name, tags={name: name})

    assert api.job(job_id)["name"] == name
    assert api.get("/jobs", params={"name": name})["items"][0]["id"] == job_id
    assert api.get("/jobs", params={"tag": f"{name}={name}"})["items"][0]["tags"] == {name: name}
    part = api.start(job_id, api.node())[0]
    assert part.plan["job_name"] == name
    assert not [path for path in api.state.settings.data_folder.rglob("*") if name in path.name and len(name) > 2]


@pytest.mark.parametrize("name", ["", " ", "x" * 201, "a\nb", "a\0b", "a\u202eb", "\udcff", "\x1b[2J"])
def test_o38_a_name_that_shows_as_something_else_is_refused(api: Api, name: str) -> None:
    answer = post(api, json.dumps({**JOB, "name": name}), content_type="application/json")
    assert "name" in problems(answer)
    assert num_jobs(api) == 0


PLACES: dict[str, Any] = {
    "team": lambda text: {"team": text},
    "code.path": lambda text: {"code": {"path": "/" + text}},
    "python": lambda text: {"run": {"script": "x.py"}, "code": {"path": "/x"}, "python": text},
    "run.script": lambda text: {"run": {"script": text}, "code": {"path": "/x"}},
    "run.args": lambda text: {"run": {"script": "x.py", "args": [text]}, "code": {"path": "/x"}},
    "run.command": lambda text: {"run": {"command": [text]}},
    "run.command as one text": lambda text: {"run": {"command": text}},
    "resources.gpu": lambda text: {"resources": {"gpu": text}},
    "env": lambda text: {"env": {"A": text}},
    "env name": lambda text: {"env": {text: "a"}},
    "tags": lambda text: {"tags": {"a": text}},
    "tag name": lambda text: {"tags": {text: "a"}},
    "an unknown key": lambda text: {text: 1},
}


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("text", ["a\0b", "a\udcffb"], ids=["NUL", "half a character"])
def test_o38_what_no_database_stores_is_refused_wherever_it_stands(api: Api, place: str, text: str) -> None:
    body = json.dumps({**JOB, **PLACES[place](text)})
    answer = post(api, body, content_type="application/json")
    assert 400 <= answer.status_code < 500, answer.text
    assert num_jobs(api) == 0


# --- too much ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("is_chunked", [False, True], ids=["declared", "chunked"])
@pytest.mark.parametrize("path", ["/jobs", "/jobs/1/cancel", "/tokens"])
def test_a_body_over_the_limit_is_refused(api: Api, is_chunked: bool, path: str) -> None:
    body = b" " * (BODY_LIMIT + 1)
    chunks = (body[start : start + 4096] for start in range(0, len(body), 4096))
    answer = api.request("POST", path, content=chunks if is_chunked else body)
    assert (answer.status_code, answer.json()["code"], answer.json()["limit"]) == (413, "body_too_large", BODY_LIMIT)
    assert num_jobs(api) == 0


def test_a_body_that_is_declared_over_the_limit_is_refused_before_it_is_sent(api: Api) -> None:
    address = httpx.URL(api.url)
    lines = ("POST /api/v1/jobs HTTP/1.1", "Host: x", f"Authorization: Bearer {api.tokens['ann']}")
    head = "\r\n".join((*lines, f"Content-Length: {10**9}", "", ""))
    with socket.create_connection((address.host, address.port or 0), timeout=30) as connection:
        connection.sendall(head.encode())
        assert connection.recv(4096).startswith(b"HTTP/1.1 413 ")


def test_a_body_of_just_the_limit_is_taken(api: Api) -> None:
    body = json.dumps(JOB).encode()
    assert post(api, body + b" " * (BODY_LIMIT - len(body))).status_code == 201


@pytest.mark.parametrize(
    "body",
    ["[" * 20_000, '{"a":' * 5_000, "{" * 20_000, '{"name": ' + "9" * 10_000 + "}", "", "null", "[]", '"x"', "\xff"],
    ids=["deep list", "deep object", "braces", "a long number", "nothing", "null", "a list", "a text", "not UTF-8"],
)
@pytest.mark.parametrize("content_type", ["application/json", "application/yaml", "text/html"])
def test_a_body_that_is_no_job_is_refused(api: Api, body: str, content_type: str) -> None:
    answer = post(api, body.encode("latin-1"), content_type=content_type)
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_spec")
    assert answer.json()["errors"][0]["message"]


# --- what the pool and the caller allow ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("resources", "fix"),
    [
        ({"gpus_per_node": 5}, "resources.gpus_per_node to at most 4"),
        ({"nodes": 3, "gpus_per_node": 1}, "resources.nodes to at most 2"),
        ({"gpus": 100}, "resources.gpus to 4"),
        ({"gpu": "H100"}, "resources.gpu to a type that the pool has"),
        ({"cpus": 64}, "resources.cpus to at most 8"),
        ({"memory": "1TiB"}, "resources.memory to at most 8GiB"),
    ],
)
def test_o20_what_can_never_run_is_refused_with_what_would_fit(api: Api, resources: Any, fix: str) -> None:
    api.node("node-1", slots=4)
    api.node("node-2", slots=1)

    answer = post(api, {**JOB, "resources": resources})

    assert (answer.status_code, answer.json()["code"]) == (422, "does_not_fit")
    assert fix in answer.json()["fix"], answer.json()
    assert num_jobs(api) == 0


def test_o20_a_pool_without_nodes_takes_any_job(api: Api) -> None:
    job_id = api.submit(resources={"gpus": 100})
    api.place()
    assert api.get(f"/jobs/{job_id}/why")["reason"]["code"] == "no_nodes"


@pytest.mark.parametrize(
    ("members", "pointer"),
    [
        ({"stop_grace": "2h"}, "stop_grace"),
        ({"on_disconnect": "stop", "stop_grace": "118s"}, "on_disconnect"),
        ({"code": {"bundle": "sha256:" + "a" * 64}}, "code.bundle"),
    ],
)
def test_what_the_server_does_not_allow_is_a_fault_with_its_place(api: Api, members: Any, pointer: str) -> None:
    found = problems(post(api, {**JOB, **members}))
    assert found[pointer]["suggestion"]


@pytest.mark.parametrize("team", ["blue", "none"])
def test_a_job_for_a_team_that_one_is_not_in_is_refused(api: Api, team: str) -> None:
    answer = post(api, {**JOB, "team": team})
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert "red" in answer.json()["detail"]


def test_o23_the_stored_spec_is_the_same_in_every_attempt(api: Api) -> None:
    members: dict[str, Any] = {
        "env": {"A": "ä"}, "priority": 3, "tags": {"p": "x"}, "retry": {"max": 5}, "stop_grace": "7s",
        "resources": {"gpus": 1, "time": "1h", "cpus": 1.5}, "preemptible": True, "on_disconnect": "stop",
    }  # fmt: skip
    node = api.node()
    job_id = api.submit(**members)
    spec = api.job(job_id)["spec"]
    plans = []
    for number in range(3):
        part = api.start(job_id, node)[0]
        plans.append({k: v for k, v in part.plan.items() if k not in ("attempt_id", "attempt_number", "start_reason")})
        assert (part.plan["attempt_number"], api.job(job_id)["spec"]) == (number + 1, spec)
        part.ended(1)
    assert plans[0] == plans[1] == plans[2]
    assert (plans[0]["time_limit_seconds"], plans[0]["stop_grace_seconds"]) == (3600, 7)
