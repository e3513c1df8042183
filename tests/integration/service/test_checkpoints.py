"""A checkpoint counts from the moment the API accepts the bytes that tell of it, for the attempt that holds the job."""

from __future__ import annotations

import json
import threading
from typing import Any

import pytest
from sqlalchemy import text

from service.operations import accept_checkpoints, append_stream
from service.operations.accept_checkpoints import MAX_NOTICES_TOLD
from service.operations.report_attempt import open_part
from tests.integration.service.api_server import Api, FakeNode, Supervisor
from tests.support.wait import wait_until

GANG: dict[str, Any] = {"resources": {"nodes": 2, "gpus_per_node": 1}}


def running(api: Api, *nodes: FakeNode, **members: Any) -> tuple[int, list[Supervisor]]:
    """A training that runs on these nodes."""
    job_id = api.train(**members)
    return job_id, api.start(job_id, *nodes)


def seeing(api: Api, name: str, folder: str | None, **more: Any) -> FakeNode:
    """A node whose agent tells of this shared folder."""
    node = api.node(name, **more)
    node.inventory["shared_folder_id"] = folder
    node.beat()
    return node


def lose(api: Api, *parts: Supervisor) -> None:
    """The nodes of these parts fall silent until they are lost."""
    sweeper = api.sweeper()
    others = {node.name: node for part in parts for node in [part.node]}
    assert others
    for now in range(0, 200, 2):
        sweeper.sweep(float(now))


def events_of(api: Api, job_id: int, kind: str) -> list[str]:
    return [event["text"] for event in api.get(f"/jobs/{job_id}/events?limit=1000")["items"] if event["kind"] == kind]


# --- Accepting -----------------------------------------------------------------------------------------------------


def test_an_accepted_checkpoint_is_where_the_next_attempt_starts(api: Api) -> None:
    job_id, (part,) = running(api, api.node(), retry={"max": 1})
    assert part.plan["training"]["resume_from"] == []

    assert [part.checkpoint(step).status_code for step in (10, 20)] == [200, 200]
    assert api.job(job_id)["checkpoint"]["step"] == 20
    part.ended(65)
    (after,) = api.start(job_id, part.node)

    first = f"attempt-{part.attempt_id}"
    assert after.plan["training"]["resume_from"] == [
        {"path": f"{first}/step-00000020", "step": 20},
        {"path": f"{first}/step-00000010", "step": 10},
    ]
    assert after.plan["training"]["checkpoint_subfolder"] == f"attempt-{after.attempt_id}" != first


def test_what_is_told_of_a_checkpoint_can_be_read_by_its_team(api: Api) -> None:
    job_id, (part,) = running(api, seeing(api, "node-1", "nfs"))
    part.checkpoint(10)

    (item,) = api.get(f"/jobs/{job_id}/checkpoints", "amy")["items"]

    assert item.pop("accepted_at").endswith("Z")
    assert item == {
        "step": 10, "samples_seen": 320, "num_bytes": 1000, "attempt": 1, "shared_folder_id": "nfs",
        "path": f"attempt-{part.attempt_id}/step-00000010", "nodes": ["node-1"],
    }  # fmt: skip
    assert api.request("GET", f"/jobs/{job_id}/checkpoints", "bob").status_code == 403
    assert api.job(job_id, "bob")["checkpoint"] is None
    (listed,) = api.get("/jobs")["items"]
    assert listed["checkpoint"]["step"] == 10


def test_bytes_that_are_sent_again_make_no_second_checkpoint(api: Api) -> None:
    job_id, (part,) = running(api, api.node())
    part.checkpoint(10)
    sent = part.num_event_bytes
    part.num_event_bytes = 0
    assert part.checkpoint(10).json() == {"size": sent}
    part.num_event_bytes = sent
    part.checkpoint(10, num_bytes=7)  # the trainer itself writes it anew

    (item,) = api.get(f"/jobs/{job_id}/checkpoints")["items"]
    assert item["num_bytes"] == 7


def test_a_checkpoint_counts_only_once_its_whole_line_is_there(api: Api) -> None:
    job_id, (part,) = running(api, api.node())
    line = json.dumps(
        {"kind": "checkpoint", "step": 5, "path": f"attempt-{part.attempt_id}/a", "samples_seen": 1, "num_bytes": 1}
    ).encode()
    part.append(line, 0, kind="events")
    assert api.checkpoints(job_id) == []
    part.append(b"\n", len(line), kind="events")
    assert api.checkpoints(job_id) == [5]


def test_a_removed_checkpoint_is_no_resume_point_any_more(api: Api) -> None:
    job_id, (part,) = running(api, api.node())
    for step in (10, 20, 30):
        part.checkpoint(step)
    removed = {"kind": "checkpoint_removed", "path": f"attempt-{part.attempt_id}/step-00000010"}
    part.tell(removed, removed, {**removed, "path": "attempt-1/unknown"})

    assert api.checkpoints(job_id) == [30, 20]


def test_a_job_that_tells_of_ever_more_checkpoints_does_not_fill_the_table(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(accept_checkpoints, "MAX_CHECKPOINTS_KNOWN", 5)
    other, (kept,) = running(api, api.node("node-1", slots=1))
    kept.checkpoint(1)
    job_id, (part,) = running(api, api.node("node-2"))
    for step in range(1, 9):
        part.checkpoint(step)
    part.tell({"kind": "checkpoint_removed", "path": f"attempt-{part.attempt_id}/step-00000001"})

    assert (api.checkpoints(job_id), api.checkpoints(other)) == ([8, 7, 6, 5, 4], [1])
    assert len(api.snapshot()["checkpoints"]) == 6


@pytest.mark.parametrize(
    ("event", "why"),
    [
        ({"path": "/etc/passwd"}, "without a path below"),
        ({"path": "attempt-{id}/../../x"}, "without a path below"),
        ({"path": "attempt-{id}//x"}, "without a path below"),
        ({"path": "attempt-999/step-1"}, "outside of attempt-"),
        ({"path": ""}, "without a path below"),
        ({"path": "attempt-{id}/" + "x" * 600}, "without a path below"),
        ({"path": None}, "without a path below"),
        ({"step": -1}, "without step"),
        ({"step": True}, "without step"),
        ({"step": 1.5}, "without step"),
        ({"samples_seen": 2**63}, "without step"),
        ({"num_bytes": None}, "without step"),
        ({"kind": "notice", "text": " "}, "a notice without text"),
        ({"kind": "checkpoint_removed", "path": 3}, "without a path"),
    ],
)
def test_what_is_no_checkpoint_is_refused_with_the_reason(api: Api, event: dict[str, Any], why: str) -> None:
    job_id, (part,) = running(api, api.node())
    sound = {"kind": "checkpoint", "step": 1, "path": "attempt-{id}/a", "samples_seen": 1, "num_bytes": 1}
    told = {**sound, **event}
    if isinstance(told["path"], str):
        told["path"] = told["path"].replace("{id}", str(part.attempt_id))

    assert part.tell(told).status_code == 200

    assert api.checkpoints(job_id) == []
    (refusal,) = events_of(api, job_id, "report_refused")
    assert why in refusal


def test_a_script_cannot_tell_of_checkpoints_nor_pin_itself(api: Api) -> None:
    job_id = api.submit()
    (part,) = api.start(job_id, api.node())
    part.checkpoint(10)
    part.tell({"kind": "notice", "text": "hello"})

    assert (api.checkpoints(job_id), events_of(api, job_id, "notice")) == ([], [])
    assert "Gangline's own loop" in events_of(api, job_id, "report_refused")[0]
    assert (part.plan["training"], part.plan["shared_folder_id"]) == (None, None)


def test_only_rank_0_tells_of_checkpoints(api: Api) -> None:
    job_id, (part,) = running(api, api.node(), resources={"gpus": 2})
    told = {"kind": "checkpoint", "step": 1, "path": f"attempt-{part.attempt_id}/a", "samples_seen": 1, "num_bytes": 1}
    part.append(json.dumps(told).encode() + b"\n", 0, kind="events", rank_number=1)

    assert api.checkpoints(job_id) == []
    assert "only rank 0" in events_of(api, job_id, "report_refused")[0]


def test_notices_become_events_of_the_job_as_long_as_there_are_few(api: Api) -> None:
    job_id, (part,) = running(api, api.node())
    part.tell({"kind": "notice", "text": "checkpoint attempt-1/x is broken: \u0000 its checksum differs"})
    for number in range(MAX_NOTICES_TOLD + 20):
        part.tell({"kind": "notice", "text": f"notice {number}"})

    told = events_of(api, job_id, "notice")
    assert told[0] == "checkpoint attempt-1/x is broken: \ufffd its checksum differs"
    assert len(told) == MAX_NOTICES_TOLD


# --- Fencing -------------------------------------------------------------------------------------------------------


def test_a_fenced_attempt_commits_no_checkpoint(api: Api) -> None:
    job_id, (part,) = running(api, api.node("node-1"))
    part.checkpoint(10)
    lose(api, part)
    before = api.snapshot()

    answer = part.checkpoint(20)

    assert (answer.status_code, answer.json()["code"]) == (409, "attempt_fenced")
    assert api.snapshot() == before
    assert api.checkpoints(job_id) == [10]


def is_held_off(api: Api) -> bool:
    """Whether somebody waits for a lock of another transaction."""
    if api.database.is_sqlite:
        return api.database._write_lock.locked()
    with api.database.read() as connection:
        query = "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock' AND datname = current_database()"
        return bool(connection.execute(text(query)).scalar_one())


@pytest.mark.parametrize("kind", ["log", "events"])
def test_nobody_ends_a_part_between_the_look_at_it_and_the_commit_of_its_bytes(
    api: Api, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else bytes, and a checkpoint with them, would be accepted after the next attempt was told where to resume."""
    job_id, (part,) = running(api, api.node(), retry={"max": 1})
    looks: list[str] = []
    order: list[str] = []

    def end() -> None:
        part.call("POST", "ended", content=json.dumps(part.report(65)))
        order.append("ended")

    ending = threading.Thread(target=end)

    def look_while_it_ends(connection: Any, of_part: Any) -> Any:
        row = open_part(connection, of_part)
        looks.append(row.state)
        if len(looks) == 2:  # the second look is the one inside the transaction that writes
            ending.start()
            wait_until(lambda: bool(order) or is_held_off(api), 25, "the end neither waits nor is done")
            order.append("accepted")
        return row

    monkeypatch.setattr(append_stream, "open_part", look_while_it_ends)
    answer = part.checkpoint(10) if kind == "events" else part.append(b"line\n", 0)
    ending.join(60)

    assert (answer.status_code, looks) == (200, ["started", "started"])
    assert order == ["accepted", "ended"]
    assert api.job(job_id)["state"] == "waiting"


# --- Where a job resumes -------------------------------------------------------------------------------------------


def test_resume_points_are_chosen_once_for_all_nodes_of_an_attempt(api: Api) -> None:
    nodes = [seeing(api, name, "nfs", slots=1) for name in ("node-1", "node-2")]
    job_id, (first, second) = running(api, *nodes, **GANG, retry={"max": 1})
    first.checkpoint(10)
    first.ended(65)
    second.ended(68)
    api.place()
    attempt_id = api.attempt_id(job_id)

    told = nodes[0].claim(attempt_id)
    told.checkpoint(20)
    late = nodes[1].claim(attempt_id)

    assert [point["step"] for point in told.plan["training"]["resume_from"]] == [10]
    assert late.plan["training"]["resume_from"] == told.plan["training"]["resume_from"]
    again = nodes[0].try_claim(attempt_id, told.token).json()
    assert again == told.plan, "the same token gets the same answer"


def test_a_bounded_number_of_points_is_told_the_newest_first(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(accept_checkpoints, "MAX_RESUME_POINTS", 4)
    job_id, (part,) = running(api, api.node(), retry={"max": 1})
    for step in (1, 2, 9, 10, 11, 12, 5):
        part.checkpoint(step)
    part.ended(65)
    (after,) = api.start(job_id, part.node)

    assert [point["step"] for point in after.plan["training"]["resume_from"]] == [12, 11, 10, 9]


@pytest.mark.parametrize(
    ("folders", "shared"),
    [(("nfs", "nfs"), "nfs"), (("nfs", "other"), None), (("nfs", None), None), ((None, None), None)],
)
def test_checkpoints_are_shared_only_if_all_nodes_tell_of_the_same_folder(
    api: Api, folders: tuple[str | None, str | None], shared: str | None
) -> None:
    nodes = [seeing(api, f"node-{number}", folder, slots=1) for number, folder in enumerate(folders, start=1)]
    job_id, parts = running(api, *nodes, **GANG)

    assert [part.plan["shared_folder_id"] for part in parts] == [shared, shared]
    assert [part.plan["training"]["is_checkpoint_root_shared"] for part in parts] == [shared is not None] * 2
    assert [part.plan["training"]["checkpoint_root"] for part in parts] == [None, None], "the node knows"
    parts[0].checkpoint(10)
    (item,) = api.get(f"/jobs/{job_id}/checkpoints")["items"]
    assert (item["shared_folder_id"], item["nodes"]) == (shared, ["node-1", "node-2"])


def test_a_checkpoint_in_a_shared_folder_is_continued_on_another_node_that_sees_it(api: Api) -> None:
    first = seeing(api, "node-1", "nfs")
    job_id, (part,) = running(api, first)
    part.checkpoint(10)
    lose(api, part)
    api.node("node-2")
    assert api.place() == 0

    job = api.job(job_id)
    assert (job["state"], job["reason"]["code"]) == ("waiting", "pinned")
    assert f"gang requeue {job_id} --from-start" in job["reason"]["fix"]
    third = seeing(api, "node-3", "nfs")
    assert api.start(job_id, third)[0].plan["training"]["resume_from"][0]["step"] == 10


def test_a_checkpoint_on_a_node_pins_the_job_to_it_until_it_is_back(api: Api) -> None:
    first = api.node("node-1")
    job_id, (part,) = running(api, first)
    part.checkpoint(10)
    lose(api, part)
    api.node("node-2")
    assert (api.place(), api.job(job_id)["reason"]["code"]) == (0, "pinned")
    assert "node-1 is lost" in api.job(job_id)["reason"]["text"]

    first.beat(attempts=[])
    assert api.start(job_id, first)[0].plan["training"]["resume_from"][0]["step"] == 10


@pytest.mark.parametrize(("before", "after"), [(None, "nfs"), ("nfs", None), ("nfs", "other")])
def test_a_job_stays_where_its_checkpoints_lie_when_a_shared_folder_comes_or_goes(
    api: Api, before: str | None, after: str | None
) -> None:
    """Else its ranks would look for them in a folder that never held them."""
    node = seeing(api, "node-1", before)
    job_id, (part,) = running(api, node, retry={"max": 1})
    part.checkpoint(10)
    part.ended(65)
    assert api.place() == 1
    node.inventory["shared_folder_id"] = after  # its agent is started anew between the placement and the claim
    node.beat()

    plan = node.claim(api.attempt_id(job_id)).plan

    assert [point["step"] for point in plan["training"]["resume_from"]] == [10]
    assert (plan["shared_folder_id"], plan["training"]["is_checkpoint_root_shared"]) == (before, before is not None)


def test_a_training_without_a_checkpoint_starts_anywhere(api: Api) -> None:
    job_id, (part,) = running(api, api.node("node-1"))
    lose(api, part)
    assert api.start(job_id, api.node("node-2"))[0].plan["training"]["resume_from"] == []


def test_a_training_that_this_version_cannot_plan_ends_with_the_reason_and_is_not_tried_for_ever(api: Api) -> None:
    nodes = [api.node(name, slots=1) for name in ("node-1", "node-2")]
    job_id = api.train(**GANG)
    with api.database.write() as tx:
        spec = tx.connection.execute(text("SELECT spec FROM jobs")).scalar_one().replace('"adamw"', '"adam_of_old"')
        tx.connection.execute(text("UPDATE jobs SET spec = :spec"), {"spec": spec})
    api.place()

    answer = nodes[0].try_claim(api.attempt_id(job_id), "gla_" + "x" * 40)

    assert (answer.status_code, answer.json()["code"]) == (409, "not_assigned")
    job = api.job(job_id)
    assert (job["state"], job["outcome"]) == ("failed", "config_error")
    assert "train.optimizer cannot be 'adam_of_old'" in job["cause"]["sentence"]
    assert api.held_gpus() == []


# --- Requeue -------------------------------------------------------------------------------------------------------


def test_a_requeued_job_stops_and_starts_again_from_its_last_checkpoint_uncharged(api: Api) -> None:
    job_id, (part,) = running(api, api.node(), retry={"max": 1})
    part.checkpoint(10)

    answer = api.requeue(job_id, reason="make room")

    assert (answer.status_code, answer.json()["state"]) == (202, "stopping")
    assert part.directive()["stop"]["intent"] == "preempt"
    part.checkpoint(17)
    part.ended(75, stopped=True, result="preempted")
    job = api.job(job_id)
    assert (job["state"], job["cause"]["outcome"]) == ("waiting", "preempted")
    assert "requeued by ann: make room" in job["cause"]["sentence"]
    (after,) = api.start(job_id, part.node)
    assert after.plan["training"]["resume_from"][0]["step"] == 17
    assert after.plan["start_reason"] == "preempted"
    after.ended(65)
    assert api.job(job_id)["state"] == "waiting", "the retry that it had is still there"


def test_a_job_requeued_from_the_start_forgets_even_the_checkpoint_that_it_writes_on_the_way_out(api: Api) -> None:
    job_id, (part,) = running(api, api.node("node-1"))
    part.checkpoint(10)

    assert api.requeue(job_id, from_start=True).status_code == 202
    assert api.checkpoints(job_id) == []
    part.checkpoint(17)
    part.ended(75, stopped=True, result="preempted")

    assert (api.checkpoints(job_id), api.job(job_id)["checkpoint"]) == ([], None)
    (after,) = api.start(job_id, part.node)
    assert after.plan["training"]["resume_from"] == []
    after.checkpoint(3)
    assert api.checkpoints(job_id) == [3], "what it writes from now on counts"


def test_a_pinned_job_is_freed_by_requeueing_it_from_the_start(api: Api) -> None:
    job_id, (part,) = running(api, api.node("node-1"))
    part.checkpoint(10)
    lose(api, part)
    other = api.node("node-2")
    assert (api.place(), api.job(job_id)["reason"]["code"]) == (0, "pinned")

    assert api.requeue(job_id, "root", from_start=True).json()["state"] == "waiting"

    assert api.start(job_id, other)[0].plan["training"]["resume_from"] == []


def test_a_starting_job_is_stopped_like_a_running_one(api: Api) -> None:
    job_id = api.train()
    node = api.node()
    api.place()
    assert api.job(job_id)["state"] == "starting"
    assert api.requeue(job_id).json()["state"] == "waiting"
    assert api.start(job_id, node)
    assert api.job(job_id)["state"] == "running"


def test_asking_again_while_it_stops_for_a_requeue_changes_nothing(api: Api) -> None:
    job_id, _ = running(api, api.node())
    assert api.requeue(job_id).status_code == 202
    before = api.snapshot()
    assert [api.requeue(job_id).status_code for _ in range(2)] == [202, 202]
    assert api.snapshot() == before


def test_what_cannot_be_requeued_says_why_and_what_to_do(api: Api) -> None:
    waiting = api.train()
    assert api.requeue(waiting).json()["code"] == "conflict"
    assert "--from-start" in api.requeue(waiting).json()["fix"]

    ended, (part,) = running(api, api.node("node-1", slots=8))
    part.ended(0, result="succeeded")
    assert "gang submit" in api.requeue(ended).json()["fix"]

    cancelled, _ = running(api, part.node)
    api.cancel(cancelled)
    assert "is being cancelled" in api.requeue(cancelled, from_start=True).json()["detail"]

    failing, (first, *_) = running(api, part.node)
    first.call("POST", "failing", content=json.dumps(first.report(65)))
    assert "is stopping already (peer_failure)" in api.requeue(failing).json()["detail"]
    for body in ({"from_start": "yes"}, {"reason": 3}, {"reason": "x" * 2000}):
        assert api.request("POST", f"/jobs/{waiting}/requeue", "ann", json=body).status_code == 422


def test_a_requeue_is_the_owners_or_an_admins(api: Api) -> None:
    job_id, _ = running(api, api.node())
    assert [api.requeue(job_id, who).status_code for who in ("amy", "bob")] == [403, 403]
    assert api.job(job_id)["state"] == "running"
    assert api.requeue(job_id, "root").status_code == 202


# --- Ends ----------------------------------------------------------------------------------------------------------


def test_a_training_that_finished_while_it_was_asked_to_make_room_has_succeeded(api: Api) -> None:
    job_id, (part,) = running(api, api.node())
    api.requeue(job_id)
    part.ended(0, result="succeeded")
    assert api.job(job_id)["state"] == "succeeded"


@pytest.mark.parametrize(
    ("end", "outcome"),
    [({"signal": "SIGABRT", "result": "succeeded"}, "succeeded"), ({"code": 75, "result": "preempted"}, "preempted")],
)
def test_a_node_whose_ranks_came_to_the_end_gets_no_peer_stopped(api: Api, end: dict[str, Any], outcome: str) -> None:
    job_id, (first, second) = running(api, api.node("node-1", slots=1), api.node("node-2", slots=1), **GANG)

    first.ended(**end)

    assert (api.job(job_id)["state"], second.directive()["stop"]) == ("running", None)
    second.ended(**end)
    assert api.job(job_id)["cause"]["outcome"] == outcome


def test_a_second_hang_of_a_job_ends_it(api: Api) -> None:
    from tests.unit.service.endings import failure

    job_id, (part,) = running(api, api.node())
    part.ended(0, stopped=True, signal="SIGKILL", failure=failure("hang", "rank 0 stands still", rank=0))
    job = api.job(job_id)
    assert (job["state"], job["cause"]["outcome"], job["cause"]["rank"]) == ("waiting", "hang", 0)
    assert f"gang logs {job_id} --rank 0" in job["cause"]["fix"]
    (again,) = api.start(job_id, part.node)
    again.ended(0, stopped=True, signal="SIGKILL", failure=failure("hang", "rank 0 stands still", rank=0))

    assert (api.job(job_id)["state"], api.job(job_id)["outcome"]) == ("failed", "hang")
