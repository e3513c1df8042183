"""Lists by keyset pages that stay whole while jobs come in; one job by ETag; waiting until it changes."""

from __future__ import annotations

import base64
import threading
from itertools import chain
from typing import Any

import pytest

from tests.integration.service.api_server import Api


def pages(api: Api, query: str = "", limit: int = 3) -> list[list[int]]:
    """Ids of every page of a list, to the last."""
    found: list[list[int]] = []
    cursor = ""
    while True:
        page = api.get(f"/jobs?limit={limit}&{query}{'&cursor=' + cursor if cursor else ''}")
        found.append([item["id"] for item in page["items"]])
        if page["next"] is None:
            return found
        cursor = page["next"]


@pytest.mark.parametrize("num_jobs", [0, 1, 3, 4, 10])
def test_pages_hold_every_job_once_newest_first(api: Api, num_jobs: int) -> None:
    submitted = [api.submit() for _ in range(num_jobs)]
    found = pages(api)
    assert list(chain(*found)) == submitted[::-1]
    assert all(len(page) == 3 for page in found[:-1])


def test_jobs_that_come_in_between_move_nothing(api: Api) -> None:
    submitted = [api.submit() for _ in range(7)]
    first = api.get("/jobs?limit=3")
    for _ in range(5):
        api.submit()
    second = api.get(f"/jobs?limit=3&cursor={first['next']}")
    third = api.get(f"/jobs?limit=3&cursor={second['next']}")

    assert [item["id"] for page in (first, second, third) for item in page["items"]] == submitted[::-1]
    assert third["next"] is None


def test_jobs_of_one_moment_are_told_apart(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("service.clock.epoch", lambda: 1_000.0)
    submitted = [api.submit() for _ in range(5)]
    assert list(chain(*pages(api, limit=2))) == submitted[::-1]


@pytest.mark.parametrize(
    ("query", "names"),
    [
        ("", ["c", "b", "a"]),
        ("state=waiting", ["c", "b"]),
        ("state=cancelled", ["a"]),
        ("state=waiting,cancelled", ["c", "b", "a"]),
        ("owner=bob", ["c"]),
        ("owner=me", ["b", "a"]),
        ("owner=nobody", []),
        ("team=red", ["b", "a"]),
        ("name=b", ["b"]),
        ("tag=project", ["b", "a"]),
        ("tag=project=X", ["a"]),
        ("tag=project=x", ["b"]),
        ("tag=PROJECT", []),
        ("tag=proj", []),
        ("tag=ject", []),
        ("tag=key", []),
        ("owner=me&tag=project=X&state=cancelled", ["a"]),
        ("tag=%25", []),
    ],
)
def test_filters(api: Api, query: str, names: list[str]) -> None:
    first = api.submit(name="a", tags={"project": "X"})
    api.submit(name="b", tags={"other": "1", "project": "x", 'a"key': "1"})
    api.submit("bob", name="c", tags={})
    api.cancel(first)
    assert [item["name"] for item in api.get(f"/jobs?{query}")["items"]] == names


def raw_cursor(text: str) -> str:
    return base64.urlsafe_b64encode(text.encode()).decode()


@pytest.mark.parametrize(
    "query",
    [
        *(f"cursor={raw_cursor(text)}" for text in ("1", "x y", "1 2 3", "nan 1", "inf 1", f"1 {10**30}", "1 -1")),
        "cursor=%ff", "cursor=a", "cursor=ä", "state=done", "state=waiting,done",
        "limit=0", "limit=201", "limit=x", "limit=-1",
    ],
)  # fmt: skip
def test_a_cursor_state_or_limit_that_is_none_is_refused_by_name(api: Api, query: str) -> None:
    api.submit()
    answer = api.request("GET", f"/jobs?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert answer.json()["fix"]


def test_a_list_leaves_out_what_only_one_job_is_asked_for(api: Api) -> None:
    api.start(api.submit(), api.node())[0].ended(1)
    (item,) = api.get("/jobs")["items"]
    assert "spec" not in item
    assert "ranks" not in item["cause"]


# --- one job -------------------------------------------------------------------------------------------------------


OUTLASTS_THE_CLIENT = 60.0
"""Seconds to wait for a change: without one the client, which waits for 30 s, would be the first to give up."""


def show(api: Api, job_id: int, etag: str, wait: float = 0.0) -> Any:
    return api.request("GET", f"/jobs/{job_id}", params={"wait": wait}, headers={"If-None-Match": etag})


def test_an_unchanged_job_is_not_sent_again(api: Api) -> None:
    job_id = api.submit()
    first = api.request("GET", f"/jobs/{job_id}")
    etag = first.headers["etag"]

    assert etag == f'"{first.json()["version"]}"'
    unchanged = show(api, job_id, etag)
    assert (unchanged.status_code, unchanged.content, unchanged.headers["etag"]) == (304, b"", etag)
    assert show(api, job_id, '"0"').status_code == 200
    assert show(api, job_id, f'"0", {etag}').status_code == 304
    api.cancel(job_id)
    assert show(api, job_id, etag).json()["state"] == "cancelled"


def test_a_wait_ends_when_the_job_changes(api: Api) -> None:
    job_id = api.submit()
    etag = api.request("GET", f"/jobs/{job_id}").headers["etag"]
    answers: list[Any] = []
    waiting = threading.Thread(target=lambda: answers.append(show(api, job_id, etag, wait=OUTLASTS_THE_CLIENT)))
    waiting.start()
    api.cancel(job_id)
    waiting.join(60)

    assert (answers[0].status_code, answers[0].json()["state"]) == (200, "cancelled")


def test_a_wait_without_a_change_ends_with_304(api: Api) -> None:
    job_id = api.submit()
    etag = api.request("GET", f"/jobs/{job_id}").headers["etag"]
    assert show(api, job_id, etag, wait=0.2).status_code == 304


def test_a_wait_for_an_old_version_answers_at_once(api: Api) -> None:
    job_id = api.submit()
    assert show(api, job_id, '"0"', wait=OUTLASTS_THE_CLIENT).status_code == 200


@pytest.mark.parametrize("wait", ["-1", "nan", "x"])
def test_a_wait_that_is_none_is_refused(api: Api, wait: str) -> None:
    answer = api.request("GET", f"/jobs/{api.submit()}?wait={wait}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


def test_the_history_comes_in_pages_oldest_first(api: Api) -> None:
    job_id = api.submit()
    api.start(job_id, api.node())[0].ended(1)
    whole = api.get(f"/jobs/{job_id}/events")
    kinds = [event["kind"] for event in whole["items"]]
    assert kinds[0] == "job_waiting"
    assert kinds[-1] == "job_failed"

    paged, after = [], 0
    while after is not None:
        page = api.get(f"/jobs/{job_id}/events?after={after}&limit=2")
        paged += page["items"]
        after = page["next"]
    assert paged == whole["items"]


def test_why_counts_what_is_ahead(api: Api) -> None:
    api.node(slots=1)
    first, second, third = api.submit(), api.submit(priority=1), api.submit()
    api.place()

    why = api.get(f"/jobs/{third}/why")

    assert (why["state"], why["can_ever_start"], why["ahead"]["count"]) == ("waiting", True, 1)
    assert [(job["id"], job["state"]) for job in why["ahead"]["jobs"]] == [(first, "waiting")]
    assert [(job["id"], job["state"]) for job in why["holders"]] == [(second, "starting")]


def test_of_a_job_that_runs_there_is_no_queue_and_no_question_whether_it_starts(api: Api) -> None:
    job_id = api.submit()
    api.start(job_id, api.node(slots=1))

    why = api.get(f"/jobs/{job_id}/why")

    assert (why["state"], why["reason"], why["can_ever_start"]) == ("running", None, None)
    assert (why["ahead"], why["holders"]) == ({"count": 0, "jobs": []}, [])


@pytest.mark.parametrize(
    ("spec", "code", "names_holders"),
    [
        ({}, "needs_gpus", True),
        ({"hold": True}, "held", False),
        ({"after": ["holder"]}, "dependency", False),
        ({"start_after": "2099-01-01T00:00:00Z"}, "not_yet", False),
    ],
)
def test_who_holds_gpus_is_told_only_where_the_job_waits_for_gpus(
    api: Api, spec: dict[str, Any], code: str, names_holders: bool
) -> None:
    api.node(slots=1)
    holder = api.submit()
    api.place()
    job_id = api.submit(**({"after": [holder]} if "after" in spec else spec))
    api.place()

    why = api.get(f"/jobs/{job_id}/why")

    assert (why["reason"]["code"], [job["id"] for job in why["holders"]]) == (code, [holder] if names_holders else [])
    assert why["can_ever_start"] is True


def test_the_directive_waits_for_a_newer_version(api: Api) -> None:
    job_id = api.submit()
    part = api.start(job_id, api.node())[0]
    version = part.directive()["version"]
    answers: list[Any] = []
    path = f"directive?version={version}&wait={OUTLASTS_THE_CLIENT:g}"
    waiting = threading.Thread(target=lambda: answers.append(part.call("GET", path)))
    waiting.start()
    api.cancel(job_id)
    waiting.join(60)

    assert answers[0].json()["stop"] == {"intent": "cancel", "grace_seconds": 30.0}
    assert part.call("GET", f"directive?version={version + 9}&wait=0.1").json()["version"] == version + 1


def test_tags_are_for_the_team_and_no_filter_tells_them_to_others(api: Api) -> None:
    job_id = api.submit(name="tagged", tags={"project": "secret"})

    assert api.request("GET", f"/jobs/{job_id}").json()["tags"] == {"project": "secret"}
    assert api.request("GET", f"/jobs/{job_id}", who="bob").json()["tags"] == {}
    assert [job["id"] for job in api.request("GET", "/jobs?tag=project").json()["items"]] == [job_id]
    assert api.request("GET", "/jobs?tag=project", who="bob").json()["items"] == []


def test_a_job_tells_when_its_attempt_began_to_run_and_how_the_one_before_ended(api: Api) -> None:
    node = api.node(slots=1)
    job_id = api.train(resources={"gpus": 1})
    assert (api.job(job_id)["attempt"], api.job(job_id)["last_attempt"]) == (None, None)
    (part,) = api.start(job_id, node)
    first = api.job(job_id)
    assert first["attempt"]["started_at"] == first["started_at"]

    assert api.requeue(job_id).status_code == 202
    assert part.ended(75, stopped_by_us=True, result="preempted").status_code == 200

    waiting = api.job(job_id)
    last = waiting["last_attempt"]
    assert (waiting["state"], waiting["attempt"]) == ("waiting", None)
    assert (last["number"], last["outcome"], last["started_at"]) == (1, "preempted", first["started_at"])
    assert last["ended_at"] > last["started_at"]

    assert api.place() == 1
    starting = api.job(job_id)
    assert (starting["attempt"]["number"], starting["attempt"]["started_at"]) == (2, None)
    assert starting["last_attempt"] == last
    assert {job["id"]: job["last_attempt"] for job in api.get("/jobs")["items"]}[job_id] == last
