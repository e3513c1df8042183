"""Who starts where: small worlds, each under the sentence that it proves."""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from service.scheduler.plan import plan
from service.scheduler.policies import POLICIES
from service.scheduler.world import NodeView, WaitingJob, World
from tests.unit.service.worlds import GIB, elastic, home, job, node, told

NOW = 1_000.0


@dataclass(frozen=True, kw_only=True)
class Small:
    """A world and what each job of its queue gets."""

    nodes: tuple[NodeView, ...]
    queue: tuple[WaitingJob, ...]
    expected: dict[int, str]


WORLDS: dict[str, Small] = {
    "an empty pool takes the first job": Small(
        nodes=(node(1, 2), node(2, 2)), queue=(job(1),), expected={1: "node-1:0"}
    ),
    "a gang starts on all its nodes": Small(
        nodes=(node(1, 2), node(2, 2)), queue=(job(1, 2, 2),), expected={1: "node-1:0,1 node-2:0,1"}
    ),
    "a gang whose second half is busy holds nothing of the first": Small(
        nodes=(node(1, 4), node(2, 0, taken=4)),
        queue=(job(1, 2, 4), job(2, 1, 4)),
        expected={1: "needs_gpus", 2: "node-1:0,1,2,3"},
    ),
    "a job that can never fit holds nobody up": Small(
        nodes=(node(1, 4), node(2, 1)), queue=(job(1, 1, 5), job(2, 1, 1)), expected={1: "never_fits", 2: "node-2:0"}
    ),
    "more GPUs than the whole pool has": Small(
        nodes=(node(1, 4), node(2, 4)), queue=(job(1, 3, 4),), expected={1: "never_fits"}
    ),
    "first come, first served": Small(
        nodes=(node(1, 2),), queue=(job(2), job(1), job(3)), expected={1: "node-1:0", 2: "node-1:1", 3: "behind"}
    ),
    "priority goes before age within a team": Small(
        nodes=(node(1, 1),), queue=(job(1), job(2, priority=5)), expected={2: "node-1:0", 1: "behind"}
    ),
    "jobs of one moment go by number": Small(
        nodes=(node(1, 1),),
        queue=(job(8, submitted_at=1), job(7, submitted_at=1)),
        expected={7: "node-1:0", 8: "behind"},
    ),
    "a smaller job behind a waiting gang may start": Small(
        nodes=(node(1, 1, taken=1),), queue=(job(1, 1, 2), job(2, 1, 1)), expected={1: "needs_gpus", 2: "node-1:1"}
    ),
    "a small job takes the fullest node, so that whole nodes stay free": Small(
        nodes=(node(1, 4), node(2, 1, taken=3)), queue=(job(1),), expected={1: "node-2:3"}
    ),
    "and so the whole node is there for the next": Small(
        nodes=(node(1, 4), node(2, 2, taken=2)),
        queue=(job(1), job(2, 1, 4)),
        expected={1: "node-2:2", 2: "node-1:0,1,2,3"},
    ),
    "an unreachable node gets no new work": Small(
        nodes=(node(1, 4, blocked="unreachable"), node(2, 1)), queue=(job(1),), expected={1: "node-2:0"}
    ),
    "and is named when nothing else could hold the job": Small(
        nodes=(node(1, 4, blocked="unreachable"), node(2, 1)), queue=(job(1, 1, 4),), expected={1: "nodes_not_ready"}
    ),
    "a cordoned node gets no new work": Small(
        nodes=(node(1, 4, blocked="cordoned (disk)"),), queue=(job(1),), expected={1: "nodes_not_ready"}
    ),
    "no node at all": Small(nodes=(), queue=(job(1),), expected={1: "no_nodes"}),
    "the type of GPU is obeyed": Small(
        nodes=(node(1, 4, model="A100"), node(2, 4, model="NVIDIA H100 80GB")),
        queue=(job(1, gpu_type="H100"),),
        expected={1: "node-2:0"},
    ),
    "a type that the pool has not": Small(
        nodes=(node(1, 4, model="A100-SXM"),), queue=(job(1, gpu_type="A10"),), expected={1: "never_fits"}
    ),
    "CPUs run out before GPUs": Small(
        nodes=(node(1, 4, cpus=4),), queue=(job(1, cpus=3), job(2, cpus=2)), expected={1: "node-1:0", 2: "behind"}
    ),
    "CPUs held by others are not there": Small(
        nodes=(node(1, 4, cpus=4, free_cpus=1),), queue=(job(1, cpus=2),), expected={1: "needs_nodes"}
    ),
    "memory held by others is not there": Small(
        nodes=(node(1, 4, free_memory=GIB),), queue=(job(1, memory=2 * GIB),), expected={1: "needs_nodes"}
    ),
    "more memory than any node has": Small(
        nodes=(node(1, 4, memory=GIB),), queue=(job(1, memory=2 * GIB),), expected={1: "never_fits"}
    ),
    "a job without GPUs takes CPUs only": Small(
        nodes=(node(1, 0, taken=4),), queue=(job(1, 1, 0, cpus=2),), expected={1: "node-1:"}
    ),
    "a job that backs off lets others pass": Small(
        nodes=(node(1, 1),), queue=(job(1, not_before=NOW + 5), job(2)), expected={1: "back_off", 2: "node-1:0"}
    ),
    "and comes again when its time has come": Small(
        nodes=(node(1, 1),), queue=(job(1, not_before=NOW), job(2)), expected={1: "node-1:0", 2: "behind"}
    ),
    "GPUs free on too many nodes": Small(
        nodes=(node(1, 1, taken=3), node(2, 1, taken=3)), queue=(job(1, 1, 2),), expected={1: "scattered"}
    ),
    "a job resumes on the node that has its checkpoint, though another would fit better": Small(
        nodes=(node(1, 1), node(2, 4)), queue=(job(1, home=home(2)),), expected={1: "node-2:0"}
    ),
    "a gang resumes on exactly its nodes": Small(
        nodes=(node(1, 1), node(2, 1), node(3, 1)),
        queue=(job(1, 2, home=home(1, 3)),),
        expected={1: "node-1:0 node-3:0"},
    ),
    "a checkpoint in a shared folder is read by every node that sees it": Small(
        nodes=(node(1, 1, shared="other"), node(2, 1, shared="nfs"), node(3, 1)),
        queue=(job(1, home=home(9, shared="nfs")),),
        expected={1: "node-2:0"},
    ),
    "a job is pinned to a node that is lost, and others pass it": Small(
        nodes=(node(1, 1, blocked="lost"), node(2, 1)),
        queue=(job(1, home=home(1)), job(2)),
        expected={1: "pinned", 2: "node-2:0"},
    ),
    "half of a pinned gang's nodes are cordoned": Small(
        nodes=(node(1, 1), node(2, 1, blocked="cordoned (disk)"), node(3, 1)),
        queue=(job(1, 2, home=home(1, 2)),),
        expected={1: "pinned"},
    ),
    "no node sees the shared folder any more": Small(
        nodes=(node(1, 1), node(2, 1)), queue=(job(1, home=home(1, shared="nfs")),), expected={1: "pinned"}
    ),
    "the node of a checkpoint is only busy": Small(
        nodes=(node(1, 0, taken=1), node(2, 1)), queue=(job(1, home=home(1)),), expected={1: "needs_gpus"}
    ),
    "the node of a checkpoint was just taken by a job ahead": Small(
        nodes=(node(1, 1),), queue=(job(1), job(2, home=home(1))), expected={1: "node-1:0", 2: "behind"}
    ),
    "a job with a range of GPUs takes the largest size that fits": Small(
        nodes=(node(1, 3, taken=1),), queue=(elastic(1, 2, 8),), expected={1: "node-1:1,2,3"}
    ),
    "and no more than it can use": Small(
        nodes=(node(1, 8),), queue=(elastic(1, 2, 4),), expected={1: "node-1:0,1,2,3"}
    ),
    "of one size on as few nodes as it can": Small(
        nodes=(node(1, 2), node(2, 4)), queue=(elastic(1, 2, 4),), expected={1: "node-2:0,1,2,3"}
    ),
    "and on more when one has not enough": Small(
        nodes=(node(1, 2, taken=2), node(2, 2, taken=2)),
        queue=(elastic(1, 2, 4),),
        expected={1: "node-1:2,3 node-2:2,3"},
    ),
    "its shares are equal: what is left over of a node is not used": Small(
        nodes=(node(1, 3), node(2, 1)), queue=(elastic(1, 2, 4),), expected={1: "node-1:0,1,2"}
    ),
    "enough is free, but not in equal shares": Small(
        nodes=(node(1, 3, taken=1), node(2, 1, taken=3)), queue=(elastic(1, 4, 4),), expected={1: "scattered"}
    ),
    "it waits while less than its least is free": Small(
        nodes=(node(1, 1, taken=3),), queue=(elastic(1, 2, 4),), expected={1: "needs_gpus"}
    ),
    "it takes what the jobs ahead of it have left": Small(
        nodes=(node(1, 4),),
        queue=(job(1), elastic(2, 2, 4), job(3)),
        expected={1: "node-1:0", 2: "node-1:1,2,3", 3: "behind"},
    ),
    "sizes that its training cannot be split over are passed over": Small(
        nodes=(node(1, 3),), queue=(job(1, layouts=[(1, 4), (1, 2)]),), expected={1: "node-1:0,1"}
    ),
    "CPUs may leave only a smaller size": Small(
        nodes=(node(1, 4, free_cpus=2),), queue=(elastic(1, 1, 4),), expected={1: "node-1:0,1"}
    ),
    "a node that is away leaves a smaller size": Small(
        nodes=(node(1, 2), node(2, 2, blocked="unreachable")), queue=(elastic(1, 2, 4),), expected={1: "node-1:0,1"}
    ),
    "even its least needs the nodes that are away": Small(
        nodes=(node(1, 1), node(2, 2, blocked="unreachable")),
        queue=(elastic(1, 2, 4),),
        expected={1: "nodes_not_ready"},
    ),
    "even its least is more than the pool has": Small(
        nodes=(node(1, 2), node(2, 1)), queue=(elastic(1, 4, 8),), expected={1: "never_fits"}
    ),
    "it resumes on fewer of the nodes that have its checkpoint": Small(
        nodes=(node(1, 2), node(2, 2, blocked="lost"), node(3, 4)),
        queue=(elastic(1, 2, 4, home=home(1, 2)),),
        expected={1: "node-1:0,1"},
    ),
    "and never on more": Small(
        nodes=(node(1, 2), node(2, 2)), queue=(elastic(1, 2, 4, home=home(2)),), expected={1: "node-2:0,1"}
    ),
    "none of the nodes that have its checkpoint is there": Small(
        nodes=(node(1, 2, blocked="lost"), node(2, 4)), queue=(elastic(1, 1, 4, home=home(1)),), expected={1: "pinned"}
    ),
    "a model that is split takes several nodes only if they see one folder": Small(
        nodes=(node(1, 2, shared="nfs"), node(2, 2), node(3, 2, shared="other"), node(4, 2, shared="nfs")),
        queue=(elastic(1, 2, 4, is_split=True),),
        expected={1: "node-1:0,1 node-4:0,1"},
    ),
    "and else a smaller size, on one": Small(
        nodes=(node(1, 2, shared="nfs"), node(2, 2)),
        queue=(elastic(1, 2, 4, is_split=True),),
        expected={1: "node-1:0,1"},
    ),
    "or none": Small(
        nodes=(node(1, 2), node(2, 2)), queue=(elastic(1, 3, 4, is_split=True),), expected={1: "never_fits"}
    ),
    "two gangs share the pool": Small(
        nodes=(node(1, 2), node(2, 2)),
        queue=(job(1, 2, 1), job(2, 2, 1)),
        expected={1: "node-1:0 node-2:0", 2: "node-1:1 node-2:1"},
    ),
}


@pytest.mark.parametrize("sentence", WORLDS)
def test_plan(sentence: str) -> None:
    small = WORLDS[sentence]
    assert told(plan(World(nodes=small.nodes, waiting=small.queue), NOW)) == small.expected


@pytest.mark.parametrize("sentence", WORLDS)
def test_every_reason_says_what_is_missing_and_what_to_do(sentence: str) -> None:
    small = WORLDS[sentence]
    for wait in plan(World(nodes=small.nodes, waiting=small.queue), NOW).waits:
        assert wait.reason.text.endswith(".")
        assert wait.reason.fix.endswith(".")


@pytest.mark.parametrize(
    ("nodes", "waiting", "parts"),
    [
        ((node(1, 1, taken=3),), job(1, 1, 2), ["2 GPUs", "1 is free"]),
        ((node(1, 2),), job(1, 2, 1, gpu_type="A100"), ["2 A100 GPUs on 2 nodes", "only 1 of 1 nodes"]),
        ((node(1, 1, taken=3),), elastic(1, 2, 8), ["It needs 2 to 8 GPUs, 1 is free."]),
        ((node(1, 1),), elastic(1, 2, 3, gpu_type="A100"), ["2 to 3 A100 GPUs, but only 1 of 1 nodes could"]),
        ((node(1), node(2)), elastic(1, 6, 8, is_split=True), ["only if they see one shared folder"]),
        ((node(1, 0, taken=2),), elastic(1, 2, 2), ["It needs 2 GPUs, 0 are free."]),
        ((node(1, 2, blocked="lost"),), job(1), ["node-1 is lost"]),
        ((node(1, 2, blocked="lost"), node(2, 2)), job(1, home=home(1)), ["lies on node-1 alone: node-1 is lost"]),
        ((node(1, 2), node(2, 2)), job(1, 1, 2, home=home(3)), ["on node-3 alone: node-3 cannot hold it any more"]),
        ((node(1, 2),), job(1, home=home(1, shared="nfs")), ["in a shared folder that 0 of the nodes"]),
    ],
)
def test_a_reason_names_the_numbers(nodes: tuple[NodeView, ...], waiting: WaitingJob, parts: list[str]) -> None:
    (wait,) = plan(World(nodes=nodes, waiting=(waiting,)), NOW).waits
    assert all(part in wait.reason.text for part in parts), wait.reason.text


def test_the_fix_of_a_pinned_job_is_the_command_that_frees_it() -> None:
    (wait,) = plan(World(nodes=(node(1, blocked="lost"),), waiting=(job(7, home=home(1)),)), NOW).waits
    assert "gang requeue 7 --from-start" in wait.reason.fix


def test_jobs_that_share_a_verdict_are_each_told_the_command_for_themselves() -> None:
    """Else the owner of one would give up the progress of another."""
    nodes = (node(1, blocked="lost"), node(2))
    waits = plan(World(nodes=nodes, waiting=(job(7, home=home(1)), job(8, home=home(1)))), NOW).waits
    assert [f"gang requeue {wait.job_id} --from-start" in wait.reason.fix for wait in waits] == [True, True]


def test_jobs_of_one_shape_that_are_pinned_to_different_nodes_do_not_share_a_verdict() -> None:
    nodes = (node(1, 0, taken=1), node(2, 1))
    queue = (job(1, home=home(1)), job(2, home=home(2)))
    assert told(plan(World(nodes=nodes, waiting=queue), NOW)) == {1: "needs_gpus", 2: "node-2:0"}


FOUR = (
    job(1, team=1),
    job(2, team=2),
    job(3, team=1, priority=50),
    job(4, team=2, priority=-5),
)


@pytest.mark.parametrize("num_free", [0, 1, 2, 3, 4])
def test_a_priority_moves_a_job_ahead_of_its_own_teams_others_and_never_of_another_teams(num_free: int) -> None:
    placed = plan(World(nodes=(node(1, num_free, taken=4 - num_free),), waiting=FOUR), NOW, "fifo").places
    assert [place.job_id for place in placed] == [3, 2, 1, 4][:num_free]


def test_a_priority_above_the_top_one_goes_ahead_of_all_teams() -> None:
    waiting = (*FOUR, job(5, team=3, priority=101))
    placed = plan(World(nodes=(node(1, 2),), waiting=waiting), NOW, "fifo").places
    assert [place.job_id for place in placed] == [5, 3]


STRICT: dict[str, Small] = {
    "nobody passes the first job that does not fit": Small(
        nodes=(node(1, 1, taken=1),), queue=(job(1, 1, 2), job(2, 1, 1)), expected={1: "needs_gpus", 2: "behind"}
    ),
    "unless it asks for GPUs of another kind": Small(
        nodes=(node(1, 1, taken=1), node(2, 1, model="H100")),
        queue=(job(1, 1, 2, gpu_type="A100"), job(2, 1, 1, gpu_type="H100")),
        expected={1: "needs_gpus", 2: "node-2:0"},
    ),
    "a job that backs off holds nobody up": Small(
        nodes=(node(1, 1, taken=1),),
        queue=(job(1, 1, 2, not_before=NOW + 60), job(2)),
        expected={1: "back_off", 2: "node-1:1"},
    ),
    "a job that can never fit holds nobody up": Small(
        nodes=(node(1, 1), node(2, 1)), queue=(job(1, 1, 5), job(2)), expected={1: "never_fits", 2: "node-1:0"}
    ),
    "the time left changes nothing": Small(
        nodes=(node(1, 1),), queue=(job(1, limit=90_000), job(2, limit=60)), expected={1: "node-1:0", 2: "behind"}
    ),
}


@pytest.mark.parametrize("sentence", STRICT)
def test_fifo(sentence: str) -> None:
    small = STRICT[sentence]
    assert told(plan(World(nodes=small.nodes, waiting=small.queue), NOW, "fifo")) == small.expected


@pytest.mark.parametrize("policy", POLICIES)
def test_o20_a_job_that_can_never_fit_holds_nobody_up(policy: str) -> None:
    """5 GPUs of one node where none has more than 4, and more than the whole pool has: both are told, none blocks."""
    world = World(nodes=(node(1, 4), node(2, 1)), waiting=(job(1, 1, 5), job(2, 9, 4), job(3)))
    assert told(plan(world, NOW, policy)) == {1: "never_fits", 2: "never_fits", 3: "node-2:0"}
