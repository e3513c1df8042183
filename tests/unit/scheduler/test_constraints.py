"""What else decides where a job may run: exclusive nodes, labels, GPU memory, and GPUs that others are leaving."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest

from service.scheduler.facts import NodeView, RunningJob, WaitingJob
from service.scheduler.plan import plan
from service.scheduler.world import World
from tests.unit.service.worlds import GIB, HOUR, home, job, node, running, team, told

NOW = 100_000.0
POLICIES = ["time-left", "fifo", "fifo+easy"]


@dataclass(frozen=True, kw_only=True)
class Small:
    """A world and what each waiting job of it gets."""

    nodes: tuple[NodeView, ...]
    running: tuple[RunningJob, ...] = ()
    queue: tuple[WaitingJob, ...]
    expected: dict[int, str]


def stays(number: int, where: str, **more: object) -> RunningJob:
    """A job that cannot be stopped."""
    return running(number, where, since=NOW - HOUR, preemptible=False, **more)


def leaves(number: int, where: str, **more: object) -> RunningJob:
    """A job that was told to leave."""
    return running(number, where, since=NOW - HOUR, stopping=True, **more)


WORLDS: dict[str, Small] = {
    "an exclusive job takes only a node on which nothing runs": Small(
        nodes=(node(1, 4), node(2, 4)),
        running=(stays(9, "1:0"),),
        queue=(job(1, exclusive=True),),
        expected={1: "node-2:0"},
    ),
    "nothing else starts beside it": Small(
        nodes=(node(1, 4),), running=(stays(9, "1:0", exclusive=True),), queue=(job(1),), expected={1: "needs_gpus"}
    ),
    "not even a job without GPUs": Small(
        nodes=(node(1, 4),),
        running=(stays(9, "1:0", exclusive=True),),
        queue=(job(1, 1, 0),),
        expected={1: "needs_nodes"},
    ),
    "and it starts beside no job without GPUs": Small(
        nodes=(node(1, 4),),
        running=(stays(9, "1:", cpus=1.0),),
        queue=(job(1, exclusive=True),),
        expected={1: "needs_nodes"},
    ),
    "it waits for those who are leaving its node, though others of its GPUs are free": Small(
        nodes=(node(1, 4),),
        running=(leaves(9, "1:0"),),
        queue=(job(1, exclusive=True),),
        expected={1: "node-1:1 after 9"},
    ),
    "a job has the labels that it asks for": Small(
        nodes=(node(1, 4), node(2, 4, labels={"zone": "x"}), node(3, 4, labels={"zone": "y"})),
        queue=(job(1, labels={"zone": "y"}),),
        expected={1: "node-3:0"},
    ),
    "all of them": Small(
        nodes=(node(1, 4, labels={"zone": "x"}), node(2, 4, labels={"disk": "nvme"})),
        queue=(job(1, labels={"zone": "x", "disk": "nvme"}),),
        expected={1: "never_fits"},
    ),
    "its GPUs have the memory that it asks for": Small(
        nodes=(node(1, 4, gpu_memory=40), node(2, 4, gpu_memory=80)),
        queue=(job(1, gpu_memory=60 * GIB),),
        expected={1: "node-2:0"},
    ),
    "no GPU has so much": Small(
        nodes=(node(1, 4, gpu_memory=40),), queue=(job(1, gpu_memory=60 * GIB),), expected={1: "never_fits"}
    ),
    "a job without GPUs runs anywhere, whatever GPUs it names": Small(
        nodes=(node(1, 4, model="A100"),), queue=(job(1, 1, 0, gpu_type="H100"),), expected={1: "node-1:"}
    ),
    "a job that needs the memory of one who is leaving waits for it": Small(
        nodes=(node(1, 4),),
        running=(leaves(9, "1:0", memory=60 * GIB),),
        queue=(job(1, memory=32 * GIB),),
        expected={1: "node-1:1 after 9"},
    ),
    "or its CPUs": Small(
        nodes=(node(1, 4, cpus=8.0),),
        running=(leaves(9, "1:0", cpus=6.0),),
        queue=(job(1, cpus=4.0),),
        expected={1: "node-1:1 after 9"},
    ),
    "and one that does not, starts at once": Small(
        nodes=(node(1, 4),), running=(leaves(9, "1:0"),), queue=(job(1),), expected={1: "node-1:1"}
    ),
    "GPUs that nobody holds are taken before those that are being freed": Small(
        nodes=(node(1, 2), node(2, 4)), running=(leaves(9, "1:0,1"),), queue=(job(1, 1, 2),), expected={1: "node-2:0,1"}
    ),
    "a gang lies behind one switch where it can": Small(
        nodes=(
            node(1, 4, labels={"switch": "a"}),
            node(2, 4, labels={"switch": "b"}),
            node(3, 4, labels={"switch": "b"}),
        ),
        queue=(job(1, 2, 4),),
        expected={1: "node-2:0,1,2,3 node-3:0,1,2,3"},
    ),
}


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("sentence", WORLDS)
def test_constraints(sentence: str, policy: str) -> None:
    small = WORLDS[sentence]
    queue = tuple(replace(one, submitted_at=NOW - HOUR) for one in small.queue)
    world = World(nodes=small.nodes, running=small.running, waiting=queue, now=NOW)
    decided = told(plan(world, NOW, policy))
    codes_of_nobody_to_stop = {"not_resumable": small.expected[1]}  # `time-left` says that it looked for somebody
    assert {job_id: codes_of_nobody_to_stop.get(text, text) for job_id, text in decided.items()} == small.expected


def test_a_reclaim_gives_a_job_only_nodes_with_its_checkpoint_and_a_split_model_one_folder() -> None:
    teams = (team(1, quota_gpus=8), team(2, quota_gpus=0))
    nodes = (node(1, 4, shared="a"), node(2, 4, shared="b"), node(3, 4, shared="b"))
    held = tuple(
        running(number + 6, f"{number}:0,1,2,3", team=2, since=NOW - HOUR, checkpointed=NOW - 10.0 * number)
        for number in (1, 2, 3)
    )
    pinned = World(nodes=nodes, running=held, waiting=(job(1, 1, 4, team=1, home=home(3)),), teams=teams, now=NOW)
    assert told(plan(pinned, NOW)) == {9: "stops for 1: reclaim", 1: "node-3:0,1,2,3 after 9"}
    split = World(nodes=nodes, running=held, waiting=(job(1, 2, 4, team=1, is_split=True),), teams=teams, now=NOW)
    assert told(plan(split, NOW)) == {
        8: "stops for 1: reclaim",
        9: "stops for 1: reclaim",
        1: "node-2:0,1,2,3 node-3:0,1,2,3 after 8,9",
    }
