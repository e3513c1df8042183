"""What the database itself refuses, whoever writes: to leave a terminal state, to hold a GPU or a job twice."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from sqlalchemy import Table, insert, select, update
from sqlalchemy.exc import IntegrityError

from service.db.leadership import LostLeadership, take_lease
from service.db.session import Write
from service.db.tables import allocations, attempt_nodes, attempts, jobs, nodes, outbox
from service.db.transitions import StaleTransition, move_attempt, move_attempt_node, move_job, move_node
from service.domain.states import (
    ATTEMPT_NODE_TRANSITIONS,
    ATTEMPT_TRANSITIONS,
    JOB_TRANSITIONS,
    NODE_TRANSITIONS,
    AttemptNodeState,
    AttemptState,
    JobState,
    NodeState,
    terminal_states,
)
from service.scheduler import cycle
from service.scheduler.cycle import run_cycle
from service.scheduler.load_world import load_world
from tests.integration.service.api_server import Api


def only_row(api: Api, table: Table) -> Any:
    with api.database.read() as connection:
        return connection.execute(select(table)).one()


def set_state(api: Api, table: Table, state: str) -> None:
    """Write a state behind the back of the only writer."""
    with api.database.write() as tx:
        tx.connection.execute(update(table).values(state=state))


def running_job(api: Api) -> None:
    api.start(api.submit(), api.node())


FINAL = [
    *(
        (jobs, state, target)
        for state in terminal_states(JOB_TRANSITIONS)
        for target in JobState
        if target is not state
    ),
    *((attempts, AttemptState.ENDED, target) for target in AttemptState if target is not AttemptState.ENDED),
]


@pytest.mark.parametrize(("table", "state", "target"), FINAL, ids=lambda value: getattr(value, "name", value))
def test_a_terminal_state_is_final_in_the_database_too(api: Api, table: Table, state: str, target: str) -> None:
    running_job(api)
    set_state(api, table, state)
    before = api.snapshot()

    with pytest.raises(IntegrityError, match="final"):
        set_state(api, table, target)

    assert api.snapshot() == before
    set_state(api, table, state)  # to write the same again is harmless


@pytest.mark.parametrize("table", [jobs, attempts, attempt_nodes, nodes], ids=lambda table: table.name)
def test_a_state_that_is_none_cannot_be_stored(api: Api, table: Table) -> None:
    running_job(api)
    with pytest.raises(IntegrityError):
        set_state(api, table, "RUNNING")


def move(tx: Write, table: Table, row_id: int, target: Any) -> None:
    """Through the only writer."""
    if table is jobs:
        move_job(tx, row_id, target, actor="test", text="moved")
    elif table is attempts:
        move_attempt(tx, row_id, target)
    elif table is attempt_nodes:
        move_attempt_node(tx, row_id, target)
    else:
        move_node(tx, row_id, target, name="node-1", text="moved")


MACHINES: list[tuple[Table, Any, Any]] = [
    (jobs, JobState, JOB_TRANSITIONS),
    (attempts, AttemptState, ATTEMPT_TRANSITIONS),
    (attempt_nodes, AttemptNodeState, ATTEMPT_NODE_TRANSITIONS),
    (nodes, NodeState, NODE_TRANSITIONS),
]


@pytest.mark.parametrize(
    ("table", "source", "target", "is_allowed"),
    [
        pytest.param(table, source, target, target in transitions[source], id=f"{table.name}-{source}-{target}")
        for table, states, transitions in MACHINES
        for source in states
        for target in states
    ],
)
def test_the_only_writer_makes_just_the_moves_of_the_tables(
    api: Api, table: Table, source: str, target: str, is_allowed: bool
) -> None:
    running_job(api)
    set_state(api, table, source)
    before, row = api.snapshot(), only_row(api, table)

    if is_allowed:
        with api.database.write() as tx:
            move(tx, table, row.id, target)
        assert only_row(api, table).state == target
        return
    with pytest.raises(StaleTransition), api.database.write() as tx:
        move(tx, table, row.id, target)
    assert api.snapshot() == before


def all_at_once(count: int, act: Any) -> list[BaseException | None]:
    """Run `act` in `count` threads at once; what each raised."""
    results: list[BaseException | None] = []
    barrier = threading.Barrier(count)

    def run() -> None:
        barrier.wait()
        try:
            act()
        except (IntegrityError, StaleTransition) as error:
            results.append(error)
        else:
            results.append(None)

    threads = [threading.Thread(target=run) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return results


def test_of_twenty_that_take_one_gpu_at_once_one_wins(api: Api) -> None:
    running_job(api)
    part = only_row(api, attempt_nodes)

    def take() -> None:
        with api.database.write() as tx:
            row = {"attempt_node_id": part.id, "node_id": part.node_id, "gpu_index": 1, "allocated_at": tx.now}
            tx.connection.execute(insert(allocations).values(row))

    results = all_at_once(20, take)

    assert results.count(None) == 1
    assert len(results) == 20
    assert api.held_gpus() == [(part.node_id, 0), (part.node_id, 1)]


def test_a_gpu_that_was_released_can_be_taken_again(api: Api) -> None:
    node = api.node(slots=1)
    for _ in range(3):
        api.start(api.submit(), node)[0].ended()
    with api.database.read() as connection:
        rows = connection.execute(select(allocations)).all()
    assert len(rows) == 3
    assert api.held_gpus() == []


def test_of_twenty_that_open_an_attempt_of_one_job_at_once_one_wins(api: Api) -> None:
    running_job(api)
    set_state(api, attempts, AttemptState.ENDED)
    attempt = only_row(api, attempts)._mapping
    numbers = iter(range(2, 100))

    def begin() -> None:
        with api.database.write() as tx:
            fresh = {**attempt, "number": next(numbers), "state": AttemptState.ALLOCATED}
            tx.connection.execute(insert(attempts).values({key: fresh[key] for key in fresh if key != "id"}))

    assert all_at_once(20, begin).count(None) == 1


def test_of_twenty_that_move_one_job_at_once_one_wins(api: Api) -> None:
    job_id = api.submit()

    def start() -> None:
        with api.database.write() as tx:
            move_job(tx, job_id, JobState.STARTING, actor="test", text="moved")

    assert all_at_once(20, start).count(None) == 1
    assert only_row(api, jobs).version == 2


def test_a_placement_is_whole_or_nothing(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second node of a gang turns out to be held by somebody else: nothing of the first is kept."""
    api.node("node-1", slots=1)
    api.node("node-2", slots=1)
    other = api.submit()
    api.place()
    other_part = only_row(api, attempt_nodes)
    with api.database.write() as tx:
        tx.connection.execute(update(allocations).values(released_at=1.0))  # the plan sees both GPUs free …
    gang = api.submit(resources={"nodes": 2, "gpus_per_node": 1})
    with api.database.read() as connection:
        world, reasons = load_world(connection, api.database.now(connection), api.state.settings)
    with api.database.write() as tx:
        tx.connection.execute(update(allocations).values(released_at=None))  # … but one is not
    monkeypatch.setattr(cycle, "load_world", lambda *_: (world, reasons))
    before = api.snapshot()

    assert api.place() == 0

    after = api.snapshot()
    assert {name for name in before if before[name] != after[name]} <= {"jobs"}, "only a reason may be written"
    assert api.held_gpus() == [(other_part.node_id, 0)]
    assert (api.job(gang)["state"], api.job(gang)["attempts"], api.job(other)["attempts"]) == ("waiting", 0, 1)


def test_a_leader_whose_time_is_over_writes_nothing(api: Api) -> None:
    api.node()
    api.submit()
    assert api.epoch is not None
    take_lease(api.database, "somebody else", lease_seconds=-1.0)
    before = api.snapshot()

    with pytest.raises(LostLeadership):
        run_cycle(api.database, api.state.settings, api.epoch)
    sweeper = api.sweeper()
    with pytest.raises(LostLeadership):
        for now in range(0, 100, 2):
            sweeper.sweep(float(now))

    assert api.snapshot() == before


def test_a_hint_is_left_in_the_same_transaction_as_the_placement(api: Api) -> None:
    api.node()
    job_id = api.submit()
    api.place()
    hint = only_row(api, outbox)
    assert (hint.queue, hint.attempt_id) == ("node.node-1", api.attempt_id(job_id))
