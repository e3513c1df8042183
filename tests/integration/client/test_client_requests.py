"""What the client sends and how it bears a bad network: keyed submits, retries, long polls, bundles, pages."""

from __future__ import annotations

import json
import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from gangline.client import (
    Client,
    GanglineError,
    InvalidSpec,
    NotAllowed,
    NotFound,
    Refused,
    ServerFailed,
    TimedOut,
    Unreachable,
)
from gangline.client.http import BACK_OFF_SECONDS
from tests.integration.client.fake_rest_server import TOKEN, Answer, Cut, FakeServer, a_job, a_problem
from tests.support.wait import wait_until

SPEC = {"name": "gpt", "run": {"command": ["true"]}, "resources": {"gpus": 1}}


# --- Submitting ----------------------------------------------------------------------------------------------------


def test_o14_a_submit_whose_answer_is_lost_is_asked_again_with_its_key_and_makes_one_job(
    server: FakeServer, client: Client
) -> None:
    server.cut_after_acting["POST /jobs"] = 3

    job = client.submit(SPEC)

    posts = server.requests_to("POST /jobs")
    assert len(posts) == 4
    assert len({post.headers["idempotency-key"] for post in posts}) == 1
    assert len({post.body for post in posts}) == 1
    assert list(server.jobs) == [job.id]


def test_each_submit_has_a_key_of_its_own_unless_one_is_given(server: FakeServer, client: Client) -> None:
    first, second = client.submit(SPEC), client.submit(SPEC)
    third, fourth = client.submit(SPEC, key="sweep-7"), client.submit(SPEC, key="sweep-7")

    assert len({first.id, second.id, third.id}) == 3
    assert third.id == fourth.id
    assert server.requests_to("POST /jobs")[-1].headers["idempotency-key"] == "sweep-7"


def test_retries_are_bounded(server: FakeServer, client: Client) -> None:
    server.cut_after_acting["POST /jobs"] = 1000

    with pytest.raises(Unreachable) as caught:
        client.submit(SPEC)

    assert len(server.requests_to("POST /jobs")) == len(BACK_OFF_SECONDS) + 1
    assert server.url in caught.value.detail
    assert caught.value.fix


def test_a_submission_still_in_progress_is_asked_again(server: FakeServer, client: Client) -> None:
    answers = iter([a_problem(409, "idempotency_in_progress", "the first one is still running"), None])
    server.overrides["POST /jobs"] = lambda request: next(answers)

    assert client.submit(SPEC).id == 12


def test_a_post_without_a_key_is_never_sent_twice(server: FakeServer, client: Client) -> None:
    def lost(request: object) -> Answer:
        raise Cut

    server.overrides["POST /users"] = lost

    with pytest.raises(Unreachable):
        client.create_user("maria")

    assert len(server.requests_to("POST /users")) == 1


def test_a_server_that_is_not_there_is_named_with_the_fix(tmp_path: Path) -> None:
    with Client("http://127.0.0.1:9", TOKEN, environ={"GANGLINE_CONFIG_FOLDER": str(tmp_path)}) as client:
        client.transport._sleep = lambda seconds: None
        with pytest.raises(Unreachable, match=r"http://127\.0\.0\.1:9"):
            client.me()


# --- The job file and its code -------------------------------------------------------------------------------------


def a_folder(path: Path, job: str) -> Path:
    path.mkdir()
    (path / "train.py").write_text("print('hello')\n")
    (path / "job.yaml").write_text(job)
    return path / "job.yaml"


def test_a_job_file_without_code_brings_its_folder(server: FakeServer, client: Client, tmp_path: Path) -> None:
    file = a_folder(tmp_path / "gpt", "name: gpt\nrun: {script: train.py}  # ours\n")

    client.submit(file)
    client.submit(str(file))

    (digest,) = server.bundles
    assert server.requests_to("POST /jobs")[0].body.decode() == (
        f'name: gpt\nrun: {{script: train.py}}  # ours\ncode: {{"bundle": "{digest}"}}\n'
    )
    assert len(server.requests_to(f"PUT /bundles/{digest}")) == 1, "unchanged code is sent once"


def test_a_relative_code_path_is_packed_and_every_other_line_keeps_its_number(
    server: FakeServer, client: Client, tmp_path: Path
) -> None:
    (tmp_path / "code").mkdir()
    (tmp_path / "code" / "train.py").write_text("")
    job = tmp_path / "job.yaml"
    job.write_text("name: gpt\ncode:\n  # here it is\n  path: code\n\nrun:\n  script: train.py\n")

    client.submit(job)

    sent = server.requests_to("POST /jobs")[0].body.decode()
    assert "path: code" not in sent
    assert sent.split("\n")[5:7] == ["run:", "  script: train.py"]
    assert server.requests_to("POST /jobs")[0].headers["content-type"] == "application/yaml"


@pytest.mark.parametrize(
    "code", ["code: {path: /shared/gpt}", 'code: {bundle: "sha256:00"}', "code: {}"], ids=["path", "bundle", "nothing"]
)
def test_code_that_is_said_is_left_as_it_is(server: FakeServer, client: Client, tmp_path: Path, code: str) -> None:
    file = a_folder(tmp_path / "gpt", f"name: gpt\n{code}\nrun: {{script: train.py}}\n")

    client.submit(file)

    assert server.requests_to("POST /jobs")[0].body == file.read_bytes()
    assert not server.bundles


def test_overrides_go_to_the_server(server: FakeServer, client: Client) -> None:
    client.submit(SPEC, set={"resources.gpus": 4, "env.MODE": "fast"})

    assert server.requests_to("POST /jobs")[0].params["set"] == ["resources.gpus=4", 'env.MODE="fast"']


def test_a_check_sends_no_code_unless_the_server_insists(server: FakeServer, client: Client, tmp_path: Path) -> None:
    file = a_folder(tmp_path / "gpt", "name: gpt\nrun: {script: train.py}\n")

    assert client.check(file)["valid"] is True
    assert not server.bundles
    assert not server.jobs

    refusals = iter(
        [
            a_problem(422, "invalid_spec", "1 problem", errors=[{"pointer": "code.bundle", "message": "unknown"}]),
            None,
        ]
    )
    server.overrides["POST /jobs"] = lambda request: next(refusals)
    assert client.check(file)["valid"] is True
    assert len(server.bundles) == 1


def test_a_script_that_the_folder_lacks_is_told_together_with_the_faults_that_the_server_finds(
    server: FakeServer, client: Client, tmp_path: Path
) -> None:
    file = a_folder(tmp_path / "gpt", "name: gpt\nrun: {script: trian.py}\nresources: {num_gpu: 2}\n")
    faults = [{"pointer": "resources.num_gpu", "message": "unknown key"}, {"pointer": "code.bundle", "message": "?"}]
    server.overrides["POST /jobs"] = lambda request: a_problem(422, "invalid_spec", "2 problems", errors=faults)

    with pytest.raises(InvalidSpec, match=r"trian\.py") as caught:
        client.submit(file)

    assert [problem.pointer for problem in caught.value.errors] == ["run.script", "resources.num_gpu"]
    assert not server.bundles
    assert not server.jobs


# --- Reading -------------------------------------------------------------------------------------------------------


def test_lists_page_by_themselves_and_only_as_far_as_needed(server: FakeServer, client: Client) -> None:
    for job_id in range(1, 121):
        server.add(a_job(job_id))

    assert [job.id for job in client.jobs()] == list(range(120, 0, -1))
    assert len(server.requests_to("GET /jobs")) == 3
    assert [job.id for job in client.jobs(limit=2)] == [120, 119]
    assert len(server.requests_to("GET /jobs")) == 4


def test_a_job_is_found_by_id_by_name_and_as_my_last(server: FakeServer, client: Client) -> None:
    server.add(a_job(7, name="bert"))
    server.add(a_job(9, name="bert"))
    server.add(a_job(11, name="gpt"))

    assert client.job(7).id == 7
    assert client.job("7").id == 7
    assert client.job("bert").id == 9
    assert client.job("-1").id == 11
    assert client.job("-2").id == 9
    with pytest.raises(NotFound):
        client.job("nobody")
    with pytest.raises(NotFound):
        client.job("-9")
    with pytest.raises(NotFound):
        client.job(99)


def test_unknown_fields_are_ignored_and_kept_in_raw(server: FakeServer, client: Client) -> None:
    server.add(a_job(12))

    job = client.job(12)

    assert job.submitted_at is not None
    assert job.submitted_at.isoformat() == "2026-01-05T10:00:00+00:00"
    assert job.raw["a_field_of_a_newer_server"] == {"ignored": True}


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (401, "unauthorized", NotAllowed),
        (403, "forbidden", NotAllowed),
        (404, "not_found", NotFound),
        (409, "conflict", Refused),
        (422, "does_not_fit", Refused),
        (422, "invalid_spec", InvalidSpec),
        (500, "error", ServerFailed),
        (503, "database_unavailable", Unreachable),
        (418, "a_code_of_a_newer_server", ServerFailed),
    ],
)
def test_a_problem_becomes_its_class_with_code_and_fix(
    server: FakeServer, client: Client, status: int, code: str, expected: type[GanglineError]
) -> None:
    server.overrides["GET /me"] = lambda request: a_problem(status, code, "what happened", fix="what to do")

    with pytest.raises(expected) as caught:
        client.me()

    assert (caught.value.code, caught.value.fix, caught.value.detail) == (code, "what to do", "what happened")
    assert caught.value.problem["status"] == status


def test_a_page_of_a_proxy_is_no_answer(server: FakeServer, client: Client) -> None:
    server.overrides["GET /me"] = lambda request: Answer(body=b"<html>", headers={"Content-Type": "text/html"})

    with pytest.raises(ServerFailed, match="text/html"):
        client.me()


# --- Waiting -------------------------------------------------------------------------------------------------------


def test_wait_holds_one_request_until_the_job_changes(server: FakeServer, client: Client) -> None:
    server.add(a_job(12))
    waiting = _in_thread(lambda: client.wait(12))
    wait_until(lambda: _polls(server), 10, "a long poll")

    server.finish(12, "succeeded", "succeeded")
    job = waiting()

    assert (job.state, job.outcome) == ("succeeded", "succeeded")
    (poll,) = _polls(server)
    assert poll.headers["if-none-match"] == '"1"'
    assert int(poll.params["wait"][0]) >= 20


def test_wait_ends_by_its_own_timeout_and_says_that_the_job_goes_on(server: FakeServer, client: Client) -> None:
    server.add(a_job(12))

    with pytest.raises(TimedOut, match="running") as caught:
        client.wait(12, timeout=0.2)

    assert "goes on" in caught.value.fix
    assert server.requests_to("POST /jobs/12/cancel") == []


def test_wait_outlasts_a_server_that_goes_away_for_a_while(
    server: FakeServer, client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gangline.client.follow.PAUSES_SECONDS", (0.0,))
    troubles: list[str] = []
    client.on_trouble = troubles.append
    server.add(a_job(12))
    waiting = _in_thread(lambda: client.wait(12))
    wait_until(lambda: _polls(server), 10, "a long poll")

    server.cut_after_acting["GET /jobs/12"] = 3 * (len(BACK_OFF_SECONDS) + 1)
    server.update(12, state="stopping")
    server.finish(12, "cancelled", "cancelled")

    assert waiting().state == "cancelled"
    assert len(troubles) == 1, "an outage is told once, not at each try"


def _polls(server: FakeServer) -> list[Any]:
    return [request for request in server.requests_to("GET /jobs/12") if "wait" in request.params]


def _in_thread(call):  # type: ignore[no-untyped-def]  # a small future
    results: list = []
    thread = threading.Thread(target=lambda: results.append(call()), daemon=True)
    thread.start()

    def result():  # type: ignore[no-untyped-def]
        thread.join(30)
        assert results, "the call did not return"
        return results[0]

    return result


def test_the_token_goes_to_no_other_server_than_the_stored_one(tmp_path: Path) -> None:
    config = {"url": "https://gpu.example", "token": TOKEN}
    (tmp_path / "config.json").write_text(json.dumps(config))
    environ = {"GANGLINE_CONFIG_FOLDER": str(tmp_path)}

    assert Client(environ=environ).settings.token == TOKEN
    assert Client("https://elsewhere.example", environ=environ).settings.token is None
    assert Client("https://gpu.example/", environ=environ).settings.token == TOKEN


def test_no_request_is_redirected_elsewhere(server: FakeServer, client: Client) -> None:
    server.overrides["GET /me"] = lambda request: Answer(302, None, {"Location": "http://127.0.0.1:9/"})

    with pytest.raises(GanglineError):
        client.me()
    assert client.transport.http().follow_redirects is False
    assert isinstance(client.transport.http(), httpx.Client)


def test_checkpoints_come_as_records_the_one_to_resume_from_first(server: FakeServer, client: Client) -> None:
    item = {"step": 20, "samples_seen": 640, "accepted_at": "2026-01-05T10:05:00.000Z", "attempt": 1, "num_bytes": 9,
            "path": "attempt-7/step-00000020", "shared_folder_id": None, "nodes": ["node-1", "node-2"]}  # fmt: skip
    server.overrides["GET /jobs/12/checkpoints"] = lambda request: Answer(body={"items": [item], "next": None})
    (found,) = client.checkpoints(12)

    assert (found.step, found.nodes, found.shared_folder_id) == (20, ("node-1", "node-2"), None)
    assert found.accepted_at is not None
    assert found.raw == item


def test_a_requeue_whose_answer_is_lost_is_not_sent_again(server: FakeServer, client: Client) -> None:
    """It would stop the attempt that had started again in between."""
    server.add(a_job(12))
    server.cut_after_acting["POST /jobs/12/requeue"] = 1
    with pytest.raises(Unreachable):
        client.requeue(12)

    assert len(server.requests_to("POST /jobs/12/requeue")) == 1
