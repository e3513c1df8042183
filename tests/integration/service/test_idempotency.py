"""An Idempotency-Key: a submission that is sent again is one job with one answer, also at once and after a restart."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import httpx
import pytest

from service.app import create_state
from tests.integration.service.api_server import Api, serve, settings_for

JOB: dict[str, Any] = {"name": "x", "run": {"command": ["true"]}}


def post(api: Api, body: Any, *, key: str, who: str = "ann", **options: Any) -> httpx.Response:
    """Submit `body` under a key."""
    return api.request("POST", "/jobs", who, json=body, headers={"Idempotency-Key": key}, **options)


def num_jobs(api: Api) -> int:
    return len(api.get("/jobs", "root")["items"])


def test_o14_the_same_key_gets_the_first_answer(api: Api) -> None:
    first, *again = [post(api, JOB, key="k1") for _ in range(6)]

    assert first.status_code == 201
    assert "idempotent-replayed" not in first.headers
    assert {(answer.status_code, answer.text, answer.headers["location"]) for answer in again} == {
        (201, first.text, first.headers["location"])
    }
    assert {answer.headers["idempotent-replayed"] for answer in again} == {"true"}
    assert num_jobs(api) == 1


def test_o14_the_same_key_eight_times_at_once_is_one_job(api: Api) -> None:
    answers: list[httpx.Response] = []
    barrier = threading.Barrier(8)

    def send() -> None:
        barrier.wait()
        answers.append(post(api, JOB, key="k1"))

    senders = [threading.Thread(target=send) for _ in range(8)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()

    assert {answer.status_code for answer in answers} == {201}
    assert len({answer.text for answer in answers}) == 1
    assert num_jobs(api) == 1
    assert len(api.get(f"/jobs/{answers[0].json()['id']}/events")["items"]) == 1


@pytest.mark.parametrize("body", [{**JOB, "name": "y"}, {"name": "x"}], ids=["another job", "no job"])
def test_o14_the_same_key_with_another_body_is_refused(api: Api, body: dict[str, Any]) -> None:
    post(api, JOB, key="k1")
    answer = post(api, body, key="k1")
    assert (answer.status_code, answer.json()["code"]) == (422, "idempotency_conflict")
    assert num_jobs(api) == 1


def test_o14_the_same_key_with_another_override_is_another_request(api: Api) -> None:
    post(api, JOB, key="k1")
    assert post(api, JOB, key="k1", params={"set": "name=z"}).json()["code"] == "idempotency_conflict"


def test_o14_a_refused_submission_does_not_use_up_its_key(api: Api) -> None:
    assert post(api, {"name": "x"}, key="k1").status_code == 422
    assert post(api, JOB, key="k1").status_code == 201


def test_o14_keys_of_two_users_are_two_keys(api: Api) -> None:
    ids = {post(api, JOB, key="k1", who=who).json()["id"] for who in ("ann", "bob")}
    assert len(ids) == 2


def test_o14_a_key_survives_a_restart_of_the_server(api: Api, tmp_path: Path) -> None:
    first = post(api, JOB, key="k1")
    state = create_state(settings_for(tmp_path, api.state.settings.database_url))
    with serve(state) as url:
        headers = {"Authorization": f"Bearer {api.tokens['ann']}", "Idempotency-Key": "k1"}
        again = httpx.post(f"{url}/api/v1/jobs", json=JOB, headers=headers, timeout=30)

    assert (again.status_code, again.text) == (201, first.text)
    assert num_jobs(api) == 1


@pytest.mark.parametrize("key", ["k" * 201])
def test_a_key_that_is_too_long_is_refused(api: Api, key: str) -> None:
    assert post(api, JOB, key=key).json()["code"] == "invalid_request"
