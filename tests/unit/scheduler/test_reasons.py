"""The words of every reason that the scheduler gives: what is missing with its numbers, and what helps."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest

from service.domain.reasons import Reason, ReasonCode
from service.scheduler.plan import PolicyOptions, plan
from service.scheduler.world import World
from tests.unit.service.worlds import HOUR, MINUTE, home, job, node, nomination, running, team, user

NOW = 100_000.0
FULL = node(1, 4, cpus=64.0)
NODES = (FULL, node(2, 4, cpus=64.0))


@dataclass(frozen=True, kw_only=True)
class Told:
    """A world, and what job 1 of it is told."""

    world: dict[str, Any]
    code: ReasonCode
    text: str
    fix: str
    way: tuple[str, str] = ("time-left", "all")


def waits(number: int, gpus: int = 1, **more: Any) -> Any:
    """A job that has waited an hour."""
    return job(number, 1, gpus, **{"submitted_at": NOW - HOUR, "left": HOUR, **more})


def runs(number: int, where: str, left: float = 90 * HOUR, **more: Any) -> Any:
    """A job that has run for a day."""
    return running(number, where, left_at=(left, NOW), **{"since": NOW - 24 * HOUR, **more})


HELD = Reason(code=ReasonCode.HELD, text="It is held by its owner.", fix="Release it: gang release JOB.")
SOONER = "It starts when enough are free; with fewer GPUs it may start sooner."
REASONS: dict[str, Told] = {
    "no nodes": Told(
        world={"nodes": (), "waiting": (waits(1),)},
        code=ReasonCode.NO_NODES,
        text="No node has joined the pool yet.",
        fix="Ask an admin to start an agent: gang node ls shows the nodes.",
    ),
    "never fits": Told(
        world={"nodes": NODES, "waiting": (waits(1, 5),)},
        code=ReasonCode.NEVER_FITS,
        text="It needs 5 GPUs, but only 0 of 2 nodes could ever hold that.",
        fix="Cancel it and submit with less, or ask an admin to add nodes.",
    ),
    "nodes not ready": Told(
        world={"nodes": (node(1, 4, blocked="unreachable"),), "waiting": (waits(1),)},
        code=ReasonCode.NODES_NOT_READY,
        text="It needs 1 GPU: node-1 is unreachable.",
        fix="It starts when they are back: gang node ls.",
    ),
    "pinned": Told(
        world={"nodes": (node(1, 4, blocked="lost"), node(2)), "waiting": (waits(1, home=home(1)),)},
        code=ReasonCode.PINNED,
        text="It needs 1 GPU, and its last checkpoint lies on node-1 alone: node-1 is lost.",
        fix="It resumes when they are back: gang node ls. To start it anywhere without its progress: "
        "gang requeue 1 --from-start.",
    ),
    "back-off": Told(
        world={"nodes": NODES, "waiting": (waits(1, not_before=NOW + 12.0),)},
        code=ReasonCode.BACK_OFF,
        text="Its last start failed by the pool's fault; it is tried again within 12 s.",
        fix="Nothing to do.",
    ),
    "held": Told(
        world={"nodes": NODES, "waiting": (waits(1, held=HELD),)}, code=ReasonCode.HELD, text=HELD.text, fix=HELD.fix
    ),
    "behind those that go first": Told(
        world={"nodes": (node(1, 1),), "waiting": (waits(1), waits(2, left=MINUTE))},
        code=ReasonCode.BEHIND,
        text="It needs 1 GPU; jobs ahead of it in the queue take what is free.",
        fix="It starts when they end: gang why shows them.",
    ),
    "behind one that needs more": Told(
        world={"nodes": (node(1, 1, taken=1),), "waiting": (waits(1), waits(2, 2, submitted_at=1.0))},
        way=("fifo", "all"),
        code=ReasonCode.BEHIND,
        text="It needs 1 GPU, which are free; a job ahead of it that needs more goes first.",
        fix="It starts once that one has: gang why shows it.",
    ),
    "too few GPUs": Told(
        world={"nodes": (node(1, 1, taken=3),), "waiting": (waits(1, 2),)},
        code=ReasonCode.NEEDS_GPUS,
        text="It needs 2 GPUs, 1 is free.",
        fix=SOONER,
    ),
    "scattered": Told(
        world={"nodes": (node(1, 1, taken=3), node(2, 1, taken=3)), "waiting": (waits(1, 2),)},
        code=ReasonCode.SCATTERED,
        text="It needs 2 GPUs: 2 GPUs are free, but no node has 2 of them (the best has 1).",
        fix="It starts when whole shares are free; smaller parts per node may start sooner.",
    ),
    "too little beside GPUs": Told(
        world={"nodes": (node(1, 4, free_cpus=1.0),), "waiting": (waits(1, 2),)},
        code=ReasonCode.NEEDS_NODES,
        text="It needs 2 GPUs: 4 GPUs are free, but not together with enough CPUs and memory.",
        fix="It starts when whole shares are free; fewer CPUs or less memory per node may start sooner.",
    ),
    "nodes for itself": Told(
        world={
            "nodes": (node(1, 8, cpus=64.0),),
            "running": (runs(9, "1:0"),),
            "waiting": (waits(1, 2, exclusive=True, waits=NOW - HOUR),),
        },
        way=("fifo", "none"),
        code=ReasonCode.NEEDS_NODES,
        text="It needs 2 GPUs: 7 GPUs are free, but something else runs on their nodes, and it wants nodes for itself.",
        fix="It starts when nodes are idle; without resources.exclusive it may start sooner.",
    ),
    "patience": Told(
        world={"nodes": (FULL,), "running": (runs(9, "1:0,1,2,3"),), "waiting": (waits(1, waits=NOW),)},
        code=ReasonCode.PATIENCE,
        text="It needs 1 GPU, 0 are free; running jobs are given up to 5 minutes to end by themselves.",
        fix="Nothing to do.",
    ),
    "protected": Told(
        world={"nodes": (FULL,), "running": (runs(9, "1:0,1,2,3", since=NOW - 1.0),), "waiting": (waits(1),)},
        code=ReasonCode.PROTECTED,
        text="It needs 1 GPU, 0 are free; of those running, 1 started too recently to be stopped, and stopping others "
        "does not pay.",
        fix="It starts when enough are free, or when their protected run is over.",
    ),
    "they end soon": Told(
        world={"nodes": (FULL,), "running": (runs(9, "1:0,1,2,3", HOUR),), "waiting": (waits(1),)},
        code=ReasonCode.TOO_COSTLY,
        text="It needs 1 GPU, 0 are free; those running end within 3 times its own time left, or stopping them costs "
        "more than it gains.",
        fix="It starts when enough are free; with a shorter limit it may start sooner.",
    ),
    "quorum": Told(
        world={
            "nodes": NODES,
            "running": (runs(9, "1:0,1,2,3 2:0,1,2,3"),),
            "waiting": (waits(1, 2),),
        },
        code=ReasonCode.QUORUM,
        text="It needs 2 GPUs, 0 are free; stopping job 9 would idle 6 GPUs for it.",
        fix="It starts when enough are free, or when more jobs like it wait.",
    ),
    "nobody resumes": Told(
        world={"nodes": (FULL,), "running": (runs(9, "1:0,1,2,3", preemptible=False),), "waiting": (waits(1),)},
        code=ReasonCode.NOT_RESUMABLE,
        text="It needs 1 GPU, 0 are free; the job that runs does not resume, or may not be stopped once more, so "
        "nothing is stopped for it.",
        fix="It starts when enough are free.",
    ),
    "its quota is lent to a script that has not shown that it resumes": Told(
        world={
            "nodes": (FULL,),
            "running": (runs(9, "1:0,1,2,3", team=2, preemptible=False, may_borrow=True),),
            "waiting": (waits(1, 2, team=1),),
            "teams": (team(1, quota_gpus=2), team(2)),
        },
        code=ReasonCode.NOT_RESUMABLE,
        text="It needs 2 GPUs, 0 are free; job 9 borrows and has not reported a checkpoint yet: it is asked back as "
        "soon as it does.",
        fix="Nothing to do; or ask an admin to requeue what borrows: gang requeue 9.",
    ),
    "too few CPUs for a job without GPUs": Told(
        world={"nodes": (node(1, 4, cpus=4.0),), "running": (runs(9, "1:0,1,2,3"),), "waiting": (waits(1, 0),)},
        code=ReasonCode.NEEDS_NODES,
        text="It needs 1 CPU: no node has as many CPUs and as much memory free.",
        fix="It starts when one has; fewer CPUs or less memory may start sooner.",
    ),
    "reserved": Told(
        world={
            "nodes": (FULL,),
            "running": (runs(9, "1:0,1", limit=40 * HOUR),),
            "waiting": (waits(1), waits(2, 4, submitted_at=1.0)),
        },
        way=("fifo+easy", "all"),
        code=ReasonCode.RESERVED,
        text="It needs 1 GPU: 2 GPUs are free, and kept for a job ahead of it that it could delay.",
        fix="It starts earlier with a limit that ends before that reservation: resources.time.",
    ),
    "nominated": Told(
        world={
            "nodes": NODES,
            "running": (runs(9, "1:0,1,2,3 2:0,1,2,3", stopping=True),),
            "waiting": (waits(1, 4),),
            "nominations": (nomination(1, "1:0,1,2,3", 9),),
        },
        code=ReasonCode.NOMINATED,
        text="4 GPUs on node-1 are kept for it; job 9 writes its checkpoint and leaves.",
        fix="Nothing to do: it starts as soon as they are free.",
    ),
    "team's cap": Told(
        world={
            "nodes": NODES,
            "running": (runs(9, "1:0,1,2", team=1),),
            "waiting": (waits(1, 2, team=1),),
            "teams": (team(1, cap_gpus=4),),
        },
        code=ReasonCode.CAP,
        text="Its team holds 3 of at most 4 GPUs; it asks for 2 more.",
        fix="It starts when others of them end; an admin can raise the cap: gang admin quota team-1 --cap N.",
    ),
    "more than the team's cap": Told(
        world={"nodes": NODES, "waiting": (waits(1, 4, team=1),), "teams": (team(1, cap_gpus=2),)},
        code=ReasonCode.CAP,
        text="It asks for 4 GPUs, and its team may hold at most 2: it cannot start so.",
        fix="Ask for less, or have an admin raise the cap: gang admin quota team-1 --cap N.",
    ),
    "user's cap": Told(
        world={
            "nodes": NODES,
            "running": (runs(9, "1:0,1,2", user=7),),
            "waiting": (waits(1, 2, user=7),),
            "users": (user(7, 4),),
        },
        code=ReasonCode.CAP,
        text="Its owner holds 3 of at most 4 GPUs; it asks for 2 more.",
        fix="It starts when others of them end; an admin can raise the cap: gang admin cap USER --gpus N.",
    ),
    "cannot borrow": Told(
        world={
            "nodes": NODES,
            "running": (runs(9, "1:0,1", team=1),),
            "waiting": (waits(1, 2, team=1),),
            "teams": (team(1, quota_gpus=3),),
        },
        code=ReasonCode.NOT_RESUMABLE,
        text="Its team holds 2 of 3 GPUs of its quota and would have to borrow for the 2 it asks for; only jobs that "
        "resume may borrow.",
        fix="Let it resume from checkpoints and say so (preemptible: true), or wait until its team's quota has room.",
    ),
    "cannot borrow nodes": Told(
        world={
            "nodes": (node(1, 4, cpus=64.0), node(2, 4, cpus=64.0)),
            "running": (runs(9, "1:0,1,2,3", team=1),),
            "waiting": (waits(1, 4, team=1),),
            "teams": (team(1, quota_gpus=8, quota_nodes=1),),
        },
        code=ReasonCode.NOT_RESUMABLE,
        text="Its team holds 1 of 1 whole nodes of its quota and would have to borrow for the 1 it asks for; only jobs "
        "that resume may borrow.",
        fix="Let it resume from checkpoints and say so (preemptible: true), or wait until its team's quota has room.",
    ),
    "asks for more nodes than its quota": Told(
        world={
            "nodes": (node(1, 4, cpus=64.0), node(2, 4, cpus=64.0)),
            "waiting": (job(1, 2, 4, team=1),),
            "teams": (team(1, quota_gpus=8, quota_nodes=1),),
        },
        code=ReasonCode.NOT_RESUMABLE,
        text="It asks for 2 whole nodes, its team's quota is 1, and only jobs that resume may borrow: it cannot start "
        "so.",
        fix="Let it resume from checkpoints and say so (preemptible: true), or have an admin raise the quota: gang "
        "admin quota team-1 --nodes N.",
    ),
}


def reason_of(told: Told) -> Reason:
    """What job 1 is told."""
    decided = plan(World(**told.world, now=NOW), NOW, told.way[0], PolicyOptions(preemption=told.way[1]))
    return {wait.job_id: wait.reason for wait in decided.waits}[1]


@pytest.mark.parametrize("name", REASONS)
def test_a_reason_says_what_is_missing_and_what_helps(name: str) -> None:
    told = REASONS[name]
    assert reason_of(told) == Reason(code=told.code, text=told.text, fix=told.fix)


def test_every_reason_of_the_scheduler_has_its_words_here() -> None:
    made_elsewhere = {
        ReasonCode.SUBMITTED,
        ReasonCode.STOP_UNCONFIRMED,
        ReasonCode.NOT_YET,
        ReasonCode.DEPENDENCY,
    }
    assert {told.code for told in REASONS.values()} == set(ReasonCode) - made_elsewhere


@pytest.mark.parametrize("count", [1, 2, 5])
def test_those_who_leave_are_named_and_counted(count: int) -> None:
    after = range(10, 10 + count)
    world = World(
        nodes=(node(1, 8, cpus=64.0),),
        running=[runs(number, f"1:{number - 10}", stopping=True) for number in after],
        waiting=(waits(1, 8),),
        nominations=(nomination(1, "1:0,1,2,3,4,5,6,7", *after),),
        now=NOW,
    )
    (wait,) = plan(world, NOW).waits
    expected = {
        1: "job 10 writes its checkpoint and leaves.",
        2: "job 10, job 11 write their checkpoints and leave.",
        5: "job 10, job 11, job 12 and 2 more write their checkpoints and leave.",
    }
    assert wait.reason.text.endswith(expected[count])
