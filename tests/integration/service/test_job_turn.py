"""What owners and admins say of a job's turn: hold, release, priority, start time, and the jobs that it needs.

Each change is an event with its actor, and a mark for the scheduler in the same transaction.
"""

from __future__ import annotations

import json
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import delete, select, text, update

from gangline.protocol.outcomes import JobState, StopIntent
from service.clock import rfc3339
from service.db.dependencies import load_needs, store_needs
from service.db.tables import job_dependencies, jobs, world_changes
from service.db.transitions import cancel_hopeless, move_job
from service.domain.hold import Hold
from service.operations.stop_attempt import stop_attempt
from service.scheduler.holds import HoldFacts, hold_of
from tests.integration.service.api_server import Api
from tests.support.wait import wait_until

WAY_TO = {
    JobState.SUCCEEDED: (JobState.STARTING, JobState.RUNNING, JobState.SUCCEEDED),
    JobState.FAILED: (JobState.FAILED,),
    JobState.CANCELLED: (JobState.CANCELLED,),
    JobState.RUNNING: (JobState.STARTING, JobState.RUNNING),
}


def move(api: Api, job_id: int, to: JobState) -> None:
    """Take a waiting job to a state, as its attempts would."""
    with api.database.write() as tx:
        for state in WAY_TO[to]:
            move_job(tx, job_id, state, actor="test", text="")


def post(api: Api, job_id: int, verb: str, who: str = "ann", **body: Any) -> Any:
    """Act on a job's turn; anything but success is an error."""
    answer = api.request("POST", f"/jobs/{job_id}/{verb}", who, json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def row(api: Api, job_id: int) -> Any:
    with api.database.read() as connection:
        return connection.execute(select(jobs).where(jobs.c.id == job_id)).one()


def marks(api: Api) -> list[tuple[str, int]]:
    """What the scheduler has to read again; reading takes the marks away."""
    with api.database.write() as tx:
        query = delete(world_changes).returning(world_changes.c.id, world_changes.c.kind, world_changes.c.key)
        return sorted({(found.kind, found.key) for found in tx.connection.execute(query)})


def reason(api: Api, job_id: int, now: float = 0.0) -> str | None:
    """The code of what holds a job back, from its row and dependencies."""
    with api.database.read() as connection:
        found = connection.execute(select(jobs).where(jobs.c.id == job_id)).one()
        needs = load_needs(connection).get(job_id, ())
    facts = HoldFacts(
        job_id=job_id,
        hold_reason=found.hold_reason,
        start_after=found.start_after,
        start_zone=found.start_zone,
        needs=needs,
    )
    held = hold_of(facts, now)
    return None if held is None else str(held[0].code)


def events(api: Api, job_id: int, kind: str) -> list[dict[str, Any]]:
    found = api.get(f"/jobs/{job_id}/events", "root")["items"]
    return [event for event in found if event["kind"] == kind]


# --- Hold and release ----------------------------------------------------------------------------------------------


def test_a_job_is_held_and_released_by_its_owner_and_both_are_told(api: Api) -> None:
    job_id = api.submit()
    marks(api)

    held = post(api, job_id, "hold", reason="data moves")
    since = held["held"].pop("since")
    assert held["held"] == {"by": "ann", "is_by_admin": False, "why": "data moves"}
    assert (reason(api, job_id), marks(api)) == ("held", [("job", job_id)])
    post(api, job_id, "hold", reason="again")
    assert marks(api) == [], "holding again changes nothing"

    assert post(api, job_id, "release")["held"] is None
    assert (reason(api, job_id), marks(api)) == (None, [("job", job_id)])
    post(api, job_id, "release")
    assert marks(api) == []
    (hold,), (release,) = events(api, job_id, "job_held"), events(api, job_id, "job_released")
    assert (hold["actor"], hold["text"], hold["data"]["from"]) == ("ann", "Held by ann: data moves", None)
    stored = json.loads(hold["data"]["to"])
    assert since == rfc3339(stored.pop("since"))
    assert stored == held["held"]
    assert (release["actor"], release["data"]) == ("ann", {"from": hold["data"]["to"], "to": None})


def waits(api: Api, job_id: int) -> float:
    """For how long a job has waited, in seconds."""
    with api.database.read() as connection:
        return api.database.now(connection) - float(row(api, job_id).wait_began_at)


def earlier(api: Api, job_id: int, seconds: float) -> None:
    """Let time pass for a job: its wait and its hold began so much earlier."""
    found = row(api, job_id)
    hold = Hold.from_json(found.hold_reason)
    if hold is not None and hold.since is not None:
        hold = replace(hold, since=hold.since - seconds)
    columns = {"wait_began_at": found.wait_began_at - seconds, "submitted_at": found.submitted_at - seconds}
    with api.database.write() as tx:
        held = None if hold is None else hold.to_json()
        tx.connection.execute(update(jobs).where(jobs.c.id == job_id).values(hold_reason=held, **columns))


@pytest.mark.parametrize("holders", [("ann",), ("root",), ("ann", "root")])
def test_being_held_is_not_waiting_and_takes_nothing_of_the_wait_before(api: Api, holders: tuple[str, ...]) -> None:
    job_id = api.submit()
    earlier(api, job_id, 20 * 3600)
    for who in holders:
        post(api, job_id, "hold", who)
        earlier(api, job_id, 600)
    assert waits(api, job_id) == pytest.approx(20 * 3600 + 600 * len(holders), abs=30)

    post(api, job_id, "release", holders[-1])

    assert waits(api, job_id) == pytest.approx(20 * 3600, abs=30)


def test_what_is_held_since_its_submission_has_not_waited(api: Api) -> None:
    job_id = api.submit(hold=True)
    earlier(api, job_id, 3600)
    post(api, job_id, "release")
    assert waits(api, job_id) == pytest.approx(0, abs=30)


def test_a_job_that_was_held_while_it_ran_waits_from_its_release_on(api: Api) -> None:
    job_id = api.submit()
    (part,) = api.start(job_id, api.node())
    post(api, job_id, "hold")
    earlier(api, job_id, 3600)
    api.requeue(job_id)
    part.ended(75, stopped=True, stop_intent="preempt")
    earlier(api, job_id, 600)
    assert api.job(job_id)["state"] == "waiting"
    assert waits(api, job_id) == pytest.approx(600, abs=30)
    post(api, job_id, "release")
    assert waits(api, job_id) == pytest.approx(0, abs=30)


def test_an_admins_hold_is_not_the_owners_to_release(api: Api) -> None:
    job_id = api.submit()
    post(api, job_id, "hold")
    post(api, job_id, "hold", "root", reason="it floods the file server")
    answer = api.request("POST", f"/jobs/{job_id}/release", "ann")
    assert answer.status_code == 403
    assert "held by admin root: it floods the file server" in answer.json()["detail"]
    assert post(api, job_id, "hold")["held"]["by"] == "root", "the owner's hold does not take its place"
    assert post(api, job_id, "release", "root")["held"] is None


@pytest.mark.parametrize(("verb", "body"), [("hold", {}), ("release", {}), ("priority", {"priority": "low"})])
def test_another_persons_job_keeps_its_turn(api: Api, verb: str, body: dict[str, Any]) -> None:
    job_id = api.submit()
    secret = api.submit(private=True)
    before = api.snapshot()
    teammate, outsider = (api.request("POST", f"/jobs/{job_id}/{verb}", who, json=body) for who in ("amy", "bob"))
    assert (teammate.status_code, outsider.status_code) == (403, 403)
    assert "another team" not in teammate.json()["detail"]
    assert "only its owner or an admin" in teammate.json()["detail"]
    told = f"hold or release job {job_id}, or change its priority"
    assert outsider.json()["detail"] == f"job {job_id} belongs to another team; bob may not {told}"
    assert teammate.json()["detail"] == f"only its owner or an admin may {told}; amy is neither"
    assert api.request("POST", f"/jobs/{secret}/{verb}", "bob", json=body).status_code == 404
    assert api.snapshot() == before


def test_a_job_is_held_from_its_submission_on(api: Api) -> None:
    job_id = api.submit(hold=True)
    job = api.job(job_id)
    assert job["held"] == {
        "by": "ann", "is_by_admin": False, "why": "since its submission", "since": job["submitted_at"],
    }  # fmt: skip
    assert reason(api, job_id) == "held"
    post(api, job_id, "release")
    assert api.job(job_id)["spec"]["hold"], "the spec stays as it was submitted"


def test_a_running_job_may_be_held_and_an_ended_one_not(api: Api) -> None:
    job_id = api.submit()
    move(api, job_id, JobState.RUNNING)
    began = row(api, job_id).wait_began_at
    assert post(api, job_id, "hold")["state"] == "running"
    post(api, job_id, "release")
    assert row(api, job_id).wait_began_at == began
    with api.database.write() as tx:
        move_job(tx, job_id, JobState.FAILED, actor="test", text="")
    answer = api.request("POST", f"/jobs/{job_id}/hold", "ann", json={})
    assert (answer.status_code, answer.json()["code"]) == (409, "conflict")


@pytest.mark.parametrize("reason", [7, "x" * 1001, "two\nlines"])
def test_a_reason_that_everybody_reads_is_one_line(api: Api, reason: Any) -> None:
    assert api.request("POST", f"/jobs/{api.submit()}/hold", json={"reason": reason}).status_code == 422


# --- Priority ------------------------------------------------------------------------------------------------------


def test_a_priority_is_changed_and_told_and_the_spec_is_not(api: Api) -> None:
    job_id = api.submit(priority="low")
    marks(api)
    assert post(api, job_id, "priority", priority="high")["priority"] == 50
    assert marks(api) == [("job", job_id)]
    assert post(api, job_id, "priority", "root", priority=-7)["priority"] == -7
    post(api, job_id, "priority", "root", priority=-7)
    assert api.job(job_id)["spec"]["priority"] == -50
    assert [(event["actor"], event["data"]) for event in events(api, job_id, "job_priority")] == [
        ("ann", {"from": -50, "to": 50}),
        ("root", {"from": 50, "to": -7}),
    ]
    assert api.request("POST", f"/jobs/{job_id}/priority", json={"priority": "urgent"}).status_code == 422


def test_the_top_priority_is_for_whom_an_admin_has_granted_it(api: Api) -> None:
    job_id = api.submit()
    body = {"name": "x", "run": {"command": ["true"]}, "priority": "top"}
    refused = api.request("POST", "/jobs", json=body)
    assert refused.status_code == 422
    (problem,) = refused.json()["errors"]
    assert (problem["pointer"], "ann may not use the priority top" in problem["message"]) == ("priority", True)
    answer = api.request("POST", f"/jobs/{job_id}/priority", json={"priority": "top"})
    assert (answer.status_code, "ann may not use" in answer.json()["detail"]) == (403, True)

    assert api.request("PUT", "/users/ann/top-priority", "ann").status_code == 403
    assert api.request("PUT", "/users/ann/top-priority", "root").json()["top_priority"]
    assert api.submit(priority="top")
    assert post(api, job_id, "priority", priority="top")["priority"] == 1000
    assert api.request("DELETE", "/users/ann/top-priority", "root").json()["jobs_at_top"] == 2
    assert api.request("POST", "/jobs", json=body).status_code == 422


# --- Start time ----------------------------------------------------------------------------------------------------


def test_o57_a_start_time_is_stored_as_utc_and_shown_with_its_offset(api: Api) -> None:
    job_id = api.submit(start_after="2099-11-01T02:30", zone="America/New_York")
    found = row(api, job_id)
    instant = datetime(2099, 11, 1, 7, 30, tzinfo=UTC).timestamp()  # clocks went back half an hour before it
    assert (found.start_after, found.start_zone) == (instant, "America/New_York")
    assert api.job(job_id)["start_after"] == "2099-11-01T02:30:00-05:00"
    assert reason(api, job_id, found.start_after - 1) == "not_yet"
    assert reason(api, job_id, found.start_after) is None


def test_what_a_job_asks_of_its_nodes_and_turn_is_in_its_row(api: Api) -> None:
    job_id = api.submit(
        preemptible=True,
        on_time_limit="requeue",
        resources={"gpus": 1, "time": "2h", "gpu_memory": "1GiB", "labels": {"rack": "ä"}, "exclusive": True},
    )
    found = row(api, job_id)
    assert (found.is_preemptible, found.on_time_limit, found.limit_seconds) == (True, "requeue", 7200.0)
    assert (found.gpu_memory_bytes, json.loads(found.node_labels), found.is_exclusive) == (2**30, {"rack": "ä"}, True)
    assert (found.wait_began_at, found.num_stops, found.served_seconds) == (found.submitted_at, 0, 0.0)


def test_o20_labels_and_memory_that_no_node_has_are_refused_at_submission(api: Api) -> None:
    api.node()
    for resources in ({"labels": {"rack": "a"}}, {"gpu_memory": "1GiB"}):
        answer = api.request("POST", "/jobs", json={"name": "x", "run": {"command": ["true"]}, "resources": resources})
        assert (answer.status_code, answer.json()["code"]) == (422, "does_not_fit")


# --- Jobs that need others -----------------------------------------------------------------------------------------


def after(api: Api, *needs: Any, who: str = "ann") -> int:
    return api.submit(who, after=list(needs))


def test_a_job_waits_until_all_that_it_needs_have_ended_as_needed(api: Api) -> None:
    first, second = api.submit(), api.submit("bob")
    job_id = after(api, first, {"job": second, "condition": "any"})
    began = row(api, job_id).wait_began_at
    assert reason(api, job_id) == "dependency"
    marks(api)
    move(api, second, JobState.FAILED)
    assert ("job", job_id) in marks(api)
    assert (reason(api, job_id), row(api, job_id).wait_began_at) == ("dependency", began)
    move(api, first, JobState.SUCCEEDED)
    assert ("job", job_id) in marks(api)
    assert reason(api, job_id) is None
    assert row(api, job_id).wait_began_at > began, "its wait for room begins when nothing else holds it back"


@pytest.mark.parametrize(
    ("condition", "end", "state"),
    [
        ("ok", JobState.SUCCEEDED, "waiting"),
        ("ok", JobState.FAILED, "cancelled"),
        ("ok", JobState.CANCELLED, "cancelled"),
        ("any", JobState.FAILED, "waiting"),
        ("not_ok", JobState.CANCELLED, "waiting"),
        ("not_ok", JobState.SUCCEEDED, "cancelled"),
    ],
)
def test_a_job_whose_condition_can_never_hold_ends_at_once_and_says_why(
    api: Api, condition: str, end: JobState, state: str
) -> None:
    needed = api.submit()
    job_id = after(api, {"job": needed, "condition": condition})
    move(api, needed, end)
    job = api.job(job_id)
    assert job["state"] == state
    if state == "cancelled":
        assert (job["outcome"], job["reason"]) == ("cancelled", None)
        assert job["cause"]["sentence"].startswith(f"The job was cancelled: it needs job {needed} to ")
        assert job["cause"]["fix"]
        assert job["ended_at"]


def test_the_end_goes_down_the_whole_line_in_one_transaction(api: Api) -> None:
    """A diamond and a tail: each ends once, and what needs a failure goes on."""
    top = api.submit()
    left, right = after(api, top), after(api, top)
    bottom = after(api, left, right)
    tail = after(api, bottom)
    rescue = after(api, {"job": bottom, "condition": "not_ok"})
    marks(api)
    assert api.cancel(top).status_code == 202
    assert [api.job(job_id)["state"] for job_id in (top, left, right, bottom, tail)] == ["cancelled"] * 5
    assert (api.job(rescue)["state"], reason(api, rescue)) == ("waiting", None)
    assert marks(api) == [("job", job_id) for job_id in (top, left, right, bottom, tail, rescue)]
    assert len(events(api, bottom, "job_cancelled")) == 1


def test_a_job_that_has_started_no_longer_asks_what_it_needed(api: Api) -> None:
    needed = api.submit()
    job_id = after(api, {"job": needed, "condition": "any"})
    with api.database.write() as tx:  # as if the condition had been met
        tx.connection.execute(update(jobs).where(jobs.c.id == job_id).values(state=JobState.RUNNING))
        tx.connection.execute(update(job_dependencies).values(condition="ok"))
    move(api, needed, JobState.FAILED)
    assert api.job(job_id)["state"] == "running"


def test_a_job_cannot_need_what_is_not_there_or_what_must_not_be_seen(api: Api) -> None:
    secret, lost = api.submit("bob", private=True), api.submit()
    move(api, lost, JobState.FAILED)
    body = {"name": "x", "run": {"command": ["true"]}, "after": [secret, secret + 1000, lost]}
    for path in ("/jobs", "/jobs?dry_run=true"):
        answer = api.request("POST", path, json=body)
        assert answer.status_code == 422
        told = {one["pointer"]: one["message"] for one in answer.json()["errors"]}
        assert told == {
            "after[0]": f"there is no job {secret}",
            "after[1]": f"there is no job {secret + 1000}",
            "after[2]": f"it needs job {lost} to succeed, and job {lost} failed: this can never be",
        }
    assert after(api, secret, who="bob")


def test_a_job_that_ended_between_check_and_commit_takes_the_newcomer_with_it(api: Api) -> None:
    needed, newcomer = api.submit(), api.submit()
    move(api, needed, JobState.FAILED)
    with api.database.write() as tx:
        store_needs(tx, {newcomer: [(needed, "ok")]})
        cancel_hopeless(tx, [newcomer])
    assert api.job(newcomer)["state"] == "cancelled"


def waits_for_a_lock(api: Api) -> bool:
    """Whether a transaction waits for another one's row. On SQLite the second one has to wait before it begins."""
    if api.database.is_sqlite:
        return True
    query = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
    with api.database.read() as connection:
        return bool(connection.execute(text(query)).scalar_one())


def test_a_job_that_ends_while_its_dependent_is_stored_is_seen_by_it(api: Api) -> None:
    """The end has looked for dependents already, and is not yet committed: the newcomer waits for it, then follows."""
    needed, newcomer = api.submit(), api.submit()
    is_stored = threading.Event()

    def store() -> None:
        with api.database.write() as tx:
            store_needs(tx, {newcomer: [(needed, "ok")]})
            cancel_hopeless(tx, [newcomer])
        is_stored.set()

    with ThreadPoolExecutor(1) as threads:
        with api.database.write() as tx:
            move_job(tx, needed, JobState.FAILED, actor="test", text="")
            storing = threads.submit(store)
            wait_until(lambda: is_stored.is_set() or waits_for_a_lock(api), 60, "the newcomer does not come")
        storing.result(60)
    assert api.job(newcomer)["state"] == "cancelled"


def test_submissions_and_ends_at_the_same_time_leave_nobody_waiting_for_the_ended(api: Api) -> None:
    """Either the end sees the newcomer, or the newcomer sees the end; never neither."""
    for _ in range(3):
        needed = api.submit()
        barrier = threading.Barrier(3)

        def submit(job: int = needed, gate: threading.Barrier = barrier) -> Any:
            gate.wait(60)
            return api.request("POST", "/jobs", json={"name": "x", "run": {"command": ["true"]}, "after": [job]})

        def end(job: int = needed, gate: threading.Barrier = barrier) -> Any:
            gate.wait(60)
            return api.cancel(job)

        with ThreadPoolExecutor(3) as threads:
            results = [threads.submit(submit), threads.submit(submit), threads.submit(end)]
            answers = [result.result(60) for result in results]
        accepted = [answer.json()["id"] for answer in answers[:2] if answer.status_code == 201]
        assert all(answer.status_code in (201, 422) for answer in answers[:2])
        assert [api.job(job_id)["state"] for job_id in accepted] == ["cancelled"] * len(accepted)


# --- The same spec in each attempt ---------------------------------------------------------------------------------


def test_o23_a_preempted_job_runs_again_with_the_same_spec_limit_and_turn(api: Api) -> None:
    members: dict[str, Any] = {
        "env": {"A": "ä"}, "priority": "high", "tags": {"p": "x"}, "retry": {"max": 5}, "stop_grace": "7s",
        "resources": {"gpus": 1, "time": "1h", "cpus": 1.5}, "preemptible": True, "on_disconnect": "stop",
        "on_time_limit": "requeue",
    }  # fmt: skip
    kept = (
        "spec", "limit_seconds", "priority", "tags", "node_labels", "gpu_memory_bytes", "is_exclusive",
        "is_preemptible", "on_time_limit", "num_charged_retries", "start_after", "hold_reason", "layouts",
    )  # fmt: skip
    node = api.node()
    job_id = api.submit(**members)
    post(api, job_id, "priority", priority=3)
    before = row(api, job_id)
    plans = []
    for number in range(3):
        (part,) = api.start(job_id, node)
        assert part.plan["attempt_number"] == number + 1
        plans.append({k: v for k, v in part.plan.items() if k not in ("attempt_id", "attempt_number", "start_reason")})
        with api.database.write() as tx:
            stop_attempt(
                tx, part.attempt_id, StopIntent.PREEMPT, detail="for job 1", settle_seconds=60.0, actor="scheduler"
            )
        part.ended(-15, stopped=True, signal="SIGTERM", stop_intent="preempt")
        now = row(api, job_id)
        assert now.state == JobState.WAITING
        assert {name: getattr(now, name) for name in kept} == {name: getattr(before, name) for name in kept}
    assert plans[0] == plans[1] == plans[2]
    assert (plans[0]["time_limit_seconds"], plans[0]["stop_grace_seconds"]) == (3600, 7)
