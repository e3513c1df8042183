"""Quotas, borrowing, reclaim and caps, each sentence in a small world; O-18 among them."""

from __future__ import annotations

import random
from dataclasses import dataclass
from typing import Any

import pytest

from service.operations.explain_job import explain_in, queue_in
from service.scheduler.facts import NodeView, RunningJob, Team, User, WaitingJob
from service.scheduler.plan import PolicyOptions, decide, plan
from service.scheduler.policies import POLICIES
from service.scheduler.world import World
from tests.unit.service.worlds import HOUR, MINUTE, elastic, gang, job, node, running, team, told, user

NOW = 100_000.0
A, B, C = 1, 2, 3


@dataclass(frozen=True, kw_only=True)
class Shared:
    """A world of teams, and what each job of it gets: those that run are named only if they are stopped."""

    nodes: tuple[NodeView, ...] = (node(1, 4, cpus=64.0),)
    teams: tuple[Team, ...] = ()
    users: tuple[User, ...] = ()
    running: tuple[RunningJob, ...] = ()
    queue: tuple[WaitingJob, ...]
    expected: dict[int, str]
    preemption: str = "all"


def waits(number: int, gpus: int = 1, *, team: int = A, **more: object) -> WaitingJob:
    """A job that has waited an hour."""
    return job(number, 1, gpus, team=team, submitted_at=NOW - HOUR, **{"preemptible": True, **more})


def runs(number: int, where: str, *, team: int, saved: float = HOUR, **more: Any) -> RunningJob:
    """A job that started two hours ago, with its last checkpoint `saved` seconds ago."""
    return running(number, where, team=team, **{"since": NOW - 2 * HOUR, "checkpointed": NOW - saved, **more})


HALF = (team(A, quota_gpus=2), team(B, quota_gpus=2))
TWO = (node(1, 4, cpus=64.0), node(2, 4, cpus=64.0))
WORLDS: dict[str, Shared] = {
    "a team borrows what others leave idle": Shared(
        teams=HALF, queue=(waits(1, 2), waits(2, 2)), expected={1: "node-1:0,1", 2: "node-1:2,3"}
    ),
    "jobs within a quota go before jobs that borrow": Shared(
        teams=HALF,
        nodes=(node(1, 2, taken=2),),
        running=(),
        queue=(waits(1, 2, team=C, left=60.0), waits(2, 2, team=B, left=90 * HOUR)),
        expected={2: "node-1:2,3", 1: "behind"},
    ),
    "who asks for no GPU borrows none, and no cap is meant for it": Shared(
        nodes=(node(1, 8, cpus=64.0),),
        teams=(team(A), team(B, quota_gpus=4, cap_gpus=1)),
        users=(user(5, 1),),
        running=(runs(8, "1:0,1", team=A), runs(9, "1:2,3", team=B, user=5)),
        queue=(waits(1, 0, team=A, preemptible=False), waits(2, 0, team=B, user=5, preemptible=False)),
        expected={1: "node-1:", 2: "node-1:"},
    ),
    "nothing is taken back from borrowers for processors alone": Shared(
        nodes=(node(1, 4, cpus=4.0),),
        teams=HALF,
        running=(runs(9, "1:0,1,2,3", team=C),),
        queue=(waits(1, 0, team=A, cpus=1.0, left=MINUTE),),
        expected={1: "needs_nodes"},
    ),
    "a job that is borrowed whole is reclaimed before one that reaches into its team's quota": Shared(
        nodes=(node(1, 8, cpus=64.0), node(2, 1)),
        teams=(team(A, quota_gpus=1), team(B, quota_gpus=8)),
        running=(runs(8, "1:0,1,2,3,4,5,6,7", team=B, saved=60.0), runs(9, "2:0", team=B, saved=HOUR)),
        queue=(waits(1, 1, team=A, left=90 * HOUR),),
        expected={9: "stops for 1: reclaim", 1: "node-2:0 after 9"},
    ),
    "nobody is stopped whose place another makes anyway": Shared(
        nodes=(node(1, 8, cpus=64.0),),
        teams=(team(A, quota_gpus=4), team(B, quota_gpus=0)),
        running=(
            runs(7, "1:0", team=B, saved=60.0),
            runs(8, "1:1,2,3,4", team=B, saved=60.0),
            runs(9, "1:5,6,7", team=B, saved=HOUR),
        ),
        queue=(waits(1, 4, team=A, left=90 * HOUR),),
        expected={8: "stops for 1: reclaim", 1: "node-1:1,2,3,4 after 8"},
    ),
    "a job that cannot be stopped does not borrow": Shared(
        teams=HALF, queue=(waits(1, 3, preemptible=False),), expected={1: "not_resumable"}
    ),
    "and runs within the quota": Shared(
        teams=HALF, queue=(waits(1, 2, preemptible=False),), expected={1: "node-1:0,1"}
    ),
    "one with a range of sizes takes no more than the quota": Shared(
        teams=(team(A, quota_gpus=3),),
        queue=(elastic(1, 1, 4, team=A),),
        expected={1: "node-1:0,1,2"},
    ),
    "a team without a quota borrows all that it holds": Shared(
        teams=HALF, queue=(waits(1, team=C, preemptible=False),), expected={1: "not_resumable"}
    ),
    "where nobody has a quota, nobody borrows": Shared(
        teams=(team(A), team(B)), queue=(waits(1, 4, preemptible=False),), expected={1: "node-1:0,1,2,3"}
    ),
    "a team gets its quota back from those who borrow": Shared(
        teams=HALF,
        running=(runs(8, "1:0,1", team=A), runs(9, "1:2,3", team=A)),
        queue=(waits(1, 2, team=B),),
        expected={8: "stops for 1: reclaim", 1: "node-1:0,1 after 8"},
    ),
    "at once: patience, protection and the number of stops do not count": Shared(
        teams=HALF,
        running=(runs(9, "1:0,1,2,3", team=A, since=NOW - 1.0, stops=15, promoted=NOW - 2.0),),
        queue=(waits(1, 2, team=B, waits=NOW),),
        expected={9: "stops for 1: reclaim", 1: "node-1:0,1 after 9"},
    ),
    "those are stopped who lose the least work since their last checkpoint": Shared(
        teams=HALF,
        running=(runs(8, "1:0,1", team=A, saved=10 * MINUTE), runs(9, "1:2,3", team=A, saved=MINUTE)),
        queue=(waits(1, 2, team=B),),
        expected={9: "stops for 1: reclaim", 1: "node-1:2,3 after 9"},
    ),
    "the work of all GPUs counts": Shared(
        teams=HALF,
        running=(runs(8, "1:0,1,2", team=A, saved=4 * MINUTE), runs(9, "1:3", team=A, saved=5 * MINUTE)),
        queue=(waits(1, team=B),),
        expected={9: "stops for 1: reclaim", 1: "node-1:3 after 9"},
    ),
    "nobody is stopped who does not resume": Shared(
        teams=HALF,
        running=(runs(9, "1:0,1,2,3", team=A, preemptible=False),),
        queue=(waits(1, 2, team=B),),
        expected={1: "not_resumable"},
    ),
    "reclaim ends where the lender has its quota: what goes beyond it borrows": Shared(
        teams=HALF,
        running=(runs(7, "1:0,1", team=A), runs(8, "1:2", team=A), runs(9, "1:3", team=B)),
        queue=(waits(1, 2, team=B),),
        expected={1: "too_costly"},
    ),
    "a team that is within its quota loses nothing to others": Shared(
        teams=HALF,
        running=(runs(8, "1:0,1", team=A, left_at=(900 * HOUR, NOW)), runs(9, "1:2,3", team=B)),
        queue=(waits(1, 2, team=C, left=60.0),),
        expected={1: "too_costly"},
    ),
    "not even if it would pay: jobs beyond a quota are stopped, and only so many that it is kept": Shared(
        teams=HALF,
        running=tuple(runs(6 + place, f"1:{place}", team=A, left_at=(900 * HOUR, NOW)) for place in range(3)),
        queue=(waits(1, 3, team=C, left=60.0),),
        expected={1: "too_costly"},
    ),
    "but its own jobs with less time left may stop its own others": Shared(
        teams=HALF,
        running=(runs(8, "1:0,1", team=A, left_at=(900 * HOUR, NOW)), runs(9, "1:2,3", team=B)),
        queue=(waits(1, 2, team=A, left=60.0),),
        expected={8: "stops for 1: less_time_left", 1: "node-1:0,1 after 8"},
    ),
    "a pool that stops jobs only to reclaim does so": Shared(
        preemption="reclaim_only",
        teams=HALF,
        running=(runs(8, "1:0,1", team=A), runs(9, "1:2,3", team=A)),
        queue=(waits(1, 2, team=B),),
        expected={8: "stops for 1: reclaim", 1: "node-1:0,1 after 8"},
    ),
    "and one that never stops jobs does not": Shared(
        preemption="none",
        teams=HALF,
        running=(runs(8, "1:0,1", team=A), runs(9, "1:2,3", team=A)),
        queue=(waits(1, 2, team=B),),
        expected={1: "needs_gpus"},
    ),
    "a gang gets its quota back on several nodes, from each borrower once": Shared(
        nodes=TWO,
        teams=(team(A, quota_gpus=0), team(B, quota_gpus=8)),
        running=(runs(9, "1:0,1,2,3 2:0,1,2,3", team=A),),
        queue=(job(1, 2, 4, team=B, submitted_at=NOW),),
        expected={9: "stops for 1: reclaim", 1: "node-1:0,1,2,3 node-2:0,1,2,3 after 9"},
    ),
    "what was just given is not taken back in the same pass": Shared(
        nodes=(node(1, 2),),
        teams=HALF,
        queue=(waits(1, 2, team=C, priority=101), waits(2, 2, team=B)),
        expected={1: "node-1:0,1", 2: "behind"},
    ),
    "whole nodes: a gang of whole nodes is within a quota of nodes": Shared(
        nodes=TWO,
        teams=(team(A, quota_nodes=2), team(B, quota_gpus=0)),
        running=(runs(8, "1:0", team=B), runs(9, "2:0", team=B)),
        queue=(job(1, 2, 4, team=A, submitted_at=NOW),),
        expected={
            8: "stops for 1: reclaim",
            9: "stops for 1: reclaim",
            1: "node-1:0,1,2,3 node-2:0,1,2,3 after 8,9",
        },
    ),
    "and runs there though it cannot be stopped": Shared(
        nodes=TWO,
        teams=(team(A, quota_nodes=1),),
        queue=(waits(1, 4, preemptible=False),),
        expected={1: "node-1:0,1,2,3"},
    ),
    "parts of nodes are not": Shared(
        nodes=TWO,
        teams=(team(A, quota_nodes=1),),
        queue=(waits(1, 2, preemptible=False),),
        expected={1: "not_resumable"},
    ),
    "nor is one node more": Shared(
        nodes=TWO,
        teams=(team(A, quota_nodes=1),),
        running=(runs(9, "1:0,1,2,3", team=A),),
        queue=(waits(1, 4, preemptible=False),),
        expected={1: "not_resumable"},
    ),
    "a node that is promised counts as held": Shared(
        nodes=TWO,
        teams=(team(A, quota_nodes=1), team(B, quota_gpus=0)),
        running=(runs(8, "1:0", team=B), runs(9, "2:0", team=B)),
        queue=(waits(1, 4, waits=NOW), waits(2, 4, waits=NOW)),
        expected={8: "stops for 1: reclaim", 1: "node-1:0,1,2,3 after 8", 2: "patience"},
    ),
    "nodes within a quota of nodes are not reclaimed": Shared(
        nodes=TWO,
        teams=(team(A, quota_nodes=1), team(B, quota_gpus=8)),
        running=(runs(8, "1:0,1,2,3", team=A, saved=1.0), runs(9, "2:0,1,2,3", team=A)),
        queue=(waits(1, 4, team=B), waits(2, 4, team=B)),
        expected={8: "stops for 1: reclaim", 1: "node-1:0,1,2,3 after 8", 2: "too_costly"},
    ),
    "a cap holds though GPUs are idle": Shared(
        teams=(team(A, cap_gpus=2),), queue=(waits(1, 2), waits(2)), expected={1: "node-1:0,1", 2: "cap"}
    ),
    "a user's cap likewise, and others of the team go on": Shared(
        users=(user(7, 1),),
        queue=(waits(1, user=7), waits(2, user=7), waits(3, user=8)),
        expected={1: "node-1:0", 2: "cap", 3: "node-1:1"},
    ),
    "one with a range of sizes takes what the cap leaves": Shared(
        teams=(team(A, cap_gpus=3),),
        running=(runs(9, "1:0", team=A),),
        queue=(elastic(1, 1, 4, team=A),),
        expected={1: "node-1:1,2"},
    ),
    "nothing is stopped for a job that its cap holds back": Shared(
        teams=(team(A, quota_gpus=4, cap_gpus=2), team(B, quota_gpus=0)),
        running=(runs(9, "1:0,1,2,3", team=B),),
        queue=(waits(1, 4),),
        expected={1: "cap"},
    ),
    "what is being freed is no longer held": Shared(
        teams=(team(A, cap_gpus=2),),
        running=(runs(9, "1:0,1", team=A, stopping=True),),
        queue=(waits(1, 2),),
        expected={1: "node-1:2,3"},
    ),
    "an exclusive job takes all of its node, by its cap too": Shared(
        teams=(team(A, cap_gpus=3),), queue=(waits(1, exclusive=True), waits(2)), expected={1: "cap", 2: "node-1:0"}
    ),
}


@pytest.mark.parametrize("sentence", WORLDS)
def test_quotas(sentence: str) -> None:
    one = WORLDS[sentence]
    world = World(nodes=one.nodes, running=one.running, waiting=one.queue, teams=one.teams, users=one.users, now=NOW)
    decided = plan(world, NOW, "time-left", PolicyOptions(preemption=one.preemption))
    assert told(decided) == one.expected


@pytest.mark.parametrize("policy", ["time-left", "fifo", "fifo+easy"])
def test_caps_hold_under_every_policy(policy: str) -> None:
    world = World(
        nodes=(node(1, 8, cpus=64.0),),
        teams=(team(A, cap_gpus=3),),
        users=(user(7, 2),),
        waiting=[waits(number, team=number % 2 + 1, user=7 if number % 3 else 8) for number in range(1, 12)],
    )
    plan_ = decide(world, NOW, policy)
    held = [world.runs[place.job_id].job for place in plan_.places]
    assert sum(one.team_id == A for one in held) <= 3
    assert sum(one.user_id == 7 for one in held) <= 2
    assert len(held) >= 4


@pytest.mark.parametrize("seed", range(20))
def test_o18_what_is_freed_is_given_to_one_of_two_that_reclaim_it_at_once(seed: int) -> None:
    """Pool of 4; team A borrows it all with two jobs; B and C each ask for all 4 in the same instant."""
    drawn = random.Random(seed)
    teams = [team(A, quota_gpus=0), team(B, quota_gpus=4), team(C, quota_gpus=4)]
    queue = [waits(1, 4, team=B), waits(2, 4, team=C)]
    drawn.shuffle(queue)
    borrowers = [
        running(8, "1:0,1", team=A, since=NOW - drawn.random() * HOUR),
        running(9, "1:2,3", team=A, since=NOW - drawn.random() * HOUR),
    ]
    world = World(nodes=(node(1, 4),), teams=teams, waiting=queue, running=borrowers, now=NOW)
    first = decide(world, NOW)
    assert {stop.job_id for stop in first.stops} == {8, 9}
    (nominated,) = first.nominations
    again = decide(world, NOW + 1.0)
    assert not again.stops and not again.nominations and not again.places
    for run in borrowers:
        world.stopped(run.job.id, run.job, NOW + 2.0)
        held = sum(facts.gang.layout.num_gpus for facts in world.facts()["runs"].values())
        assert held <= 4
    (place,) = decide(world, NOW + 3.0).places
    assert (place.job_id, place.gang) == (nominated.job_id, nominated.gang)
    assert place.gang.shares == gang("1:0,1,2,3").shares
    assert all(count <= 4 for count in world.facts()["team_gpus"].values())
    assert len(world.waiting) == 3, "the other one of B and C waits, and so do the borrowers"


# --- The order that is told ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("policy", ["time-left", "fifo", "fifo+easy"])
@pytest.mark.parametrize("seed", range(10))
def test_the_order_that_is_told_is_the_one_in_which_jobs_get_their_gpus(policy: str, seed: int) -> None:
    """Jobs within a quota come before those that borrow; what the ones ahead would take counts."""
    drawn = random.Random(seed)
    queue = [
        waits(
            number,
            drawn.choice([0, 1, 1, 2, 4]),
            team=drawn.choice([A, B, C]),
            user=drawn.randint(1, 2),
            limit=float(drawn.randint(1, 90) * 600),
            preemptible=drawn.random() < 0.8,
            priority=drawn.choice([0, 0, 0, 50, 1_000]),
        )
        for number in range(1, 41)
    ]
    world = World(
        [node(number, 4, cpus=64.0) for number in range(1, 41)],
        queue,
        teams=[team(A, quota_gpus=8), team(B, quota_gpus=4, quota_nodes=1, cap_gpus=12), team(C)],
        users=[user(2, 20)],
        now=NOW,
        order=POLICIES[policy].order,
    )
    told_order = [entry.id for entry in queue_in(world, policy)]
    told_ahead = {job_id: explain_in(world, job_id, NOW, None, policy) for job_id in told_order}

    given = [place.job_id for place in plan(world, NOW, policy).places]

    assert sorted(told_order) == list(range(1, 41)) and len(given) > 10
    assert [job_id for job_id in told_order if job_id in given] == given
    for place, job_id in enumerate(told_order):
        explained = told_ahead[job_id]
        assert (explained.position, explained.ahead) == (place + 1, tuple(told_order[max(0, place - 20) : place]))
