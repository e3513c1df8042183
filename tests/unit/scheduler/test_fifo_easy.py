"""`fifo+easy`: one reservation for the first that does not fit, by hard limits; others pass if they do not delay it."""

from __future__ import annotations

import pytest

from service.scheduler.facts import NodeView, RunningJob, WaitingJob
from service.scheduler.plan import plan
from service.scheduler.world import World
from tests.unit.service.worlds import HOUR, job, node, running, told

NOW = 1_000.0
World_ = tuple[tuple[NodeView, ...], tuple[RunningJob, ...], tuple[WaitingJob, ...], dict[int, str]]
FULL = node(1, 4, cpus=64.0)


def runs(number: int, where: str, limit: float | None) -> RunningJob:
    """A job that has just started."""
    return running(number, where, since=NOW, limit=limit)


WORLDS: dict[str, World_] = {
    "first come, first served": (
        (node(1, 1),),
        (),
        (job(2, limit=60), job(1, limit=HOUR)),
        {1: "node-1:0", 2: "behind"},
    ),
    "others pass the first that does not fit if their limit ends before it can start": (
        (FULL,),
        (runs(9, "1:0,1", 2 * HOUR),),
        (job(1, 1, 4), job(2, limit=2 * HOUR), job(3, limit=2 * HOUR + 1)),
        {1: "needs_gpus", 2: "node-1:2", 3: "reserved"},
    ),
    "or on GPUs that it will not need": (
        (FULL,),
        (runs(9, "1:0,1", 2 * HOUR),),
        (job(1, 1, 3), job(2, limit=9 * HOUR), job(3, limit=9 * HOUR)),
        {1: "needs_gpus", 2: "node-1:2", 3: "reserved"},
    ),
    "or on other nodes": (
        (FULL, node(2, 2)),
        (runs(9, "1:0,1", 2 * HOUR),),
        (job(1, 1, 4), job(2, limit=None), job(3, 1, 1)),
        {1: "needs_gpus", 2: "node-2:0", 3: "node-2:1"},
    ),
    "a job without a limit ends never": (
        (FULL,),
        (runs(9, "1:0,1", 2 * HOUR),),
        (job(1, 1, 4), job(2)),
        {1: "needs_gpus", 2: "reserved"},
    ),
    "estimates change nothing: promises read hard limits": (
        (FULL,),
        (runs(9, "1:0,1", 2 * HOUR),),
        (job(1, 1, 4), job(2, limit=3 * HOUR, left=60.0)),
        {1: "needs_gpus", 2: "reserved"},
    ),
    "it is reserved the first moment at which it fits node by node": (
        (FULL, node(2, 4, cpus=64.0)),
        (runs(7, "1:0", HOUR), runs(8, "2:0", HOUR), runs(9, "1:1", 3 * HOUR)),
        (job(1, 2, 4), job(2, limit=3 * HOUR), job(3, limit=3 * HOUR + 1)),
        {1: "needs_gpus", 2: "node-1:2", 3: "reserved"},
    ),
    "only the first has a reservation": (
        (FULL,),
        (runs(9, "1:0,1", 2 * HOUR),),
        (job(1, 1, 3, limit=HOUR), job(2, 1, 4, limit=HOUR), job(3, limit=9 * HOUR)),
        {1: "needs_gpus", 2: "needs_gpus", 3: "node-1:2"},
    ),
    "what can never fit reserves nothing": (
        (FULL,),
        (runs(9, "1:0,1", 2 * HOUR),),
        (job(1, 1, 5), job(2, limit=9 * HOUR)),
        {1: "never_fits", 2: "node-1:2"},
    ),
    "nothing is ever stopped": (
        (FULL,),
        (running(9, "1:0,1,2,3", since=0.0, limit=900 * HOUR),),
        (job(1, 1, 4, limit=60),),
        {1: "needs_gpus"},
    ),
    "a passing gang stays off the reserved GPUs and on nodes that see one folder": (
        (FULL, node(2, 4, shared="a"), node(3, 2, shared="b"), node(4, 2, shared="a")),
        (runs(9, "1:0", 2 * HOUR), runs(8, "2:0,1", None)),
        (job(1, 1, 4), job(2, 2, 2, is_split=True)),
        {1: "scattered", 2: "node-2:2,3 node-4:0,1"},
    ),
}


@pytest.mark.parametrize("sentence", WORLDS)
def test_fifo_easy(sentence: str) -> None:
    nodes, in_run, queue, expected = WORLDS[sentence]
    world = World(nodes=nodes, running=in_run, waiting=queue, now=NOW)
    assert told(plan(world, NOW, "fifo+easy")) == expected
