"""GPUs that are kept for a job: nobody else gets them, it starts on exactly them, and a promise may fall."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.domain.reasons import Reason, ReasonCode
from service.scheduler.facts import Nomination
from service.scheduler.plan import Plan, decide, plan
from service.scheduler.world import World
from tests.unit.service.worlds import HOUR, gang, job, node, nomination, running, told

NOW = 100_000.0


def stopped_for_one() -> tuple[World, Plan]:
    """Job 1 gets all of node 1 once job 9 has left it; node 2 is full."""
    world = World(
        nodes=(node(1, 4), node(2, 1)),
        running=(running(9, "1:0,1,2,3", since=NOW - HOUR), running(8, "2:0", since=NOW, preemptible=False)),
        waiting=(job(1, 1, 4, left=60.0, submitted_at=NOW - HOUR),),
        now=NOW,
    )
    return world, decide(world, NOW)


def test_what_is_being_freed_is_kept_for_the_job_that_it_is_freed_for() -> None:
    world, decided = stopped_for_one()
    assert told(decided) == {9: "stops for 1: less_time_left", 1: "node-1:0,1,2,3 after 9"}
    world.add_waiting(job(2, left=60.0, submitted_at=NOW - 90.0, priority=101))
    assert told(plan(world, NOW + 1)) == {1: "nominated", 2: "not_resumable"}


def test_it_starts_on_exactly_those_gpus_in_the_first_pass_in_which_they_are_free() -> None:
    world, decided = stopped_for_one()
    world.add_waiting(job(2, left=60.0, submitted_at=NOW - 90.0, priority=101))
    world.stopped(9, job(9, 1, 4, waits=NOW + 5, preemptible=True, stops=1), NOW + 5)
    (place,) = decide(world, NOW + 5).places
    assert place.job_id == 1
    assert place.gang == decided.nominations[0].gang


def test_nothing_more_is_stopped_for_it_meanwhile() -> None:
    world, _ = stopped_for_one()
    assert not plan(world, NOW + 30 * HOUR).stops


def test_it_waits_for_all_that_hold_them() -> None:
    world = World(
        nodes=(node(1, 4),),
        running=(running(8, "1:0,1", stopping=True), running(9, "1:2,3", stopping=True)),
        waiting=(job(1, 1, 4),),
        nominations=(nomination(1, "1:0,1,2,3", 8, 9),),
        now=NOW,
    )
    world.ended(8)
    assert not decide(world, NOW).places
    world.ended(9)
    assert told(decide(world, NOW)) == {1: "node-1:0,1,2,3"}


def test_it_is_dropped_when_a_node_of_it_is_blocked_and_the_job_finds_another_place() -> None:
    world, _ = stopped_for_one()
    world.set_node(node(1, 4, blocked="unreachable"))
    world.set_node(node(3, 4))
    assert told(decide(world, NOW + 1)) == {1: "node-3:0,1,2,3"}


def test_and_when_a_node_of_it_leaves_the_pool() -> None:
    world, _ = stopped_for_one()
    world.remove_node(1)
    world.set_node(node(3, 4))
    assert told(decide(world, NOW + 1)) == {1: "node-3:0,1,2,3"}


def test_and_when_the_job_is_cancelled() -> None:
    world, _ = stopped_for_one()
    world.remove(1)
    world.add_waiting(job(2, 1, 4))
    assert told(plan(world, NOW + 1)) == {2: "node-1:0,1,2,3 after 9"}


@pytest.mark.parametrize(
    "change", [{"not_before": NOW + 100}, {"held": Reason(code=ReasonCode.HELD, text="Held.", fix="Release it.")}]
)
def test_and_when_the_job_is_held_back(change: dict[str, object]) -> None:
    world, _ = stopped_for_one()
    world.add_waiting(job(1, 1, 4, left=60.0, submitted_at=NOW - HOUR, **change), NOW + 1)
    assert not world.nominations
    world.add_waiting(job(2, 1, 4), NOW + 1)
    assert told(plan(world, NOW + 1))[2] == "node-1:0,1,2,3 after 9"


def moving() -> World:
    """Job 8 is being moved to node 2 so that job 1 gets node 1."""
    world = World(
        nodes=(node(1, 4), node(2, 4)),
        running=(
            running(8, "1:0", since=NOW - HOUR, left_at=(HOUR, NOW)),
            running(9, "2:0,1,2", since=NOW - HOUR, preemptible=False),
        ),
        waiting=(job(1, 1, 4, left=HOUR, submitted_at=NOW - HOUR),),
        now=NOW,
    )
    assert told(decide(world, NOW)) == {8: "stops for 1: move; node-2:3 after 8", 1: "node-1:0,1,2,3 after 8"}
    return world


def test_a_moved_job_goes_on_where_it_was_moved_to() -> None:
    world = moving()
    world.stopped(8, job(8, waits=NOW + 5, stops=1, preemptible=True), NOW + 5)
    assert told(decide(world, NOW + 5)) == {1: "node-1:0,1,2,3", 8: "node-2:3"}


def test_what_is_kept_for_a_moved_job_that_ends_before_it_has_left_is_free_again() -> None:
    world = moving()
    world.ended(8)
    world.add_waiting(job(2))
    assert told(decide(world, NOW + 5)) == {1: "node-1:0,1,2,3", 2: "node-2:3"}


def test_and_of_one_that_is_held_when_it_has_left() -> None:
    world = moving()
    held = Reason(code=ReasonCode.HELD, text="It is held by its owner.", fix="Release it.")
    world.stopped(8, job(8, waits=NOW + 5, stops=1, held=held), NOW + 5)
    world.add_waiting(job(2))
    assert told(decide(world, NOW + 5)) == {1: "node-1:0,1,2,3", 2: "node-2:3"}
    assert set(world.held) == {8}


def test_promises_are_facts_of_a_world_and_of_one_built_anew() -> None:
    world, decided = stopped_for_one()
    rebuilt = World(
        nodes=[one.view for one in world.nodes.values()],
        running=[run.facts() for run in world.runs.values()],
        waiting=world.waiting,
        nominations=[Nomination(job_id=one.job_id, gang=one.gang, after=one.after) for one in decided.nominations],
        now=NOW,
    )
    assert rebuilt.facts() == world.facts()
    assert rebuilt.nominations[1].gang.shares == gang("1:0,1,2,3").shares


def test_it_does_not_start_on_a_gpu_that_was_set_aside_meanwhile() -> None:
    """The one that left did not leave it clean."""
    world, _ = stopped_for_one()
    world.stopped(9, job(9, 1, 4, waits=NOW + 5, preemptible=True, stops=1), NOW + 5)
    world.set_node(node(1, 3, taken=1))
    assert told(decide(world, NOW + 5, explain=True))[1] == "nominated"
    world.set_node(node(1, 4))
    assert told(decide(world, NOW + 6))[1] == "node-1:0,1,2,3"


@pytest.mark.parametrize("is_first_alone", [True, False])
def test_a_job_without_gpus_and_one_that_is_alone_do_not_share_what_is_promised(is_first_alone: bool) -> None:
    """A promise to a job without GPUs leaves no mark on any GPU."""
    first = job(1, 1, 0, cpus=1.0, exclusive=is_first_alone, left=60.0)
    second = job(2, 1, 0, cpus=1.0, exclusive=not is_first_alone, left=60.0)
    world = World(
        nodes=(node(1, 1),),
        running=(running(9, "1:0", since=NOW - HOUR, cpus=16.0),),
        waiting=(first, second),
        nominations=(Nomination(job_id=1, gang=gang("1:", first.layouts[0]), after=frozenset({9})),),
        now=NOW,
    )
    world.begin_stop(9)
    world.ended(9)
    assert told(decide(world, NOW)) == {1: "node-1:"}


def test_gpus_of_a_job_that_leaves_for_a_reason_of_its_own_are_promised_to_nobody() -> None:
    """It may be first in the queue to get them back: a failed start keeps its place."""
    leaving = replace(running(9, "1:0,1,2,3", since=NOW - HOUR), is_leaving=True)
    world = World(
        nodes=(node(1, 4),), running=(leaving,), waiting=(job(1, 1, 4, left=HOUR, submitted_at=NOW - HOUR),), now=NOW
    )
    assert not told(plan(world, NOW))[1].startswith("node-")
    world.stopped(9, job(9, 1, 4, left=30.0, submitted_at=NOW - HOUR), NOW + 5)
    assert told(plan(world, NOW + 5)) == {9: "node-1:0,1,2,3", 1: "behind"}
