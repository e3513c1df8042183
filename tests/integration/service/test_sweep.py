"""Deadlines and silence, swept with a clock of the test's own: what is overdue ends, what is healthy is left alone."""

from __future__ import annotations

from typing import Any

import pytest
from sqlalchemy import select, update

from service.db.tables import attempts, jobs, nodes
from service.operations.sweep import MAX_FAILURES, Sweeper
from service.settings import SMALL_POOL_NODES
from tests.integration.service.api_server import Api, FakeNode, Supervisor

GANG: dict[str, Any] = {"resources": {"nodes": 2, "gpus_per_node": 1}}


class Sweeping:
    """A sweeper whose clock the test turns; nodes in `alive` beat before each sweep."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.sweeper: Sweeper = api.sweeper()
        self.now = 0.0
        self.pass_time(2)

    def pass_time(self, seconds: float, alive: tuple[FakeNode, ...] = ()) -> None:
        """Sweep every two seconds."""
        for _ in range(int(seconds // 2)):
            self.now += 2
            for node in alive:
                node.beat()
            self.sweeper.sweep(self.now)

    def age(self, table: Any, column: str, seconds: float) -> None:
        """Make everything in a table that much older, and the sweeper one that has watched for as long."""
        self.sweeper._up_since -= seconds
        with self.api.database.write() as tx:
            tx.connection.execute(update(table).values({column: table.c[column] - seconds}))

    def states(self) -> list[str]:
        """States of the nodes, by name."""
        with self.api.database.read() as connection:
            return [row.state for row in connection.execute(select(nodes.c.state).order_by(nodes.c.name))]


def test_an_allocation_that_nobody_claims_is_taken_back_and_not_charged(api: Api) -> None:
    sweeping = Sweeping(api)
    api.node()
    job_id = api.submit(retry={"max": 1})
    api.place()
    sweeping.pass_time(2)
    assert api.job(job_id)["state"] == "starting"

    sweeping.age(attempts, "created_at", 16)
    sweeping.pass_time(2)

    job = api.job(job_id)
    assert (job["state"], job["attempts"], api.held_gpus()) == ("waiting", 1, [])
    assert "did not claim" in str(api.get(f"/jobs/{job_id}/events")["items"])
    with api.database.read() as connection:
        row = connection.execute(select(jobs.c.num_charged_retries, jobs.c.num_pool_retries)).one()
    assert tuple(row) == (0, 1)


def test_o06_half_a_gang_that_vanishes_in_the_start_frees_the_other_half(api: Api) -> None:
    sweeping = Sweeping(api)
    first, _ = api.node("node-1", slots=1), api.node("node-2", slots=1)
    job_id = api.submit(**GANG)
    api.place()
    part = first.claim(api.attempt_id(job_id))
    sweeping.age(attempts, "created_at", 16)
    sweeping.pass_time(2)

    assert part.directive()["stop"]["intent"] == "start_deadline"
    part.ended(stopped=True, signal="SIGTERM")
    job = api.job(job_id)
    assert (job["state"], job["attempts"], api.held_gpus()) == ("waiting", 1, [])


def test_ranks_that_do_not_start_in_time_are_stopped(api: Api) -> None:
    sweeping = Sweeping(api)
    node = api.node()
    job_id = api.submit()
    api.place()
    part = node.claim(api.attempt_id(job_id))
    sweeping.age(attempts, "created_at", 290)
    sweeping.pass_time(2)
    assert part.directive()["stop"] is None

    sweeping.age(attempts, "created_at", 11)
    sweeping.pass_time(2)

    assert part.directive()["stop"]["intent"] == "start_deadline"


def test_a_sweeper_that_was_away_lets_deadlines_begin_anew(api: Api) -> None:
    """Claims and starts could not be reported while nobody listened."""
    node = api.node()
    claimed, unclaimed = api.submit(), api.submit()
    api.place()
    part = node.claim(api.attempt_id(claimed))
    with api.database.write() as tx:
        tx.connection.execute(update(attempts).values(created_at=attempts.c.created_at - 3_600))

    Sweeping(api).pass_time(4)

    assert (part.directive()["stop"], api.job(unclaimed)["state"]) == (None, "starting")


def test_a_running_job_has_no_deadline_of_ours(api: Api) -> None:
    sweeping = Sweeping(api)
    job_id = api.submit()
    part = api.start(job_id, api.node())[0]
    sweeping.age(attempts, "created_at", 1e6)
    sweeping.pass_time(4)
    assert (api.job(job_id)["state"], part.directive()["stop"]) == ("running", None)


def test_a_lost_node_ends_its_attempts_and_its_gpus_are_set_aside_until_it_proves_them_clean(api: Api) -> None:
    sweeping = Sweeping(api)
    node, other = api.node("node-1", slots=1), api.node("node-2", slots=0)
    job_id = api.submit()
    part = api.start(job_id, node)[0]

    sweeping.pass_time(14, alive=(other,))
    assert sweeping.states() == ["ready", "ready"]
    sweeping.pass_time(4, alive=(other,))
    assert (sweeping.states(), api.job(job_id)["state"]) == (["unreachable", "ready"], "running")
    sweeping.pass_time(110, alive=(other,))

    assert (sweeping.states(), api.job(job_id)["state"]) == (["lost", "ready"], "waiting")
    assert "was lost" in api.quarantined_gpus()[0]
    assert node.beat(process_sets=[part.attempt_id])["fenced"] == [part.attempt_id]
    assert api.quarantined_gpus() != []
    node.attempts.clear()
    node.beat()
    assert (sweeping.states(), api.quarantined_gpus()) == (["ready", "ready"], [])


def test_an_unreachable_node_gets_no_new_work_and_keeps_its_old(api: Api) -> None:
    sweeping = Sweeping(api)
    node = api.node(slots=2)
    running = api.submit()
    api.start(running, node)
    sweeping.pass_time(20)
    waiting = api.submit()

    assert (api.place(), api.job(waiting)["reason"]["code"]) == (0, "nodes_not_ready")
    assert api.job(running)["state"] == "running"
    node.beat(attempts=[api.attempt_id(running)])
    assert api.place() == 1


def test_a_sweeper_that_was_away_holds_it_against_nobody(api: Api) -> None:
    sweeping = Sweeping(api)
    api.start(api.submit(), api.node())
    sweeping.pass_time(4)
    sweeping.now += 3_600
    sweeping.pass_time(4)
    assert sweeping.states() == ["ready"]


def lost_peer(api: Api) -> tuple[Sweeping, Supervisor, int]:
    """A gang whose second node fell silent."""
    sweeping = Sweeping(api)
    first, second = api.node("node-1", slots=1), api.node("node-2", slots=1)
    job_id = api.submit(**GANG)
    parts = api.start(job_id, first, second)
    sweeping.pass_time(18, alive=(first,))
    assert sweeping.states() == ["ready", "unreachable"]
    return sweeping, parts[0], job_id


def test_a_silent_node_is_lost_at_once_when_a_peer_lost_its_connection_to_it(api: Api) -> None:
    sweeping, part, job_id = lost_peer(api)
    part.call("POST", "failing", json=part.report(1, peer_loss=True))
    part.ended(1, peer_loss=True)

    job = api.job(job_id)
    assert (sweeping.states(), job["state"]) == (["ready", "lost"], "waiting")
    assert "node-2" in job["cause"]["sentence"]


def test_a_silent_node_is_not_lost_by_another_kind_of_failure(api: Api) -> None:
    sweeping, part, job_id = lost_peer(api)
    part.call("POST", "failing", json=part.report(1))
    assert (sweeping.states(), api.job(job_id)["state"]) == (["ready", "unreachable"], "stopping")


def test_the_outcome_is_fixed_when_reports_stay_out_but_the_job_waits_for_its_nodes(api: Api) -> None:
    sweeping, part, job_id = lost_peer(api)
    part.ended(7)
    sweeping.age(attempts, "settle_at", 1e4)
    sweeping.pass_time(2)

    job = api.job(job_id)
    assert (job["state"], job["outcome"]) == ("stopping", None)
    events = api.get(f"/jobs/{job_id}/events")["items"]
    assert "outcome_fixed" in [event["kind"] for event in events]
    sweeping.pass_time(110)
    job = api.job(job_id)
    assert (job["state"], job["outcome"], job["cause"]["exit_code"]) == ("failed", "user_error", 7)


def test_o07_a_cancel_wins_over_an_outcome_that_was_fixed_before_it(api: Api) -> None:
    sweeping, part, job_id = lost_peer(api)
    part.ended(7)
    sweeping.age(attempts, "settle_at", 1e4)
    sweeping.pass_time(2)
    assert api.cancel(job_id).status_code == 202

    api.request("POST", "/nodes/node-2/release", "root")

    job = api.job(job_id)
    assert (job["state"], job["outcome"]) == ("cancelled", "cancelled")


def test_o04_an_attempt_that_its_agent_no_longer_knows_is_ended_and_retried(api: Api) -> None:
    node = api.node()
    job_id = api.submit()
    api.start(job_id, node)
    node.attempts.clear()  # its folder was wiped
    node.beat()
    assert api.job(job_id)["state"] == "running"
    with api.database.write() as tx:
        tx.connection.exec_driver_sql("UPDATE attempt_nodes SET missing_since = missing_since - 11")
    node.beat()

    job = api.job(job_id)
    assert (job["state"], api.held_gpus()) == ("waiting", [])
    assert "no longer knows" in job["cause"]["sentence"]


def test_o05_a_poisoned_row_is_closed_after_a_few_tries_and_holds_nobody_up(api: Api) -> None:
    sweeping = Sweeping(api)
    node = api.node(slots=2)
    poisoned, healthy = api.submit(), api.submit()
    api.start(poisoned, node)
    api.cancel(poisoned)
    api.place()
    with api.database.write() as tx:
        tx.connection.execute(update(jobs).where(jobs.c.id == poisoned).values(spec="{"))
        tx.connection.execute(update(attempts).where(attempts.c.job_id == poisoned).values(settle_at=1.0))
    sweeping.age(attempts, "created_at", 100)

    sweeping.pass_time(2)
    assert api.job(healthy)["state"] == "waiting", "the unclaimed one was taken back in the same sweep"
    sweeping.pass_time(2 * MAX_FAILURES)

    with api.database.read() as connection:
        row = connection.execute(select(jobs.c.state, jobs.c.cause).where(jobs.c.id == poisoned)).one()
    assert row.state == "cancelled"
    assert "Reconcile failed" in row.cause
    assert api.held_gpus() == []


def test_a_node_with_a_poisoned_job_holds_up_no_other_node(api: Api) -> None:
    sweeping = Sweeping(api)
    first, second = api.node("node-1", slots=1), api.node("node-2", slots=1)
    poisoned = api.submit()
    api.place()
    first.claim(api.attempt_id(poisoned))
    healthy = api.submit()
    api.place()
    second.claim(api.attempt_id(healthy))
    with api.database.write() as tx:
        tx.connection.execute(update(jobs).where(jobs.c.id == poisoned).values(spec="{"))

    sweeping.pass_time(130)

    assert sweeping.states()[1] == "lost"
    assert api.job(healthy)["state"] == "waiting"


@pytest.mark.parametrize(("num_nodes", "is_ready"), [(SMALL_POOL_NODES, False), (SMALL_POOL_NODES + 1, True)])
def test_o28_nodes_of_a_large_pool_may_be_silent_as_long_as_they_were_told(
    api: Api, num_nodes: int, is_ready: bool
) -> None:
    """Agents of a large pool are told to beat every 10 s: 16 s of silence are one missed heartbeat there."""
    pool = [api.node(f"node-{number}", slots=1) for number in range(num_nodes)]
    assert pool[0].beat()["interval_seconds"] == (10.0 if is_ready else 2.0)
    sweeping = Sweeping(api)
    sweeping.pass_time(18)
    assert set(sweeping.states()) == {"ready" if is_ready else "unreachable"}

    with api.database.write() as tx:
        tx.connection.execute(update(nodes).values(last_heartbeat_at=nodes.c.last_heartbeat_at - 9, state="ready"))
    api.submit()
    assert api.place() == int(is_ready)
