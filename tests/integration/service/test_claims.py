"""A claim binds a part to the token that the claimant made: repeated it answers the same, by another it is refused."""

from __future__ import annotations

import threading
from typing import Any

import pytest

from service.auth.tokens import make_token
from tests.integration.service.api_server import Api

GANG: dict[str, Any] = {"resources": {"nodes": 2, "gpus_per_node": 2}}


def test_the_same_token_again_gets_the_same_plan(api: Api) -> None:
    node = api.node()
    api.submit(env={"A": "1"}, resources={"gpus": 2})
    api.place()
    (attempt_id,) = node.beat()["launch"]
    token = make_token("attempt")

    answers = [node.try_claim(attempt_id, token) for _ in range(3)]

    assert [answer.status_code for answer in answers] == [200] * 3
    assert len({answer.text for answer in answers}) == 1
    plan = answers[0].json()
    assert (plan["env"], plan["world_size"]) == ({"A": "1"}, 1)
    assert [gpu["uuid"] for gpu in plan["gpus"]] == ["node-1-0", "node-1-1"]
    assert node.beat(attempts=[attempt_id])["launch"] == []


def test_another_token_is_refused_and_changes_nothing(api: Api) -> None:
    node = api.node()
    attempt_id = api.start(api.submit(), node)[0].attempt_id
    before = api.snapshot()

    answer = node.try_claim(attempt_id, make_token("attempt"))

    assert (answer.status_code, answer.json()["code"]) == (409, "already_claimed")
    assert api.snapshot() == before


def test_of_many_claims_with_different_tokens_one_wins(api: Api) -> None:
    node = api.node()
    job_id = api.submit()
    api.place()
    attempt_id = api.attempt_id(job_id)
    statuses: list[int] = []
    claimants = [
        threading.Thread(target=lambda: statuses.append(node.try_claim(attempt_id, make_token("attempt")).status_code))
        for _ in range(8)
    ]
    for claimant in claimants:
        claimant.start()
    for claimant in claimants:
        claimant.join()

    assert sorted(statuses) == [200] + [409] * 7


def test_o36_each_node_of_a_gang_gets_its_own_share_in_order(api: Api) -> None:
    nodes = [api.node("node-1"), api.node("node-2")]
    job_id = api.submit(**GANG)
    api.place()
    plans = [node.claim(api.attempt_id(job_id)).plan for node in nodes]

    assert [(plan["node_rank"], plan["first_rank"], plan["world_size"]) for plan in plans] == [(0, 0, 2), (1, 1, 2)]
    assert [[gpu["uuid"] for gpu in plan["gpus"]] for plan in plans] == [
        ["node-1-0", "node-1-1"], ["node-2-0", "node-2-1"],
    ]  # fmt: skip


def test_an_attempt_of_another_node_is_not_assigned(api: Api) -> None:
    api.node("node-1", slots=2)
    other = api.node("node-2", slots=1)
    job_id = api.submit(resources={"gpus": 2})
    api.place()

    answer = other.try_claim(api.attempt_id(job_id), make_token("attempt"))

    assert (answer.status_code, answer.json()["code"]) == (409, "not_assigned")


@pytest.mark.parametrize("attempt_id", [0, 999_999, 2**63 - 1])
def test_an_attempt_that_is_not_there_is_not_assigned(api: Api, attempt_id: int) -> None:
    answer = api.node().try_claim(attempt_id, make_token("attempt"))
    assert (answer.status_code, answer.json()["code"]) == (409, "not_assigned")


def test_a_cancelled_attempt_cannot_be_claimed(api: Api) -> None:
    node = api.node()
    job_id = api.submit()
    api.place()
    attempt_id = api.attempt_id(job_id)
    assert api.cancel(job_id).status_code == 202

    answer = node.try_claim(attempt_id, make_token("attempt"))

    assert (answer.status_code, answer.json()["code"]) == (409, "not_assigned")
    assert (api.job(job_id)["state"], api.held_gpus()) == ("cancelled", [])


def test_one_half_of_a_gang_that_is_being_stopped_cannot_be_claimed_any_more(api: Api) -> None:
    first, second = api.node("node-1"), api.node("node-2")
    job_id = api.submit(**GANG)
    api.place()
    attempt_id = api.attempt_id(job_id)
    part = first.claim(attempt_id)
    api.cancel(job_id)

    assert second.try_claim(attempt_id, make_token("attempt")).json()["code"] == "not_assigned"
    assert part.directive()["stop"]["intent"] == "cancel"
    assert part.ended(stopped=True, signal="SIGTERM").status_code == 200
    assert api.job(job_id)["state"] == "cancelled"


@pytest.mark.parametrize("token", ["", "short", "glu_" + "x" * 43, "gla_short", None, 17, ["gla_" + "x" * 43]])
def test_a_token_that_could_be_guessed_or_is_of_another_kind_is_refused(api: Api, token: object) -> None:
    node = api.node()
    job_id = api.submit()
    api.place()
    body = {"token": token, "incarnation": "i"}

    answer = api.request("POST", f"/agent/attempts/{api.attempt_id(job_id)}/claim", node.credential, json=body)

    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
