"""Why a job waits, when it starts, the queue in order, and dry runs that look ahead: over REST, from a held world."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest
from sqlalchemy import update

from gangline.protocol.outcomes import JobState
from service.db.tables import jobs
from service.scheduler.cycle import Cycle
from tests.integration.service.api_server import Api

HOUR = 3600.0
JOB = {"name": "new", "run": {"command": ["true"]}, "resources": {"gpus": 1, "time": "12h"}}


@pytest.fixture
def full(api: Api) -> Api:
    """A pool of one slot, which a job holds."""
    api.node(slots=1)
    api.submit(name="holder", resources={"gpus": 1, "time": "2h"})
    api.place()
    return api


def dry_run(api: Api, who: str = "ann", **members: object) -> dict[str, Any]:
    answer = api.request("POST", "/jobs?dry_run=true", who, json={**JOB, **members})
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def test_why_tells_place_start_range_and_whats_ahead(full: Api) -> None:
    short = full.submit(name="short", resources={"gpus": 1, "time": "1h"})
    long = full.submit(name="long", resources={"gpus": 1, "time": "3h"})

    told = full.get(f"/jobs/{long}/why")

    assert (told["position"], told["ahead"]["count"], told["left_seconds"]) == (2, 1, 3 * HOUR)
    assert [job["name"] for job in told["ahead"]["jobs"]] == ["short"]
    assert [job["name"] for job in told["holders"]] == ["holder"]
    start = told["start"]
    assert 0.0 <= start["low_seconds"] <= start["p50_seconds"] <= start["p90_seconds"]
    assert told["estimated_start"] == start["p50"]
    assert full.get(f"/jobs/{short}/why")["start"]["p50_seconds"] < start["p50_seconds"]


def test_why_of_a_held_job_says_that_its_start_is_unknown_and_why(full: Api) -> None:
    job_id = full.submit(hold=True)

    told = full.get(f"/jobs/{job_id}/why")

    assert (told["position"], told["start"]["p50"], told["estimated_start"]) == (None, None, None)
    assert "held by ann" in told["start"]["why_unknown"]


def test_why_shows_the_quota_that_the_job_stands_under(full: Api) -> None:
    job_id = full.submit()

    quota = full.get(f"/jobs/{job_id}/why")["quota"]

    assert (quota["held_gpus"], quota["cap_gpus"], quota["user_cap_gpus"]) == (1, None, None)
    assert (quota["held_nodes"], quota["quota_nodes"]) == (1, None)


def test_why_knows_a_job_that_came_after_the_world_was_read(full: Api) -> None:
    full.get(f"/jobs/{full.submit()}/why")
    full.state.held._good_for = 3600.0  # as if reading had taken long

    assert full.get(f"/jobs/{full.submit()}/why")["position"] == 2


def test_what_would_help_is_told_to_insiders_when_asked_for(full: Api) -> None:
    full.node("node-2", slots=2)
    full.submit(name="other", resources={"gpus": 1})
    full.place()
    job_id = full.submit(resources={"gpus": 2, "time": "12h"})

    told = full.get(f"/jobs/{job_id}/why?variants=true")

    assert [(one["kind"], one["value"], one["starts_in_seconds"]) for one in told["variants"]][:1] == [
        ("gpus", "1", 0.0)
    ]
    assert full.get(f"/jobs/{job_id}/why")["variants"] == []
    assert full.request("GET", f"/jobs/{job_id}/why?variants=true", "bob").json()["variants"] == []


def test_the_queue_is_in_the_order_of_the_policy_and_comes_in_pages(full: Api) -> None:
    three, one, two = (full.submit(name=f"{hours}h", resources={"gpus": 1, "time": f"{hours}h"}) for hours in (3, 1, 2))
    held = full.submit(name="held", hold=True)

    whole = full.get("/queue")

    assert [(job["id"], job["position"]) for job in whole["items"]] == [(one, 1), (two, 2), (three, 3), (held, None)]
    assert (whole["count"], whole["next"], whole["policy"]) == (4, None, "time-left")
    assert all(job["reason"]["code"] for job in whole["items"])
    paged, after = [], 0
    while after is not None:
        page = full.get(f"/queue?limit=1&after={after}")
        paged += [job["id"] for job in page["items"]]
        after = page["next"]
    assert paged == [one, two, three, held]


def test_a_private_job_shows_in_the_queue_and_ahead_as_one_of_its_team_only(full: Api) -> None:
    secret = full.submit(name="secret", private=True, resources={"gpus": 1, "time": "1h"})
    job_id = full.request("POST", "/jobs", "bob", json=JOB).json()["id"]

    queue = full.request("GET", "/queue", "bob").json()["items"]
    ahead = full.request("GET", f"/jobs/{job_id}/why", "bob").json()["ahead"]["jobs"]

    for shown in (queue[0], ahead[0]):
        assert (shown["id"], shown["owner"]) == (None, None)
        assert shown["name"].startswith("a private job of team ")
    assert [job["id"] for job in full.get("/queue")["items"]] == [secret, job_id]


def test_of_a_private_jobs_reason_outsiders_see_what_kind_it_is_and_nothing_of_its_own(full: Api) -> None:
    job_id = full.submit(name="secret", private=True)
    full.request("POST", f"/jobs/{job_id}/hold", "ann", json={"reason": "waiting for the merger data"})
    full.place()
    own = full.job(job_id)["reason"]
    assert "merger" in own["text"]

    def reasons(who: str) -> list[object]:
        lists = (full.get("/queue", who)["items"], full.get("/overview", who)["waiting"])
        return [items[0]["reason"] for items in lists]

    assert reasons("amy") == [own, own]
    told = {"code": "held", "text": "Its owner or an admin holds it back until it is released.", "fix": ""}
    assert reasons("bob") == [told, told]
    for path in ("/queue", "/overview"):
        assert "merger" not in full.request("GET", path, "bob").text


@pytest.mark.parametrize(
    ("limits", "own", "told"),
    [
        ({"cap_gpus": 1}, ("cap", "may hold at most 1"), "Its user's or team's cap does not allow it now."),
        (
            {"quota_gpus": 1},
            ("not_resumable", "only jobs that resume may borrow"),
            "The jobs that hold what it needs do not resume or may not be stopped again; or it does not resume itself, "
            "and may not borrow.",
        ),
    ],
)
def test_what_others_read_of_a_private_jobs_reason_is_true_of_a_team_that_holds_nothing(
    api: Api, limits: dict[str, int], own: tuple[str, str], told: str
) -> None:
    api.node(slots=4)
    assert api.request("POST", "/teams/red/quota", "root", json=limits).status_code == 200
    job_id = api.submit(private=True, preemptible=False, resources={"gpus": 2})
    assert api.place() == 0
    reason = api.job(job_id)["reason"]
    assert (reason["code"], own[1] in reason["text"]) == (own[0], True)
    assert [job["reason"] for job in api.get("/queue", "bob")["items"]] == [{"code": own[0], "text": told, "fix": ""}]


def test_a_dry_run_starts_now_where_there_is_room_and_stores_nothing(api: Api) -> None:
    api.node(slots=2)
    before = api.snapshot()

    told = dry_run(api)

    assert (told["starts_now"], told["starts_in_seconds"], told["would_stop"], told["reason"]) == (True, 0.0, [], None)
    assert api.snapshot() == before


def test_a_dry_run_of_a_job_with_a_date_does_not_start_before_it(api: Api) -> None:
    api.node(slots=1)

    told = dry_run(api, start_after="2199-12-31T18:00:00+01:00")

    assert (told["starts_now"], told["starts_in_seconds"], told["would_stop"]) == (False, None, [])
    assert told["reason"]["code"] == "not_yet" and "2199-12-31T18:00:00+01:00" in told["reason"]["text"]
    begins = datetime.fromisoformat(told["start"]["p50"])
    assert abs((begins - datetime.fromisoformat("2199-12-31T17:00:00Z")).total_seconds()) < 5.0
    assert dry_run(api, start_after="2020-01-01T00:00:00Z")["starts_now"]


def test_a_dry_run_says_when_and_what_would_be_sooner_and_stores_nothing(full: Api) -> None:
    full.node("node-2", slots=2)
    full.submit(resources={"gpus": 1})
    full.place()
    before = full.snapshot()

    told = dry_run(full, resources={"gpus": 2, "time": "12h"})

    assert told["starts_now"] is False
    assert told["start"]["p50_seconds"] > 0.0
    assert told["variants"][0]["text"] == "With 1 GPU it would start now."
    assert full.snapshot() == before


def test_a_dry_run_advises_a_limit_from_the_users_own_history(full: Api) -> None:
    ended = [full.submit(name=f"old-{number}") for number in range(6)]
    with full.database.write() as tx:
        tx.connection.execute(
            update(jobs)
            .where(jobs.c.id.in_(ended))
            .values(state=JobState.SUCCEEDED, limit_seconds=10 * HOUR, served_seconds=2 * HOUR)
        )

    told = dry_run(full)

    assert told["advice"]["limit_seconds"] == 3 * HOUR
    assert told["advice"]["text"].startswith("Your last 6 jobs of about this size used 20% of their limit; 3 h")
    assert dry_run(full, "bob")["advice"] is None


def test_the_leaders_own_world_is_read_where_it_runs_here(full: Api) -> None:
    assert full.epoch is not None
    cycle = Cycle(full.database, full.state.settings, full.epoch, full.state.held)
    try:
        job_id = full.submit(name="queued")
        cycle.turn()

        with full.state.held.borrow() as (world, _):
            assert world is cycle.mirror.world
            version = world.version
        told = full.get(f"/jobs/{job_id}/why")
        dry_run(full)

        assert told["position"] == 1
        assert cycle.mirror.world.version == version  # a look is no change
    finally:
        full.state.held.drop()
