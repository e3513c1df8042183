"""Admins say what teams and users may hold: each change is told with its numbers and read again by the scheduler."""

from __future__ import annotations

import json
from typing import Any

import pytest
from sqlalchemy import delete, select

from service.db.tables import events, world_changes
from tests.integration.service.api_server import Api


def told(api: Api, kind: str) -> list[Any]:
    with api.database.read() as connection:
        query = select(events).where(events.c.kind == kind).order_by(events.c.id)
        return [(row.actor, row.text, json.loads(row.data)) for row in connection.execute(query)]


def marked_kinds(api: Api) -> list[str]:
    with api.database.write() as tx:
        query = delete(world_changes).returning(world_changes.c.id, world_changes.c.kind)
        return [row.kind for row in tx.connection.execute(query)]


def quota(api: Api, team: str = "red", who: str = "root", **body: Any) -> Any:
    return api.request("POST", f"/teams/{team}/quota", who, json=body)


def test_a_teams_quota_and_cap_are_set_kept_and_taken_away(api: Api) -> None:
    api.node(slots=8)
    marked_kinds(api)
    assert quota(api, quota_gpus=4, cap_gpus=6).json() == {
        "name": "red", "quota_gpus": 4, "quota_nodes": None, "cap_gpus": 6, "warnings": [],
    }  # fmt: skip
    assert marked_kinds(api) == ["team"]
    assert quota(api, quota_nodes=1).json()["quota_gpus"] == 4, "what is not said stays"
    quota(api, quota_nodes=1)
    assert marked_kinds(api) == ["team"], "the same again changes nothing"
    assert quota(api, cap_gpus=None).json()["cap_gpus"] is None
    (red,) = [team for team in api.get("/teams")["items"] if team["name"] == "red"]
    assert (red["quota_gpus"], red["quota_nodes"], red["cap_gpus"]) == (4, 1, None)
    first, second, third = told(api, "team_quota")
    assert first[:2] == ("root", "root changed team red: guaranteed GPUs none → 4, most GPUs at once none → 6.")
    assert first[2]["from"] == {"quota_gpus": None, "quota_nodes": None, "cap_gpus": None}
    assert (second[2]["to"]["quota_nodes"], third[2]["from"]["cap_gpus"]) == (1, 6)


def test_quotas_that_exceed_the_pool_are_accepted_with_the_numbers(api: Api) -> None:
    api.node(slots=4)
    assert quota(api, quota_gpus=4, quota_nodes=1).json()["warnings"] == []
    gpus, nodes = quota(api, "blue", quota_gpus=3, quota_nodes=2).json()["warnings"]
    assert "add up to 7 GPUs, and the pool has 4" in gpus
    assert "add up to 3 whole nodes, and the pool has 1" in nodes


def test_the_first_quota_names_the_teams_whose_jobs_it_keeps_from_starting(api: Api) -> None:
    api.node(slots=8)
    api.submit("ann")
    api.submit("bob")
    api.submit("bob", preemptible=True)
    api.submit("bob", resources={"gpus": 0})
    assert quota(api, quota_gpus=None).json()["warnings"] == [], "without any quota all GPUs are everybody's"

    (warning,) = quota(api, quota_gpus=4).json()["warnings"]

    assert "Team blue has no quota" in warning
    assert "1 of those that wait cannot be stopped" in warning
    assert "gang admin quota blue --gpus N" in warning
    assert quota(api, "blue", quota_gpus=2).json()["warnings"] == []


@pytest.mark.parametrize(
    "body",
    [{}, {"gpus": 3}, {"quota_gpus": -1}, {"quota_gpus": "4"}, {"quota_gpus": True}, {"quota_gpus": 1.5},
     {"quota_gpus": 2**31}, {"quota_gpus": 5, "cap_gpus": 4}],
)  # fmt: skip
def test_a_quota_that_makes_no_sense_is_refused(api: Api, body: dict[str, Any]) -> None:
    before = api.snapshot()
    answer = quota(api, **body)
    assert (answer.status_code, bool(answer.json()["fix"])) == (422, True)
    assert api.snapshot() == before


def test_a_users_cap_is_set_and_taken_away(api: Api) -> None:
    assert api.request("POST", "/users/ann/cap", "root", json={"cap_gpus": 3}).json() == {"name": "ann", "cap_gpus": 3}
    api.request("POST", "/users/ann/cap", "root", json={"cap_gpus": 3})
    (ann,) = [user for user in api.get("/users", "root")["items"] if user["name"] == "ann"]
    assert (ann["cap_gpus"], ann["top_priority"]) == (3, False)
    api.request("POST", "/users/ann/cap", "root", json={"cap_gpus": None})
    assert [event[2] for event in told(api, "user_cap")] == [
        {"user": "ann", "from": None, "to": 3},
        {"user": "ann", "from": 3, "to": None},
    ]
    assert marked_kinds(api) == ["user", "user"]


def test_the_grant_of_the_top_priority_is_told_once(api: Api) -> None:
    for _ in range(2):
        api.request("PUT", "/users/ann/top-priority", "root")
    api.request("DELETE", "/users/ann/top-priority", "root")
    assert [event[1] for event in told(api, "user_priority")] == [
        "root granted the priority top for user ann.", "root revoked the priority top for user ann.",
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("method", "path", "body"),
    [
        ("POST", "/teams/nobody/quota", {"quota_gpus": 1}),
        ("POST", "/users/nobody/cap", {"cap_gpus": 1}),
        ("PUT", "/users/nobody/top-priority", {}),
    ],
)
def test_a_name_that_is_not_there_is_told(api: Api, method: str, path: str, body: dict[str, Any]) -> None:
    answer = api.request(method, path, "root", json=body)
    assert (answer.status_code, "nobody" in answer.json()["detail"]) == (404, True)
    assert api.request(method, path, "ann", json=body).status_code == 403


# --- What was changed can be read ------------------------------------------------------------------------------------


def test_all_that_admins_change_can_be_read_back_newest_first_with_who_and_why(api: Api) -> None:
    api.node(slots=4)
    job_id = api.submit()
    node = "/nodes/node-1"
    for method, path, body in (
        ("POST", "/teams/red/quota", {"quota_gpus": 2}),
        ("POST", "/users/bob/cap", {"cap_gpus": 1}),
        ("PUT", "/users/bob/top-priority", None),
        ("POST", f"{node}/labels", {"labels": {"switch": "leaf-3"}, "reason": "new rack"}),
        ("POST", f"{node}/cordon", {"reason": "disk", "until": "2h"}),
        ("POST", f"{node}/drain", {"reason": "new fan"}),
        ("POST", f"{node}/resume", {}),
    ):
        assert api.request(method, path, "root", json=body).status_code == 200, path
    api.request("POST", f"/jobs/{job_id}/hold", "ann", json={})

    told_of = api.request("GET", "/events?limit=7", "root").json()

    kinds = [
        "node_resumed",
        "node_draining",
        "node_cordoned",
        "node_labelled",
        "user_priority",
        "user_cap",
        "team_quota",
    ]
    assert [item["kind"] for item in told_of["items"]] == kinds, "a job's history stands with the job"
    assert {item["actor"] for item in told_of["items"]} == {"root"}
    assert "disk" in told_of["items"][2]["text"] and told_of["items"][2]["data"]["until"]
    older = api.request("GET", f"/events?before={told_of['next']}", "root").json()
    assert "node_enrolled" in [item["kind"] for item in older["items"]] and older["next"] is None
    of_node = api.request("GET", "/events?node=node-1&limit=4", "root").json()["items"]
    assert [item["kind"] for item in of_node] == kinds[:4]
    assert api.request("GET", "/events", "ann").status_code == 403
