"""What an admin says of a node: cordon, drain, resume, labels. Who may, what follows, and what is told of it."""

from __future__ import annotations

from typing import Any

import httpx
import pytest
from sqlalchemy import select, update

from service.db.tables import events, jobs, nodes, world_changes
from service.operations.cordon_node import end_overdue_cordon
from tests.integration.service.api_server import Api, FakeNode, Supervisor

SAY: dict[str, dict[str, Any]] = {
    "cordon": {"reason": "new driver"},
    "drain": {"reason": "new driver"},
    "resume": {},
    "labels": {"labels": {"switch": "leaf-3"}},
}
ONE_OF_EACH: dict[str, Any] = {"resources": {"gpus": 1}}


def say(api: Api, verb: str, name: str = "node-1", who: str = "root", **body: Any) -> httpx.Response:
    return api.request("POST", f"/nodes/{name}/{verb}", who, json=body or SAY[verb])


def said(api: Api, verb: str, name: str = "node-1", **body: Any) -> dict[str, Any]:
    answer = say(api, verb, name, **body)
    assert answer.status_code == 200, answer.text
    told: dict[str, Any] = answer.json()
    return told


def node_events(api: Api, name: str = "node-1") -> list[tuple[str, str, str]]:
    """Kind, actor and text of what an admin or the service said of a node."""
    kinds = ("node_cordoned", "node_draining", "node_resumed", "node_labelled")
    with api.database.read() as connection:
        query = select(events).where(events.c.node_name == name, events.c.kind.in_(kinds)).order_by(events.c.id)
        return [(event.kind, event.actor, event.text) for event in connection.execute(query)]


def marks(api: Api) -> int:
    """How often the scheduler is told to read a node again."""
    with api.database.read() as connection:
        return len(connection.execute(select(world_changes).where(world_changes.c.kind == "node")).all())


def resumable(api: Api, job_id: int, is_so: bool = True) -> int:
    """Make a job one that resumes, or not."""
    with api.database.write() as tx:
        tx.connection.execute(update(jobs).where(jobs.c.id == job_id).values(is_preemptible=is_so))
    return job_id


# --- Cordon and resume -----------------------------------------------------------------------------------------------


def test_a_cordoned_node_gets_no_new_work_keeps_its_old_and_says_why(api: Api) -> None:
    running = api.submit()
    api.start(running, api.node())

    told = said(api, "cordon", reason="new driver.", until="2099-01-02T03:04:05+02:00")
    waiting = api.submit()

    assert (told["cordoned"], told["draining"]) == ("new driver", False)
    assert told["cordon_until"] == "2099-01-02T01:04:05.000Z"
    assert (api.place(), api.job(running)["state"]) == (0, "running")
    assert "new driver" in api.job(waiting)["reason"]["text"]
    assert (said(api, "resume")["changed"], api.place()) == (True, 1)
    assert said(api, "resume")["changed"] is False


@pytest.mark.parametrize("verb", SAY)
def test_each_word_of_an_admin_is_an_event_with_its_actor_and_wakes_the_scheduler(api: Api, verb: str) -> None:
    api.node()
    if verb == "resume":
        said(api, "cordon")
    before, known = marks(api), len(node_events(api))

    said(api, verb)

    assert marks(api) == before + 1
    ((kind, actor, text),) = node_events(api)[known:]
    assert (kind, actor) == ("node_labelled" if verb == "labels" else kind, "root")
    assert ("switch=leaf-3" if verb == "labels" else "new driver") in text


@pytest.mark.parametrize("verb", SAY)
def test_an_unknown_node_is_not_found(api: Api, verb: str) -> None:
    assert say(api, verb, "node-9").status_code == 404


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ({}, "reason is missing"),
        ({"reason": " "}, "reason is missing"),
        ({"reason": "a\nb"}, "newline"),
        ({"reason": "x", "until": "soon"}, "'soon' is no time"),
        ({"reason": "x", "until": "2030-01-01T09:00:00"}, "has no zone"),
        ({"reason": "x", "until": "2020-01-01T09:00:00Z"}, "does not lie ahead"),
        ({"reason": "x", "until": "0s"}, "does not lie ahead"),
        ({"reason": "x", "till": "2h"}, "unknown members: till"),
    ],
)
def test_a_cordon_without_a_reason_or_with_an_end_that_is_none_is_refused(
    api: Api, body: dict[str, Any], problem: str
) -> None:
    api.node()
    for verb in ("cordon", "drain"):
        answer = api.request("POST", f"/nodes/node-1/{verb}", "root", json=body)
        assert (answer.status_code, problem in answer.json()["detail"]) == (422, True), answer.text
        assert answer.json()["fix"]
    assert node_events(api) == []


def test_a_cordon_that_has_come_to_its_end_is_lifted_with_an_event_and_one_that_was_put_off_is_not(api: Api) -> None:
    api.node("node-1"), api.node("node-2"), api.node("node-3")
    said(api, "cordon", until="1h", reason="dust")
    said(api, "drain", "node-2", until="1h", reason="dust")
    said(api, "cordon", "node-3", reason="for good")
    sweeper = api.sweeper()
    sweeper.sweep(1.0)
    assert [node["cordoned"] for node in api.get("/nodes")["items"]] == ["dust", "dust", "for good"]

    with api.database.write() as tx:
        tx.connection.execute(update(nodes).values(cordon_until=nodes.c.cordon_until - 3_601))
    said(api, "drain", "node-2", until="2h", reason="more dust")
    sweeper.sweep(2.0)

    assert [node["cordoned"] for node in api.get("/nodes")["items"]] == [None, "more dust", "for good"]
    assert [event[:2] for event in node_events(api)] == [("node_cordoned", "root"), ("node_resumed", "service")]


def test_an_end_that_is_put_off_while_the_sweeper_looks_is_the_one_that_counts(api: Api) -> None:
    api.node()
    said(api, "cordon", reason="dust", until="1h")
    with api.database.write() as tx:
        seen = tx.connection.execute(update(nodes).values(cordon_until=1.0).returning(nodes)).one()
    said(api, "cordon", reason="more dust", until="2h")

    with api.database.write() as tx:
        end_overdue_cordon(tx, seen)

    assert api.get("/nodes")["items"][0]["cordoned"] == "more dust"


# --- Drain -----------------------------------------------------------------------------------------------------------


def saved(part: Supervisor) -> Supervisor:
    """A script that has told of a checkpoint."""
    part.tell({"kind": "progress", "step": 1, "checkpoint": "step-1"})
    return part


def sharing(api: Api, name: str = "node-1", slots: int = 2, folder: str = "nfs") -> FakeNode:
    """A node that sees a shared folder."""
    node = api.node(name, slots=slots)
    node.inventory["shared_folder_id"] = folder
    node.beat()
    return node


def test_a_drain_stops_what_resumes_and_what_has_not_begun_and_lets_the_others_run_on(api: Api) -> None:
    node = sharing(api, slots=3)
    resuming, going_on = api.train(**ONE_OF_EACH), resumable(api, api.submit(**ONE_OF_EACH), False)
    parts = {job_id: saved(api.start(job_id, node)[0]) for job_id in (resuming, going_on)}
    unclaimed = resumable(api, api.submit(**ONE_OF_EACH), False)
    api.place()
    sharing(api, "node-2")

    told = said(api, "drain")

    assert (told["draining"], told["stopped"], told["going_on"]) == (True, [resuming, unclaimed], [going_on])
    assert told["cannot_move"] == []
    stop = parts[resuming].directive()["stop"]
    assert (stop["intent"], parts[going_on].directive()["stop"]) == ("drain", None)
    assert (api.job(unclaimed)["state"], api.job(resuming)["attempt"]["stop_reason"]) == ("waiting", "drain")
    parts[resuming].ended(75, stopped=True, stop_intent="drain")
    job = api.job(resuming)
    assert (job["state"], job["cause"]["outcome"], job["cause"]["stop_reason"]) == ("waiting", "preempted", "drain")
    assert "node-1 is drained: new driver" in job["cause"]["sentence"]
    assert api.job(going_on)["state"] == "running"


def test_a_drain_stops_a_training_at_once_and_no_script_since_its_checkpoints_lie_on_its_own_nodes(api: Api) -> None:
    node = sharing(api)
    script, training = resumable(api, api.submit(**ONE_OF_EACH)), api.train(**ONE_OF_EACH)
    parts = {job_id: api.start(job_id, node)[0] for job_id in (script, training)}
    sharing(api, "node-2")

    told = said(api, "drain")
    sweeper = api.sweeper()
    sweeper.sweep(1.0)

    assert (told["stopped"], told["going_on"]) == ([training], [script])
    assert parts[script].directive()["stop"] is None
    saved(parts[script])
    sweeper.sweep(2.0)
    assert parts[script].directive()["stop"] is None
    why = "checkpoints lie on node-1 alone"
    assert said(api, "drain")["cannot_move"] == [{"job_id": script, "why": why}]


def test_a_drain_now_stops_all_of_them_and_none_is_charged_for_it(api: Api) -> None:
    node = api.node()
    job_id = resumable(api, api.submit(), False)
    part = api.start(job_id, node)[0]

    assert said(api, "drain", reason="smoke", now=True)["stopped"] == [job_id]
    part.ended(143, stopped=True, signal="SIGTERM", stop_intent="drain")

    with api.database.read() as connection:
        row = connection.execute(select(jobs.c.state, jobs.c.num_charged_retries, jobs.c.num_pool_retries)).one()
    assert tuple(row) == ("waiting", 0, 0)
    api.node("node-2")
    assert api.place() == 1


def test_a_job_whose_checkpoints_lie_on_the_node_alone_runs_on_and_is_named_with_why(api: Api) -> None:
    node = api.node()
    script, training = resumable(api, api.submit(**ONE_OF_EACH)), api.train(**ONE_OF_EACH)
    parts = [saved(api.start(script, node)[0]), api.start(training, node)[0]]
    api.node("node-2")

    told = said(api, "drain")
    api.sweeper().sweep(1.0)

    assert (told["stopped"], told["going_on"]) == ([], [script, training])
    why = "checkpoints lie on node-1 alone"
    assert told["cannot_move"] == [{"job_id": job_id, "why": why} for job_id in (script, training)]
    assert [part.directive()["stop"] for part in parts] == [None, None]

    told = said(api, "drain", reason="smoke", now=True)

    assert (told["stopped"], told["going_on"]) == ([script, training], [])
    assert [one["job_id"] for one in told["cannot_move"]] == [script, training]
    assert all(part.directive()["stop"]["intent"] == "drain" for part in parts)


def test_a_gang_whose_checkpoints_lie_on_its_own_nodes_runs_on_though_one_of_them_takes_work(api: Api) -> None:
    pair = [api.node(name) for name in ("node-1", "node-2")]
    job_id = api.train(resources={"nodes": 2, "gpus_per_node": 2})
    api.start(job_id, *pair)
    api.node("node-3")

    told = said(api, "drain")

    assert (told["stopped"], told["going_on"]) == ([], [job_id])
    assert told["cannot_move"] == [{"job_id": job_id, "why": "checkpoints lie on node-1, node-2 alone"}]


def test_a_job_that_no_other_node_could_hold_runs_on_wherever_its_checkpoints_lie(api: Api) -> None:
    node = sharing(api, slots=4)
    job_id = api.train(resources={"gpus": 4})
    api.start(job_id, node)
    sharing(api, "node-2")
    sharing(api, "node-3", slots=4)
    said(api, "cordon", "node-3", reason="dust")

    told = said(api, "drain")

    assert (told["stopped"], told["going_on"]) == ([], [job_id])
    assert told["cannot_move"] == [{"job_id": job_id, "why": "no other node that takes work could hold it"}]
    said(api, "resume", "node-3")
    assert said(api, "drain")["stopped"] == [job_id]


def test_the_sweeper_goes_on_with_a_drain_and_stops_what_can_move_by_now(api: Api) -> None:
    job_id = api.train()
    part = saved(api.start(job_id, sharing(api))[0])
    other = sharing(api, "node-2", folder="another")
    with api.database.write() as tx:  # as a server leaves it that ends between its two steps
        drain = update(nodes).where(nodes.c.name == "node-1").values(cordon_reason="new driver", is_draining=True)
        tx.connection.execute(drain)
    sweeper = api.sweeper()

    sweeper.sweep(1.0)
    assert part.directive()["stop"] is None, "nobody else sees its checkpoint"
    other.inventory["shared_folder_id"] = "nfs"
    other.beat()
    sweeper.sweep(2.0)
    sweeper.sweep(3.0)

    assert part.directive()["stop"]["intent"] == "drain"
    told = [event for event in api.get(f"/jobs/{job_id}/events")["items"] if event["kind"] == "job_stopping"]
    assert len(told) == 1


def test_a_drain_past_its_end_stops_nothing_more(api: Api) -> None:
    (part,) = api.start(api.train(), sharing(api))
    sharing(api, "node-2")
    with api.database.write() as tx:
        tx.connection.execute(update(nodes).values(cordon_reason="x", is_draining=True, cordon_until=1.0))

    api.sweeper().sweep(1.0)

    assert (part.directive()["stop"], api.get("/nodes")["items"][0]["cordoned"]) == (None, None)


def test_a_cancel_wins_over_a_drain(api: Api) -> None:
    node = api.node()
    job_id = resumable(api, api.submit())
    part = saved(api.start(job_id, node)[0])
    said(api, "drain", reason="smoke", now=True)

    api.cancel(job_id)
    part.ended(0, stopped=True, stop_intent="drain")

    assert (api.job(job_id)["state"], api.job(job_id)["cause"]["stop_reason"]) == ("cancelled", "cancel")


# --- Labels ----------------------------------------------------------------------------------------------------------


def test_labels_are_set_one_by_one_and_taken_away_by_null(api: Api) -> None:
    api.node()
    assert said(api, "labels", labels={"switch": "leaf-3", "rack": "b/12"})["labels"] == {
        "rack": "b/12",
        "switch": "leaf-3",
    }
    assert said(api, "labels", labels={"rack": None, "fast": "yes"})["labels"] == {"fast": "yes", "switch": "leaf-3"}
    told = len(node_events(api))
    said(api, "labels", labels={"fast": "yes"})
    assert len(node_events(api)) == told, "nothing changed"


def test_all_faults_of_labels_are_told_at_once(api: Api) -> None:
    api.node()
    answer = say(api, "labels", labels={"a b": "x", "rack": 3, "ok": "fine", "row": ""})
    assert answer.status_code == 422
    assert len(answer.json()["errors"]) == 3
    assert say(api, "labels", labels={f"l{number}": "x" for number in range(51)}).status_code == 422
    assert api.get("/nodes")["items"][0]["labels"] == {}
