"""The rules of the policy `time-left`, each sentence in a small world."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from service.scheduler.facts import NodeView, RunningJob, WaitingJob
from service.scheduler.jobs import promotion_time, protection_seconds
from service.scheduler.plan import PolicyOptions, plan
from service.scheduler.world import World
from tests.unit.service.worlds import DAY, HOUR, MINUTE, ended, home, job, node, running, told

NOW = 100_000.0
LONG_AGO = NOW - 20 * HOUR


@dataclass(frozen=True, kw_only=True)
class Small:
    """A world, and what each job of it gets: those that run are named only if they are stopped."""

    nodes: tuple[NodeView, ...]
    running: tuple[RunningJob, ...] = ()
    queue: tuple[WaitingJob, ...]
    expected: dict[int, str]
    preemption: str = "all"


def waits(
    number: int, nodes: int = 1, gpus: int = 1, *, left: float = HOUR, ago: float = HOUR, **more: object
) -> WaitingJob:
    """A job that has waited for `ago` seconds and has so many left."""
    return job(number, nodes, gpus, submitted_at=NOW - ago, left=left, **more)


def runs(number: int, where: str, left: float, **more: Any) -> RunningJob:
    """A job that has run for 20 hours and has so many seconds left; it can be stopped."""
    return running(number, where, left_at=(left, NOW), **{"since": LONG_AGO, **more})


FULL = node(1, 4, cpus=64.0)
TWO = (node(1, 4, cpus=64.0), node(2, 4, cpus=64.0))
ORDER: dict[str, Small] = {
    "the job with the least time left goes first": Small(
        nodes=(node(1, 1),),
        queue=(waits(1, left=2 * HOUR), waits(2, left=HOUR), waits(3, left=3 * HOUR)),
        expected={2: "node-1:0", 1: "behind", 3: "behind"},
    ),
    "equal ones go by number": Small(
        nodes=(node(1, 1),), queue=(waits(8), waits(7)), expected={7: "node-1:0", 8: "behind"}
    ),
    "promoted jobs go first, by submission": Small(
        nodes=(node(1, 2),),
        queue=(
            waits(1, left=60.0),
            waits(2, left=9 * HOUR, promoted=NOW - 5.0, ago=3 * DAY),
            waits(3, left=8 * HOUR, promoted=NOW - 9.0, ago=2 * DAY),
        ),
        expected={2: "node-1:0", 3: "node-1:1", 1: "behind"},
    ),
    "a size that failed is not tried again in this pass, and smaller ones are": Small(
        nodes=(node(1, 2, taken=2), node(2, 2, taken=2)),
        queue=(waits(1, 1, 3, left=60.0), waits(2, 1, 4, left=90.0), waits(3, 1, 2, left=HOUR)),
        expected={1: "needs_gpus", 2: "needs_gpus", 3: "node-1:2,3"},
    ),
    "a gang with a smaller last share that failed does not block one that needs none": Small(
        nodes=(node(1, 8, cpus=64.0), node(2, 2, taken=6)),
        queue=(waits(1, 1, 8, rest=4, left=60.0), waits(2, 1, 8, left=HOUR)),
        expected={1: "needs_gpus", 2: "node-1:0,1,2,3,4,5,6,7"},
    ),
}
STOPS: dict[str, Small] = {
    "a job stops one that has more than 3 times its time left": Small(
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 3 * HOUR + 1),),
        queue=(waits(1, 1, 4),),
        expected={9: "stops for 1: less_time_left", 1: "node-1:0,1,2,3 after 9"},
    ),
    "and none that has 3 times as much or less": Small(
        nodes=(FULL,), running=(runs(9, "1:0,1,2,3", 3 * HOUR),), queue=(waits(1, 1, 4),), expected={1: "too_costly"}
    ),
    "nobody leaves GPUs to a job that needs processors alone": Small(
        nodes=(node(1, 4, cpus=4.0),),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR),),
        queue=(waits(1, 1, 0, left=MINUTE, cpus=1.0),),
        expected={1: "needs_nodes"},
    ),
    "what is free is taken first": Small(
        nodes=TWO,
        running=(runs(9, "1:0,1,2,3", 90 * HOUR),),
        queue=(waits(1, 1, 4),),
        expected={1: "node-2:0,1,2,3"},
    ),
    "nothing is stopped before it has waited 5 minutes": Small(
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR),),
        queue=(waits(1, 1, 4, ago=5 * MINUTE - 1),),
        expected={1: "patience"},
    ),
    "or a tenth of its time left, if that is less": Small(
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR),),
        queue=(waits(1, 1, 4, left=10 * MINUTE, ago=MINUTE),),
        expected={9: "stops for 1: less_time_left", 1: "node-1:0,1,2,3 after 9"},
    ),
    "of those on a node the ones with the longest left are taken until enough is free": Small(
        nodes=(FULL,),
        running=(runs(7, "1:0", 10 * HOUR), runs(8, "1:1", 30 * HOUR), runs(9, "1:2,3", 20 * HOUR)),
        queue=(waits(1, 1, 3),),
        expected={8: "stops for 1: less_time_left", 9: "stops for 1: less_time_left", 1: "node-1:1,2,3 after 8,9"},
    ),
    "the cheapest node is taken: the smallest sum of 1/left": Small(
        nodes=TWO,
        running=(runs(8, "1:0,1,2,3", 20 * HOUR), runs(9, "2:0,1,2,3", 40 * HOUR)),
        queue=(waits(1, 1, 4),),
        expected={9: "stops for 1: less_time_left", 1: "node-2:0,1,2,3 after 9"},
    ),
    "among equals those whose stop loses the least work since their last checkpoint": Small(
        nodes=TWO,
        running=(
            runs(8, "1:0,1,2,3", 20 * HOUR, checkpointed=NOW - HOUR),
            runs(9, "2:0,1,2,3", 20 * HOUR, checkpointed=NOW - MINUTE),
        ),
        queue=(waits(1, 1, 4),),
        expected={9: "stops for 1: less_time_left", 1: "node-2:0,1,2,3 after 9"},
    ),
    "sum rule: several are stopped only if together they are worth 3 of it": Small(
        nodes=(FULL,),
        running=tuple(runs(6 + place, f"1:{place}", 11.9 * HOUR) for place in range(4)),
        queue=(waits(1, 1, 4),),
        expected={1: "too_costly"},
    ),
    "and are when they are": Small(
        nodes=(FULL,),
        running=tuple(runs(6 + place, f"1:{place}", 12.1 * HOUR) for place in range(4)),
        queue=(waits(1, 1, 4),),
        expected={6 + place: "stops for 1: less_time_left" for place in range(4)} | {1: "node-1:0,1,2,3 after 6,7,8,9"},
    ),
    "the price of a gang's nodes is that of its distinct victims": Small(
        nodes=TWO,
        running=(runs(9, "1:0,1,2,3 2:0,1,2,3", 3.1 * HOUR),),
        queue=(waits(1, 2, 4),),
        expected={9: "stops for 1: less_time_left", 1: "node-1:0,1,2,3 node-2:0,1,2,3 after 9"},
    ),
    "quorum: a large gang is not stopped for one small job": Small(
        nodes=TWO,
        running=(runs(9, "1:0,1,2,3 2:0,1,2,3", 90 * HOUR),),
        queue=(waits(1, 1, 3),),
        expected={1: "quorum"},
    ),
    "unless those that would gain ask for half of its GPUs together": Small(
        nodes=TWO,
        running=(runs(9, "1:0,1,2,3 2:0,1,2,3", 90 * HOUR),),
        queue=(waits(1, 1, 3), waits(2, left=29 * HOUR)),
        expected={9: "stops for 1: less_time_left", 1: "node-1:0,1,2 after 9", 2: "node-1:3 after 9"},
    ),
    "or it asks for half of them itself": Small(
        nodes=TWO,
        running=(runs(9, "1:0,1,2,3 2:0,1,2,3", 90 * HOUR),),
        queue=(waits(1, 1, 4),),
        expected={9: "stops for 1: less_time_left", 1: "node-1:0,1,2,3 after 9"},
    ),
    "a job is protected for 10 minutes after its start": Small(
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR, since=NOW - 10 * MINUTE + 1),),
        queue=(waits(1, 1, 4),),
        expected={1: "protected"},
    ),
    "and no longer": Small(
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR, since=NOW - 10 * MINUTE),),
        queue=(waits(1, 1, 4),),
        expected={9: "stops for 1: less_time_left", 1: "node-1:0,1,2,3 after 9"},
    ),
    "twice as long after each time that it was stopped": Small(
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR, stops=2, since=NOW - 39 * MINUTE),),
        queue=(waits(1, 1, 4),),
        expected={1: "protected"},
    ),
    "the restore is part of the run": Small(
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR, restore=5 * MINUTE, since=NOW - 10 * MINUTE),),
        queue=(waits(1, 1, 4),),
        expected={9: "stops for 1: less_time_left", 1: "node-1:0,1,2,3 after 9"},
    ),
    "after 14 stops it can be stopped once more": Small(
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR, stops=14),),
        queue=(waits(1, 1, 4),),
        expected={9: "stops for 1: less_time_left", 1: "node-1:0,1,2,3 after 9"},
    ),
    "after 15 it is left alone": Small(
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR, stops=15),),
        queue=(waits(1, 1, 4),),
        expected={1: "not_resumable"},
    ),
    "a job that does not resume is never stopped": Small(
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR, preemptible=False),),
        queue=(waits(1, 1, 4),),
        expected={1: "not_resumable"},
    ),
    "nor one that is promoted": Small(
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR, promoted=NOW - DAY),),
        queue=(waits(1, 1, 4),),
        expected={1: "not_resumable"},
    ),
    "a promoted job stops every open one that is not promoted: no rule of price, no quorum, no patience": Small(
        nodes=TWO,
        running=(runs(9, "1:0,1,2,3 2:0,1,2,3", HOUR),),
        queue=(waits(1, left=90 * HOUR, promoted=NOW - 1, ago=0.0),),
        expected={9: "stops for 1: promoted", 1: "node-1:0 after 9"},
    ),
    "but none that is protected: then what it needs is kept for it": Small(
        nodes=(node(1, 4),),
        running=(runs(9, "1:0,1", HOUR, since=NOW - MINUTE, limit=2 * HOUR),),
        queue=(waits(1, 1, 4, left=90 * HOUR, promoted=NOW - 1), waits(2, left=60.0)),
        expected={1: "protected", 2: "reserved"},
    ),
    "and others run there only if their limit ends before it can start": Small(
        nodes=(node(1, 4),),
        running=(runs(9, "1:0,1", HOUR, since=NOW - MINUTE, limit=2 * HOUR),),
        queue=(waits(1, 1, 4, left=90 * HOUR, promoted=NOW - 1), waits(2, left=60.0, limit=HOUR)),
        expected={1: "protected", 2: "node-1:2"},
    ),
    "a job is stopped only where the waiting one finds its checkpoint": Small(
        nodes=TWO,
        running=(runs(8, "1:0,1,2,3", 20 * HOUR), runs(9, "2:0,1,2,3", 40 * HOUR)),
        queue=(waits(1, 1, 4, home=home(1)),),
        expected={8: "stops for 1: less_time_left", 1: "node-1:0,1,2,3 after 8"},
    ),
}
ROOM: dict[str, Small] = {
    "move: small jobs go together so that a whole node is free": Small(
        nodes=TWO,
        running=(runs(8, "1:0", HOUR), runs(9, "2:0,1,2", 2 * HOUR)),
        queue=(waits(1, 1, 4, left=HOUR),),
        expected={8: "stops for 1: move; node-2:3 after 8", 1: "node-1:0,1,2,3 after 8"},
    ),
    "all of them fit elsewhere or nothing moves": Small(
        nodes=(*TWO, node(3, 4)),
        running=(runs(7, "1:0,1", HOUR), runs(8, "2:0,1,2", HOUR), runs(9, "3:0,1,2", HOUR)),
        queue=(waits(1, 1, 4, left=HOUR),),
        expected={1: "too_costly"},
    ),
    "none moves that ends within half an hour": Small(
        nodes=TWO,
        running=(runs(8, "1:0", 30 * MINUTE - 1), runs(9, "2:0,1,2", 30 * MINUTE - 1)),
        queue=(waits(1, 1, 4, left=HOUR),),
        expected={1: "too_costly"},
    ),
    "nor one that is protected": Small(
        nodes=TWO,
        running=(
            runs(8, "1:0", HOUR, since=NOW - MINUTE),
            runs(9, "2:0,1,2", HOUR, since=NOW - MINUTE),
        ),
        queue=(waits(1, 1, 4, left=HOUR),),
        expected={1: "protected"},
    ),
    "nothing moves for a job that is smaller than a node": Small(
        nodes=TWO,
        running=(runs(8, "1:0,1", HOUR), runs(9, "2:0,1", HOUR)),
        queue=(waits(1, 1, 3, left=HOUR),),
        expected={1: "too_costly"},
    ),
    "a job moves only to where its checkpoint is seen": Small(
        nodes=TWO,
        running=(runs(8, "1:0", HOUR, home=home(1)), runs(9, "2:0,1,2", HOUR, home=home(2))),
        queue=(waits(1, 1, 4, left=HOUR),),
        expected={1: "too_costly"},
    ),
    "clear: small jobs that hold at most a quarter of a gang's GPUs are stopped for it": Small(
        nodes=TWO,
        running=(runs(8, "1:0", HOUR), runs(9, "2:0", HOUR)),
        queue=(waits(1, 2, 4, left=HOUR),),
        expected={
            8: "stops for 1: clear",
            9: "stops for 1: clear",
            1: "node-1:0,1,2,3 node-2:0,1,2,3 after 8,9",
        },
    ),
    "and not if they hold more": Small(
        nodes=TWO,
        running=(runs(8, "1:0", HOUR), runs(9, "2:0,1", HOUR)),
        queue=(waits(1, 2, 4, left=HOUR),),
        expected={1: "too_costly"},
    ),
    "nothing is cleared for a gang of one node": Small(
        nodes=(FULL,), running=(runs(8, "1:0", HOUR),), queue=(waits(1, 1, 4, left=HOUR),), expected={1: "too_costly"}
    ),
    "a place is cleared only on nodes that see one folder, where its model is split over them": Small(
        nodes=(node(1, 4, shared="a"), node(2, 4, shared="b"), node(3, 4, shared="b", cpus=64.0)),
        running=(runs(8, "2:0", 20 * MINUTE), runs(9, "3:0", 20 * MINUTE)),
        queue=(waits(1, 2, 4, left=HOUR, is_split=True),),
        expected={
            8: "stops for 1: clear",
            9: "stops for 1: clear",
            1: "node-2:0,1,2,3 node-3:0,1,2,3 after 8,9",
        },
    ),
}
WITHOUT: dict[str, Small] = {
    "nothing is stopped because it pays": Small(
        preemption="reclaim_only",
        nodes=(FULL,),
        running=(runs(9, "1:0,1,2,3", 90 * HOUR),),
        queue=(waits(1, 1, 4),),
        expected={1: "needs_gpus"},
    ),
    "the first large gang that does not fit has the nodes that free earliest kept for it": Small(
        preemption="reclaim_only",
        nodes=(node(1, 4), node(2, 4)),
        running=(runs(8, "1:0", 2 * HOUR), runs(9, "2:0", 9 * HOUR)),
        queue=(waits(1, 1, 4, left=HOUR), waits(2, 1, 2, left=2 * HOUR, limit=10 * HOUR)),
        expected={1: "scattered", 2: "node-2:1,2"},
    ),
    "others may run there if 0.3 times their limit ends in time": Small(
        preemption="reclaim_only",
        nodes=(FULL,),
        running=(runs(8, "1:0", 2 * HOUR),),
        queue=(waits(1, 1, 4, left=HOUR), waits(2, left=2 * HOUR, limit=6.6 * HOUR)),
        expected={1: "needs_gpus", 2: "node-1:1"},
    ),
    "and not if it ends later": Small(
        preemption="reclaim_only",
        nodes=(FULL,),
        running=(runs(8, "1:0", 2 * HOUR),),
        queue=(waits(1, 1, 4, left=HOUR), waits(2, left=2 * HOUR, limit=6.7 * HOUR)),
        expected={1: "needs_gpus", 2: "reserved"},
    ),
    "a job that is smaller than a node reserves nothing": Small(
        preemption="none",
        nodes=(FULL,),
        running=(runs(8, "1:0,1", 2 * HOUR),),
        queue=(waits(1, 1, 3, left=HOUR), waits(2, left=9 * HOUR)),
        expected={1: "needs_gpus", 2: "node-1:2"},
    ),
    "a promoted job reserves by hard limits, whatever its size; what it does not need stays free for others": Small(
        preemption="none",
        nodes=(FULL,),
        running=(runs(8, "1:0,1", HOUR, limit=24 * HOUR),),
        queue=(
            waits(1, 1, 3, left=HOUR, promoted=NOW - 1),
            waits(2, left=60.0, limit=5 * HOUR),
            waits(3, left=90.0),
        ),
        expected={1: "needs_gpus", 2: "node-1:2", 3: "reserved"},
    ),
}
ALL = ORDER | STOPS | ROOM | WITHOUT


@pytest.mark.parametrize("sentence", ALL)
def test_time_left(sentence: str) -> None:
    small = ALL[sentence]
    world = World(nodes=small.nodes, running=small.running, waiting=small.queue, now=NOW)
    decided = plan(world, NOW, "time-left", PolicyOptions(preemption=small.preemption))
    assert told(decided) == small.expected


def test_nothing_is_ever_stopped_where_the_pool_does_not_stop_jobs() -> None:
    for small in (STOPS | ROOM).values():
        world = World(nodes=small.nodes, running=small.running, waiting=small.queue, now=NOW)
        assert not plan(world, NOW, "time-left", PolicyOptions(preemption="none")).stops


@pytest.mark.parametrize(
    ("stops", "seconds"), [(0, 10 * MINUTE), (1, 20 * MINUTE), (6, 640 * MINUTE), (7, 12 * HOUR), (15, 12 * HOUR)]
)
def test_the_protected_run_doubles_with_each_stop_to_12_hours(stops: int, seconds: float) -> None:
    assert protection_seconds(stops) == seconds


@pytest.mark.parametrize(
    ("limit", "served", "expected"),
    [(None, 0.0, DAY), (HOUR, 0.0, DAY), (10 * HOUR, 0.0, 40 * HOUR), (10 * HOUR, 8 * HOUR, DAY)],
)
def test_a_job_is_promoted_after_the_longer_of_a_day_and_4_times_what_its_limit_leaves(
    limit: float | None, served: float, expected: float
) -> None:
    one = job(1, waits=500.0, limit=limit, served=served)
    assert promotion_time(one) == 500.0 + expected


def test_a_job_that_is_promoted_stays_so_when_it_runs_and_waits_again() -> None:
    """For good: it counts from the start of the wait in which it was promoted."""
    world = World(nodes=(FULL,), waiting=(job(1, waits=0.0, limit=HOUR),))
    world.release_due(DAY)
    (entry,) = world.queue.entries.values()
    assert entry.is_promoted
    found = plan(world, DAY).places[0].gang
    run = world.start(1, found, DAY)
    assert run.job.promoted_at == DAY
    assert run.open_at == float("inf"), "and nobody stops it"
    world.stopped(1, run.job, DAY + 5.0)
    assert world.queue.entries[1].is_promoted


def test_the_order_is_that_of_the_start_of_the_wait_and_the_sum_rule_reads_the_time_left_as_of_now() -> None:
    """Ratios of ended jobs move on: who waits already keeps its place, and stops others by what is known now."""
    nodes = (node(1, 1),)
    queue = (job(1, limit=2 * HOUR, submitted_at=NOW - HOUR), job(2, left=HOUR, submitted_at=NOW - HOUR))
    world = World(nodes=nodes, waiting=queue, running=(runs(9, "1:0", 3.5 * HOUR),), now=NOW)
    for _ in range(20):
        world.ratios.add(*ended([0.1]))
    assert told(plan(world, NOW)) == {9: "stops for 2: less_time_left", 2: "node-1:0 after 9", 1: "behind"}


def test_while_few_jobs_have_ended_those_that_wait_move_with_the_ratio() -> None:
    """On a new pool a limit counts whole at first: equal jobs that come later must not all pass for that."""
    world = World(nodes=(node(1, 1),), waiting=(job(1, limit=2 * HOUR),), running=(), now=NOW)
    before = world.facts()
    world.begin()
    for number in range(20):
        world.add_running(running(100 + number, "1:0"))
        world.ended(100 + number, 0.1)
    world.add_waiting(job(2, limit=2 * HOUR), NOW)

    in_order = sorted(world.queue.entries.values(), key=lambda entry: entry.turn)
    assert [entry.id for entry in in_order] == [1, 2]
    assert [entry.left for entry in in_order] == [pytest.approx(0.2 * HOUR, rel=0.02)] * 2

    world.undo()
    assert world.facts() == before


def test_a_users_own_ended_jobs_move_only_what_that_user_and_the_team_have_waiting() -> None:
    """The 20th ended job of user 1 of team 1, in a pool that knows enough to stand still."""
    steady = ended([0.5] * 200, user=9, team=9)
    queue = (
        job(1, limit=2 * HOUR, user=1, team=1),
        job(2, limit=2 * HOUR, user=2, team=1),
        job(3, limit=2 * HOUR, user=3, team=3),
        job(4, limit=2 * HOUR, user=1, team=3),
    )
    world = World(nodes=(node(1, 4),), waiting=queue, running=(), ratios=steady, now=NOW)
    before = world.facts()
    world.begin()
    for number in range(20):
        world.add_running(running(100 + number, "1:0", user=1, team=1))
        world.ended(100 + number, 0.1)

    lefts = {entry.id: entry.left / HOUR for entry in world.queue.entries.values()}
    assert lefts == {number: pytest.approx(left, rel=0.02) for number, left in ((1, 0.2), (2, 0.2), (3, 1.0), (4, 0.2))}

    world.undo()
    assert world.facts() == before
    assert world.ratios.of(queue[0]) == pytest.approx(0.5, rel=0.02)


def test_what_it_costs_to_stop_a_job_is_known_anew_when_its_users_estimates_grow() -> None:
    """Job 9 had a tenth of 80 hours left: what it cost to stop then is no bound for when it has all of them."""
    pool, short = ended([0.1] * 1000, user=9, team=9), ended([0.1] * 20, user=1, team=1)
    world = World(
        nodes=(node(1, 1), node(2, 1, blocked="cordoned"), node(3, 1)),
        waiting=(waits(1, left=10 * HOUR, user=2, team=2),),
        running=(
            running(9, "1:0", since=LONG_AGO, limit=100 * HOUR, user=1, team=1),
            runs(8, "3:0", 9 * HOUR, user=2, team=2),
        ),
        ratios=[*pool, *short],
        now=NOW,
    )
    assert told(plan(world, NOW)) == {1: "too_costly"}
    for _ in range(40):
        world.add_running(running(500, "2:0", user=1, team=1))
        world.ended(500, 1.0)
    assert told(plan(world, NOW)) == {9: "stops for 1: less_time_left", 1: "node-1:0 after 9"}


def test_the_next_timer_is_the_end_of_a_patience_or_a_promotion() -> None:
    world = World(nodes=(FULL,), waiting=(job(1, waits=NOW, left=HOUR), job(2, waits=NOW, left=10 * MINUTE)), now=NOW)
    assert world.next_timer(NOW) == NOW + MINUTE
    assert world.next_timer(NOW + MINUTE) == NOW + 5 * MINUTE
    assert world.next_timer(NOW + 5 * MINUTE) == NOW + DAY
    world.add_waiting(job(3, not_before=NOW + 1), NOW)
    assert world.next_timer(NOW) == NOW + 1


def test_one_that_ends_before_a_reservation_passes_one_that_does_not() -> None:
    """Job 1 has node 2 reserved from when job 9 ends; job 3 stands before job 4 and would run beyond that."""
    world = World(
        nodes=TWO,
        running=(runs(9, "1:0,1,2,3", 2 * HOUR, preemptible=False, limit=22 * HOUR),),
        waiting=(
            waits(1, 2, 4, left=HOUR, promoted=NOW - 60.0, ago=3 * DAY),
            job(3, 1, 4, limit=48 * HOUR, submitted_at=NOW - HOUR),
            job(4, 1, 4, limit=HOUR, served=0.0, submitted_at=NOW - HOUR, left=49 * HOUR),
        ),
        now=NOW,
    )
    decided = told(plan(world, NOW))
    assert (decided[4], decided[3]) == ("node-2:0,1,2,3", "reserved")


def test_beside_a_promise_each_attempt_counts_with_its_whole_limit() -> None:
    """Nine of ten hours are served, but the next attempt may run for ten."""
    world = World(
        nodes=TWO,
        running=(runs(9, "1:0,1,2,3", 2 * HOUR, preemptible=False, limit=22 * HOUR),),
        waiting=(
            waits(1, 2, 4, left=HOUR, promoted=NOW - 60.0, ago=3 * DAY),
            job(3, 1, 4, limit=10 * HOUR, served=9 * HOUR, submitted_at=NOW - HOUR),
        ),
        now=NOW,
    )
    assert told(plan(world, NOW))[3] == "reserved"
