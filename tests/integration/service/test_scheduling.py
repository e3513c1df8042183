"""The scheduler's shell on real SQL: a world kept by changes, passes applied whole, preemption and its accounts."""

from __future__ import annotations

import dataclasses
import json
import random
import threading
from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import select, update

from gangline.protocol.launch import NodeFailure
from service import clock
from service.control import LeaseWatch
from service.db.leadership import LostLeadership, take_lease
from service.db.tables import attempts, jobs, nominations, world_changes
from service.errors import Conflict
from service.operations.extend_limit import extend_limit
from service.operations.load_limit_history import load_limit_history
from service.operations.set_quota import set_quota
from service.operations.set_user_cap import set_user_cap
from service.scheduler import cycle as cycle_module
from service.scheduler.cycle import Cycle
from service.scheduler.load_world import load_ended_ratios, load_ratios, load_world
from service.scheduler.world_mirror import COMPARE_SECONDS, differences
from tests.integration.service.api_server import Api, FakeNode, Supervisor


def scheduler(api: Api, **settings: Any) -> Cycle:
    """A scheduler that takes its turns by hand."""
    assert api.epoch is not None
    return Cycle(api.database, _with(api, **settings), api.epoch)


def _with(api: Api, **settings: Any) -> Any:
    return dataclasses.replace(api.state.settings, **settings)


def row(api: Api, job_id: int) -> Any:
    """A job's row."""
    with api.database.read() as connection:
        return connection.execute(select(jobs).where(jobs.c.id == job_id)).one()


def attempt_row(api: Api, attempt_id: int) -> Any:
    """An attempt's row."""
    with api.database.read() as connection:
        return connection.execute(select(attempts).where(attempts.c.id == attempt_id)).one()


def nominated(api: Api) -> dict[int, list[Any]]:
    """Nominated jobs, and the GPUs that are kept for them."""
    with api.database.read() as connection:
        return {one.job_id: json.loads(one.shares) for one in connection.execute(select(nominations))}


def change(api: Api, statement: Any) -> None:
    """Write behind the service's back."""
    with api.database.write() as tx:
        tx.connection.execute(statement)


def told(api: Api, job_id: int) -> list[str]:
    """The job's history."""
    return [event["text"] for event in api.get(f"/jobs/{job_id}/events?limit=1000", "root")["items"]]


def quota(api: Api, **gpus: int) -> None:
    for team, count in gpus.items():
        set_quota(api.database, team=team, changes={"quota_gpus": count}, actor="test")


def with_borrowers(api: Api, cycle: Cycle, count: int = 2) -> tuple[FakeNode, list[Supervisor]]:
    """A node that trainings of red fill by borrowing; blue has the quota."""
    node = api.node(slots=count)
    quota(api, red=0, blue=count)
    ids = [api.train() for _ in range(count)]
    assert cycle.turn() == count
    parts = [node.claim(api.attempt_id(job_id)) for job_id in ids]
    for part in parts:
        part.started()
    return node, parts


# --- The world is kept by changes ----------------------------------------------------------------------------------


def assert_true_to_sql(api: Api, cycle: Cycle) -> None:
    now = cycle.mirror.refresh()
    with api.database.read() as connection:
        anew, _ = load_world(connection, now, api.state.settings)
    anew.release_due(now)
    assert list(differences(cycle.mirror.world, anew)) == []


@pytest.mark.parametrize("seed", [1, 2, *(pytest.param(seed, marks=pytest.mark.full) for seed in range(3, 20))])
def test_the_kept_world_equals_one_that_is_read_anew_whatever_happens(api: Api, seed: int) -> None:
    dice = random.Random(seed)
    cycle = scheduler(api)
    nodes = [api.node(f"node-{number}", slots=dice.choice([2, 4])) for number in range(3)]
    running: list[Supervisor] = []
    known: list[int] = []

    def submit() -> None:
        who, gpus = dice.choice(["ann", "bob", "root"]), dice.choice([1, 1, 2, 4])
        make = dice.choice([api.train, api.submit])
        known.append(make(who, resources={"gpus": gpus, "time": "1h"}, hold=dice.random() < 0.1))

    def start() -> None:
        for node in nodes:
            for attempt_id in node.beat()["launch"]:
                running.append(node.claim(attempt_id))
                running[-1].started()

    def end() -> None:
        if running:
            part = running.pop(dice.randrange(len(running)))
            part.ended(dice.choice([0, 0, 1]))

    def cancel() -> None:
        if known:
            api.cancel(dice.choice(known), "root")

    def requeue() -> None:
        if known:
            api.requeue(dice.choice(known), "root")

    def retell() -> None:
        quota(api, **{dice.choice(["red", "blue", "main"]): dice.choice([0, 2, 4])})

    def release() -> None:
        if known:
            api.request("POST", f"/jobs/{dice.choice(known)}/{dice.choice(['hold', 'release'])}", "root", json={})

    def cap() -> None:
        set_user_cap(api.database, user="ann", cap_gpus=dice.choice([None, 2, 8]), actor="test")

    def join() -> None:
        if len(nodes) < 5:
            nodes.append(api.node(f"node-{len(nodes)}", slots=2))

    def quarantine() -> None:
        free = [node for node in nodes if not node.attempts]
        if free:
            node = dice.choice(free)
            node.beat(quarantined=dice.choice([{}, {f"{node.name}-0": "not clean"}]))

    def checkpoint() -> None:
        if running:
            dice.choice(running).checkpoint(dice.randrange(100))

    def cordon() -> None:
        node = dice.choice(nodes)
        api.request("POST", f"/nodes/{node.name}/{dice.choice(['cordon', 'resume'])}", "root", json={"reason": "look"})

    steps: list[Callable[[], object]] = [submit, submit, start, start, end, cancel, requeue, retell, release]
    steps += [cap, join, quarantine, checkpoint, cordon, cycle.turn, cycle.turn, cycle.turn]
    for _ in range(60):
        dice.choice(steps)()
        assert_true_to_sql(api, cycle)
    assert cycle.mirror.num_rebuilt < 5, "only where GPUs come or go under a job"
    assert cycle.num_passes > 2


def test_a_change_that_nobody_marked_is_found_within_a_minute(
    api: Api, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    cycle = scheduler(api)
    node = api.node(slots=1)
    api.submit(resources={"gpus": 1})
    waiting = api.submit(resources={"gpus": 1})
    cycle.turn()
    change(api, update(jobs).where(jobs.c.id == waiting).values(priority=7))
    cycle.turn()
    assert "world_differs" not in caplog.text

    now = clock.epoch()
    monkeypatch.setattr(api.database, "now", lambda connection: now + COMPARE_SECONDS + 1)
    node.beat()
    cycle.turn()
    assert f"world_differs what=waiting job {waiting}" in caplog.text
    assert cycle.mirror.world.queue.entries[waiting].job.priority == 7


def test_a_node_that_is_late_with_its_heartbeat_gets_nothing_though_nobody_marks_that(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle = scheduler(api)
    node = api.node(slots=1)
    cycle.turn()
    with monkeypatch.context() as later:
        now = clock.epoch()
        later.setattr(api.database, "now", lambda connection: now + 10.0)
        job_id = api.submit(resources={"gpus": 1})
        assert cycle.turn() == 0
        assert "node-1 is late with its heartbeat" in api.job(job_id)["reason"]["text"]
    node.beat()
    assert cycle.turn() == 1


def test_there_is_no_pass_while_nothing_has_changed_that_matters(api: Api) -> None:
    cycle = scheduler(api)
    node = api.node(slots=1)
    job_id = api.submit(resources={"gpus": 1})
    cycle.turn()
    cycle.turn()  # its own placement is news
    before = cycle.num_passes

    part = node.claim(api.attempt_id(job_id))
    part.started()
    part.append(b"hello\n", 0)
    node.beat()
    cycle.turn()
    cycle.turn()
    assert cycle.num_passes == before, "that a job runs on the GPUs it was given changes no decision"

    part.ended()
    cycle.turn()
    assert cycle.num_passes == before + 1


def test_marks_are_deleted_once_they_were_used_and_late_ones_are_read_late(api: Api) -> None:
    cycle = scheduler(api)
    api.node(slots=1)
    api.submit(resources={"gpus": 1})
    cycle.turn()
    with api.database.read() as connection:
        used = connection.execute(select(world_changes.c.id)).scalars().all()
    api.submit(resources={"gpus": 1})
    cycle.turn()
    with api.database.read() as connection:
        left = connection.execute(select(world_changes.c.id)).scalars().all()
    assert not set(used) & set(left)


def test_a_reason_is_stored_once_per_change(api: Api) -> None:
    cycle = scheduler(api)
    node = api.node(slots=1)
    ids = [api.submit(resources={"gpus": 1}) for _ in range(4)]
    cycle.turn()
    cycle.turn()
    versions = [row(api, job_id).version for job_id in ids]
    node.beat(quarantined={})
    for _ in range(3):
        cycle.mirror.world.version += 1  # something did change
        cycle.turn()
    assert [row(api, job_id).version for job_id in ids] == versions


# --- Preemption, from the decision to the exchange -----------------------------------------------------------------


def test_a_team_gets_its_quota_back_after_one_checkpoint_of_the_borrowers(api: Api) -> None:
    cycle = scheduler(api)
    node, parts = with_borrowers(api, cycle)
    victims = [row(api, attempt_row(api, part.attempt_id).job_id).id for part in parts]
    wanted = api.train("bob", resources={"gpus": 2})

    assert cycle.turn() == 0, "nothing is free yet"

    assert api.job(wanted)["reason"]["code"] == "nominated"
    for part in parts:
        attempt = attempt_row(api, part.attempt_id)
        assert (attempt.stop_intent, attempt.nominated_for) == ("preempt", wanted)
        assert attempt.stop_detail == f"team blue gets its quota back, for job {wanted} of bob"
        assert part.directive()["stop"]["intent"] == "preempt"
    assert [indices for _, indices in nominated(api)[wanted]] == [[0, 1]]

    parts[0].checkpoint(10)
    parts[0].ended(75, stopped_by_us=True, result="preempted")
    late = api.train("bob", resources={"gpus": 1})
    assert cycle.turn() == 0, "one of two GPUs is free, and kept: neither the victim nor anybody else takes it"
    parts[1].ended(75, stopped_by_us=True, result="preempted")
    assert cycle.turn() == 1

    assert api.job(wanted)["state"] == "starting"
    assert nominated(api) == {}
    assert {api.job(job_id)["state"] for job_id in (*victims, late)} == {"waiting"}
    first = row(api, victims[0])
    assert (first.num_stops, first.num_charged_retries, first.start_reason) == (1, 0, "preempted")
    (part,) = [node.claim(api.attempt_id(wanted))]
    part.started()
    part.ended(0, result="succeeded")
    cycle.turn()
    resumed = node.claim(api.attempt_id(victims[0]))
    assert [point["step"] for point in resumed.plan["training"]["resume_from"]] == [10]


def test_a_private_job_is_not_named_to_those_it_stops(api: Api) -> None:
    cycle = scheduler(api)
    _, parts = with_borrowers(api, cycle, 1)
    wanted = api.train("bob", resources={"gpus": 1}, private=True)
    cycle.turn()
    text = attempt_row(api, parts[0].attempt_id).stop_detail
    assert text == "team blue gets its quota back, for a private job of team blue"
    assert nominated(api).keys() == {wanted}


def test_one_that_does_not_commit_within_its_grace_starts_again_from_the_last_durable_checkpoint(api: Api) -> None:
    cycle = scheduler(api)
    node, (part,) = with_borrowers(api, cycle, 1)
    part.checkpoint(10)
    api.train("bob", resources={"gpus": 1})
    cycle.turn()
    part.ended(0, signal="SIGKILL", exit_code=None, stopped_by_us=True, killed_after_grace=True)
    victim = attempt_row(api, part.attempt_id).job_id
    cycle.turn()
    found = row(api, victim)
    assert (found.state, found.num_stops, found.num_charged_retries) == ("waiting", 1, 0)
    assert api.checkpoints(victim, "root") == [10]
    assert node.name == "node-1"


def between_plan_and_apply(monkeypatch: pytest.MonkeyPatch, change: Callable[[], object]) -> None:
    """Somebody else is faster: their change comes after the pass has decided, before it is applied."""
    real = cycle_module.plan

    def planned(*arguments: Any, **more: Any) -> Any:
        decided = real(*arguments, **more)
        change()
        return decided

    monkeypatch.setattr(cycle_module, "plan", planned)


def test_nobody_is_stopped_for_a_job_that_waits_no_more(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    cycle = scheduler(api)
    _, parts = with_borrowers(api, cycle)
    wanted = api.train("bob", resources={"gpus": 2})
    between_plan_and_apply(monkeypatch, lambda: api.cancel(wanted, "bob"))
    cycle.turn()
    assert [attempt_row(api, part.attempt_id).stop_intent for part in parts] == [None, None]
    assert nominated(api) == {}


def test_where_one_victim_has_just_ended_no_other_is_stopped_and_the_rest_of_the_pass_is_applied(
    api: Api, monkeypatch: pytest.MonkeyPatch
) -> None:
    cycle = scheduler(api)
    _, parts = with_borrowers(api, cycle)
    other = api.node("node-2", slots=1, model="other")
    quota(api, blue=3)
    wanted = api.train("bob", resources={"gpus": 2, "gpu": "cpu_slot"})
    beside = api.train("bob", resources={"gpus": 1, "gpu": "other"})
    between_plan_and_apply(monkeypatch, lambda: parts[1].ended(0, result="succeeded"))

    assert cycle.turn() == 1, "what does not rest on it is applied"

    assert attempt_row(api, parts[0].attempt_id).stop_intent is None
    assert nominated(api) == {}
    assert api.job(wanted)["state"] == "waiting"
    assert other.claim(api.attempt_id(beside))
    monkeypatch.undo()
    cycle.turn()
    assert nominated(api).keys() == {wanted}, "the next pass sees it"


@pytest.mark.parametrize("end", ["cancel", "hold", "cordon", "time"])
def test_a_nomination_dies_with_what_it_rests_on(api: Api, end: str) -> None:
    cycle = scheduler(api)
    with_borrowers(api, cycle)
    wanted = api.train("bob", resources={"gpus": 2})
    cycle.turn()
    assert nominated(api).keys() == {wanted}

    if end == "cancel":
        api.cancel(wanted, "bob")
    elif end == "hold":
        api.request("POST", f"/jobs/{wanted}/hold", "bob", json={})
    elif end == "cordon":
        assert api.request("POST", "/nodes/node-1/cordon", "root", json={"reason": "disk"}).status_code == 200
    else:
        change(api, update(nominations).values(expires_at=1.0))
    cycle.turn()
    assert wanted not in cycle.mirror.world.nominations or end == "time"
    if end != "time":
        assert nominated(api) == {}
    assert_true_to_sql(api, cycle)


def test_a_leader_whose_time_is_over_stops_and_nominates_nobody(api: Api) -> None:
    cycle = scheduler(api)
    with_borrowers(api, cycle)
    api.train("bob", resources={"gpus": 2})
    take_lease(api.database, "somebody else", lease_seconds=-1.0)
    before = api.snapshot()
    with pytest.raises(LostLeadership):
        cycle.turn()
    assert api.snapshot() == before


@pytest.mark.parametrize("number", [1, 2, *(pytest.param(number, marks=pytest.mark.full) for number in range(3, 501))])
def test_o18_two_schedulers_at_once_do_no_harm(api: Api, number: int) -> None:
    """Both hold the same epoch, so that the lease protects nothing: the guards alone must."""
    cycles = [scheduler(api), scheduler(api)]
    node = api.node(slots=4)
    quota(api, red=0, blue=4, main=4)
    borrowers = [api.train(resources={"gpus": 2}) for _ in range(2)]
    cycles[number % 2].turn()
    parts = [node.claim(api.attempt_id(job_id)) for job_id in borrowers]
    for part in parts:
        part.started()
    rivals: list[int] = []
    submitters = [threading.Thread(target=lambda who=who: rivals.append(api.train(who, resources={"gpus": 4})))
                  for who in ("bob", "root")]  # fmt: skip
    for thread in submitters:
        thread.start()
    for thread in submitters:
        thread.join()

    def turn_both() -> None:
        failures: list[Exception] = []

        def turn(cycle: Cycle) -> None:
            try:
                cycle.turn()
            except Exception as error:  # noqa: BLE001  # told by the assertion below, in the test's own thread
                failures.append(error)

        threads = [threading.Thread(target=turn, args=(cycle,)) for cycle in cycles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert failures == []
        assert len(api.held_gpus()) <= 4
        assert len(nominated(api)) <= 1, "the same GPUs are promised once"

    turn_both()
    for part in parts:
        part.ended(75, stopped_by_us=True, result="preempted")
        turn_both()
    for cycle in cycles:  # each has used marks that the other has not seen
        cycle.mirror.forget()
    turn_both()
    turn_both()
    states = sorted(api.job(job_id)["state"] for job_id in rivals)
    assert states == ["starting", "waiting"]
    assert {api.job(job_id)["state"] for job_id in borrowers} == {"waiting"}


# --- What a preempted run is worth ---------------------------------------------------------------------------------


def age(api: Api, part: Supervisor, *, created: float, running: float, checkpointed: float | None) -> None:
    """As if the attempt had run for longer: seconds ago."""
    now = clock.epoch()
    values: dict[str, Any] = {"created_at": now - created, "running_at": now - running}
    if checkpointed is not None:
        values["checkpointed_at"] = now - checkpointed
    change(api, update(attempts).where(attempts.c.id == part.attempt_id).values(**values))


def test_the_accounts_of_a_preempted_run_go_up_to_its_last_durable_checkpoint(api: Api) -> None:
    cycle = scheduler(api)
    _, (part,) = with_borrowers(api, cycle, 1)
    part.checkpoint(10)
    age(api, part, created=1030, running=1000, checkpointed=400)
    now = clock.epoch()
    progress = {"rank": 0, "step": 50, "total_steps": 100, "updated_at": now - 500, "seconds_per_step": 10.0}
    change(api, update(attempts).where(attempts.c.id == part.attempt_id).values(progress=json.dumps(progress)))
    cycle.mirror.forget()
    api.train("bob", resources={"gpus": 1})
    cycle.turn()
    part.ended(75, stopped_by_us=True, result="preempted")

    victim = row(api, attempt_row(api, part.attempt_id).job_id)
    near = pytest.approx
    assert victim.served_seconds == near(600, abs=10)
    assert victim.measured_left_seconds == near(400, abs=10), "500 s left when it reported, 100 s before the checkpoint"
    assert attempt_row(api, part.attempt_id).lost_gpu_seconds == near(400 + 30, abs=10)
    assert victim.wait_began_at == near(clock.epoch(), abs=10)
    cycle.mirror.forget()
    cycle.mirror.refresh()
    assert cycle.mirror.world.queue.entries[victim.id].left == near(400, abs=10)


def test_a_requeue_by_its_owner_is_no_preemption_and_from_the_start_leaves_nothing(api: Api) -> None:
    cycle = scheduler(api)
    _, (part,) = with_borrowers(api, cycle, 1)
    part.checkpoint(10)
    age(api, part, created=1030, running=1000, checkpointed=400)
    job_id = attempt_row(api, part.attempt_id).job_id
    change(api, update(jobs).where(jobs.c.id == job_id).values(served_seconds=50.0))
    api.requeue(job_id, from_start=True)
    part.ended(75, stopped_by_us=True, result="preempted")
    found = row(api, job_id)
    assert (found.num_stops, found.served_seconds, found.measured_left_seconds) == (0, 0.0, None)


def test_a_script_may_be_stopped_once_it_said_that_it_resumes_and_told_of_a_checkpoint(api: Api) -> None:
    cycle = scheduler(api)
    node = api.node(slots=1)
    job_id = api.submit(preemptible=True, resources={"gpus": 1})
    cycle.turn()
    part = node.claim(api.attempt_id(job_id))
    part.started()
    cycle.turn()
    assert cycle.mirror.world.runs[job_id].job.is_preemptible is False

    part.tell({"kind": "progress", "step": 1, "checkpoint": "/data/step-1"})
    cycle.turn()
    assert cycle.mirror.world.runs[job_id].job.is_preemptible is True
    assert attempt_row(api, part.attempt_id).checkpointed_at is not None


def test_a_script_goes_on_where_its_folder_lies_until_it_is_requeued_from_the_start(api: Api) -> None:
    """`GANGLINE_JOB_FOLDER` is the node's own: elsewhere the script would find it empty."""
    cycle = scheduler(api)
    node = api.node("node-1", slots=1)
    job_id = api.submit(preemptible=True, resources={"gpus": 1})
    silent = api.submit(preemptible=True, resources={"gpus": 1})
    (part,) = api.start(job_id, node)
    part.tell({"kind": "progress", "step": 1, "checkpoint": "step-1"})
    cycle.turn()
    home = cycle.mirror.world.runs[job_id].job.home
    assert home is not None and (home.shared_folder_id, home.node_names) == (None, ("node-1",))

    api.requeue(job_id)
    api.request("POST", "/nodes/node-1/cordon", "root", json={"reason": "new driver"})
    part.ended(75, stopped_by_us=True)
    other = api.node("node-2", slots=2)
    assert (cycle.turn(), api.job(silent)["state"]) == (1, "starting"), "without a checkpoint it starts anywhere"
    assert (api.job(job_id)["state"], api.job(job_id)["reason"]["code"]) == ("waiting", "pinned")
    assert_true_to_sql(api, cycle)

    assert api.requeue(job_id, from_start=True).status_code == 202
    assert cycle.turn() == 1
    again = other.claim(api.attempt_id(job_id))
    again.started()
    cycle.turn()
    assert cycle.mirror.world.runs[job_id].job.home is None
    again.tell({"kind": "progress", "step": 1, "checkpoint": "step-1"})
    cycle.mirror.forget()
    cycle.turn()
    home = cycle.mirror.world.runs[job_id].job.home
    assert home is not None and home.node_names == ("node-2",), "the newest attempt that has a checkpoint counts"


def test_a_waiting_job_that_is_requeued_from_the_start_has_nothing_behind_it_and_the_scheduler_knows(api: Api) -> None:
    cycle = scheduler(api)
    job_id = api.train(resources={"gpus": 1, "time": "1h"})
    before = {"served_seconds": 3000.0, "measured_left_seconds": 400.0, "wait_began_at": clock.epoch() - 500}
    change(api, update(jobs).where(jobs.c.id == job_id).values(**before))
    cycle.turn()
    assert cycle.mirror.world.queue.entries[job_id].left == 400

    assert api.requeue(job_id, from_start=True).status_code == 202

    found = row(api, job_id)
    assert (found.served_seconds, found.measured_left_seconds) == (0.0, None)
    assert found.wait_began_at == pytest.approx(clock.epoch(), abs=10)
    assert_true_to_sql(api, cycle)
    assert cycle.mirror.world.queue.entries[job_id].left == 3600


def test_a_job_that_never_ran_tells_nothing_of_limits(api: Api) -> None:
    node = api.node(slots=1)
    ended = [api.submit(name="short", resources={"gpus": 1, "time": "1h"}) for _ in range(2)]
    (part,) = api.start(ended[0], node)
    age(api, part, created=1830, running=1800, checkpointed=None)
    part.ended(0)
    api.place()
    part = node.claim(api.attempt_id(ended[1]))
    api.cancel(ended[1])
    part.ended(143, stopped_by_us=True, signal="SIGTERM")
    assert row(api, ended[1]).state == "cancelled"
    # As after an upgrade of a schema that did not know how long they ran.
    old = api.submit(name="old", resources={"gpus": 1, "time": "1h"})
    change(api, update(jobs).where(jobs.c.id == old).values(state="succeeded", started_at=1.0))

    with api.database.read() as connection:
        ratios = load_ratios(connection, clock.epoch())
        by_id = load_ended_ratios(connection, [*ended, old])
        history = load_limit_history(connection, row(api, old).owner_id, 1)
    owner = row(api, ended[0])
    (told,) = ratios
    assert told.ratio == pytest.approx(0.5, abs=0.01)
    assert (told.user_id, told.team_id) == (owner.owner_id, owner.team_id)
    assert by_id == {ended[0]: pytest.approx(0.5, abs=0.01)}
    assert [one.run_seconds for one in history] == [pytest.approx(1800, abs=10)]


def test_a_new_team_is_known_at_once(api: Api) -> None:
    cycle = scheduler(api)
    cycle.turn()
    assert api.request("POST", "/teams", "root", json={"name": "green"}).status_code == 201
    assert_true_to_sql(api, cycle)


def test_a_promotion_is_stored_when_it_comes(api: Api) -> None:
    cycle = scheduler(api)
    job_id = api.submit(resources={"gpus": 1, "time": "1h"})
    change(api, update(jobs).where(jobs.c.id == job_id).values(wait_began_at=clock.epoch() - 25 * 3600))
    cycle.turn()
    assert row(api, job_id).promoted_at is not None
    assert_true_to_sql(api, cycle)


# --- Time ----------------------------------------------------------------------------------------------------------


def extend(api: Api, job_id: int, seconds: Any, who: str = "ann") -> Any:
    return api.request("POST", f"/jobs/{job_id}/limit", who, json={"seconds": seconds})


def test_more_time_is_a_new_total_and_its_supervisor_is_told(api: Api) -> None:
    cycle = scheduler(api)
    node = api.node(slots=1)
    job_id = api.submit(resources={"gpus": 1, "time": "1h"})
    spec = row(api, job_id).spec
    cycle.turn()
    part = node.claim(api.attempt_id(job_id))
    part.started()
    assert part.plan["time_limit_seconds"] == 3600
    before = part.directive()["version"]

    assert extend(api, job_id, 8 * 3600).status_code == 200

    directive = part.directive()
    assert directive["time_limit_seconds"] == 8 * 3600
    assert directive["version"] > before
    assert "ann changed its time limit from 1h to 8h in all." in told(api, job_id)
    assert row(api, job_id).spec == spec
    cycle.turn()
    assert cycle.mirror.world.runs[job_id].job.limit_seconds == 8 * 3600


def test_more_time_is_for_owners_and_admins_and_not_for_what_ends_or_has_no_limit(api: Api) -> None:
    api.node(slots=1)
    job_id = api.submit(resources={"gpus": 1, "time": "1h"})
    endless = api.submit(resources={"gpus": 1})
    assert extend(api, job_id, 7200, "amy").status_code == 403
    assert extend(api, job_id, 7200, "root").status_code == 200
    assert extend(api, job_id, -1).status_code == 422
    assert extend(api, endless, 7200).status_code == 409
    api.place()
    less = extend(api, job_id, 300).json()["detail"]
    assert less == f"job {job_id} runs, and its limit is 2h in all: 5m would be less"
    api.cancel(job_id)
    assert extend(api, job_id, 9000).status_code == 409


def test_more_time_is_refused_where_it_breaks_a_promise_and_the_answer_names_it(api: Api) -> None:
    settings = _with(api, policy="fifo+easy")
    api.node(slots=2)
    first = api.submit(resources={"gpus": 1, "time": "1h"})
    longer = api.submit(resources={"gpus": 1, "time": "2h"})
    api.place()
    whole = api.submit("bob", resources={"gpus": 2, "time": "1h"})
    api.place()

    with pytest.raises(Conflict, match=f"job {whole} of bob is to start by"):
        extend_limit(api.database, settings, longer, seconds=3 * 3600.0, actor="ann")
    assert row(api, longer).limit_seconds == 2 * 3600
    extend_limit(api.database, settings, first, seconds=1.5 * 3600.0, actor="ann")
    assert row(api, first).limit_seconds == 1.5 * 3600, "it still ends before the other"


def at_its_limit(api: Api, **members: Any) -> tuple[int, Supervisor]:
    node = api.node(slots=1)
    job_id = api.train(resources={"gpus": 1, "time": "1h"}, **members)
    (part,) = api.start(job_id, node)
    if members.get("on_time_limit"):
        part.checkpoint(10)
    failure = NodeFailure(outcome="time_limit", message="It ran for its whole time limit of 1h.", at=1.0)
    part.ended(75, stopped_by_us=True, failure=failure, stop_intent="time_limit", result="preempted")
    return job_id, part


def test_at_its_limit_a_job_goes_on_from_its_checkpoint_if_it_asks_for_that(api: Api) -> None:
    job_id, part = at_its_limit(api, on_time_limit="requeue")
    found = row(api, job_id)
    assert (found.state, found.num_charged_retries, found.start_reason) == ("waiting", 0, "time_limit")
    assert found.served_seconds == 0.0, "the limit counts anew"
    assert api.job(job_id)["cause"]["fix"] == "Nothing to do: it goes on in another attempt."
    (after,) = api.start(job_id, part.node)
    assert [point["step"] for point in after.plan["training"]["resume_from"]] == [10]


def test_at_its_limit_a_job_fails_if_it_asks_for_nothing(api: Api) -> None:
    job_id, _ = at_its_limit(api)
    assert (api.job(job_id)["state"], api.job(job_id)["outcome"]) == ("failed", "time_limit")
    assert api.job(job_id)["cause"]["fix"].startswith("Raise resources.time")


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_o57_a_jump_of_the_wall_clock_changes_no_limit_lease_or_order(
    api: Api, monkeypatch: pytest.MonkeyPatch, jump: float
) -> None:
    cycle = scheduler(api)
    node, late = api.node(slots=1), api.node("node-2", slots=1)
    running = api.train(resources={"gpus": 1, "time": "2h"})
    starting = api.train(resources={"gpus": 1, "time": "2h"})
    cycle.turn()
    ids = [api.train(resources={"gpus": 1, "time": f"{hours}h"}) for hours in (3, 1, 2)]
    part = node.claim(api.attempt_id(running))
    part.started()
    late_part = late.claim(api.attempt_id(starting))
    cycle.turn()
    order = _order(cycle)
    sweeper = api.sweeper()
    sweeper.sweep(0.0)
    waiting = LeaseWatch("another scheduler", 10.0)
    assert waiting.take(api.database, 0.0) is None

    _jump(api, monkeypatch, jump)
    for now in (1.0, 2.0, 3.0):
        for each in (node, late):
            each.beat()
        sweeper.sweep(now)
        assert waiting.take(api.database, now) is None, "the leader lives"
    cycle.turn()
    assert (_order(cycle), sorted(order)) == (order, sorted(ids))
    assert (api.job(running)["state"], api.job(starting)["state"]) == ("running", "starting")
    assert (part.directive()["stop"], late_part.directive()["stop"]) == (None, None)
    assert part.directive()["time_limit_seconds"] == 7200.0

    assert waiting.take(api.database, 10.5) is not None, "nor is it kept for one who does not renew it any more"


def _jump(api: Api, monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    """The clock of the machine, and with it that of the database, is set."""
    before, database_before = clock.epoch, api.database.now
    monkeypatch.setattr(clock, "epoch", lambda: before() + seconds)
    if not api.database.is_sqlite:
        monkeypatch.setattr(api.database, "now", lambda connection: database_before(connection) + seconds)


def _order(cycle: Cycle) -> list[int]:
    entries = sorted(cycle.mirror.world.queue.entries.values(), key=lambda entry: entry.turn)
    return [entry.id for entry in entries]
