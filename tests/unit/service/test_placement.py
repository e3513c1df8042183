"""Which GPUs of a node a job gets: close together, and the leftovers of groups first."""

from __future__ import annotations

from dataclasses import replace

import pytest

from service.scheduler.facts import NodeView, PlacedGang, WaitingJob
from service.scheduler.placement import find_gang
from service.scheduler.world import World
from tests.unit.service.worlds import gang, job, node

# Eight GPUs in two groups of four, as on most machines; a group is a letter for each index.
CHOICES: dict[str, tuple[str, set[int], int, tuple[int, ...]]] = {
    "a pair stays in one group": ("aaaabbbb", set(), 2, (0, 1)),
    "a whole group is taken when it is asked for": ("aaaabbbb", set(), 4, (0, 1, 2, 3)),
    "the group with fewer left is used up first": ("aaaabbbb", {0}, 2, (1, 2)),
    "a group of just the size is the best": ("aaaabbbb", {0, 1}, 2, (2, 3)),
    "a pair goes where it fits whole": ("aaaabbbb", {0, 1, 2}, 2, (4, 5)),
    "what no group holds takes from as few as possible": ("aaaabbbb", set(), 5, (0, 1, 2, 3, 4)),
    "the largest groups first": ("aabbbbcc", {0}, 5, (2, 3, 4, 5, 6)),
    "interleaved groups are still groups": ("abababab", set(), 4, (0, 2, 4, 6)),
    "one GPU comes from the smallest remainder": ("aaaabbbb", {0, 1, 2}, 1, (3,)),
    "all of them": ("aaaabbbb", set(), 8, (0, 1, 2, 3, 4, 5, 6, 7)),
    "none": ("aaaabbbb", set(), 0, ()),
}


def choose(view: NodeView, count: int, taken: set[int] | frozenset[int] = frozenset()) -> tuple[int, ...]:
    """The GPUs that a job of so many gets on an otherwise free node."""
    (one,) = World(nodes=(view,)).nodes.values()
    free = one.usable & ~sum(1 << index for index in taken)
    return one.indices(one.choose(free, count))


def find(world: World, one: WaitingJob) -> PlacedGang | None:
    """Where a job would start now."""
    return find_gang(world.index_for(one.shape), one)


@pytest.mark.parametrize("sentence", CHOICES)
def test_choose_gpus(sentence: str) -> None:
    groups, taken, count, expected = CHOICES[sentence]
    assert choose(node(1, 8, groups=list(groups)), count, taken) == expected


def test_gpus_without_a_link_group_are_grouped_by_numa_node() -> None:
    view = node(1, 4)
    apart = tuple(replace(one, numa_node=one.index % 2) for one in view.gpus)
    assert choose(view, 2) == (0, 1)
    assert choose(replace(view, gpus=apart), 2) == (0, 2)


def test_a_node_whose_gpus_are_not_numbered_from_0_is_told_by_their_indices() -> None:
    view = node(1, 4)
    gapped = replace(view, gpus=tuple(replace(one, index=one.index * 2 + 1) for one in view.gpus))
    assert choose(gapped, 2, {0}) == (3, 5)


def test_a_gang_is_placed_whole_or_takes_nothing() -> None:
    world = World(nodes=(node(1, 2), node(2, 1)))
    before = world.facts()

    assert find(world, job(1, 2, 2)) is None
    assert world.facts() == before


def test_what_is_placed_is_gone_for_the_next() -> None:
    world = World(nodes=(node(1, 2),))
    for number in (1, 2):
        one = job(number, cpus=2.0)
        world.add_waiting(one)
        found = find(world, one)
        assert found is not None
        assert [share.gpu_indices for share in found.shares] == [(number - 1,)]
        world.start(number, found, 0.0)

    assert world.nodes[1].cpus == 16.0 - 4.0
    assert find(world, job(3)) is None


def test_the_node_ranks_of_a_gang_follow_the_names_of_its_nodes() -> None:
    found = find(World(nodes=(node(3, 1), node(1, 4), node(2, 2))), job(1, 3, 1))
    assert found is not None
    assert [share.node_id for share in found.shares] == [1, 2, 3]


def test_the_first_layout_that_fits_is_taken_and_told() -> None:
    found = find(World(nodes=(node(1, 3), node(2, 2))), job(1, layouts=[(1, 4), (2, 2), (1, 3)]))
    assert found is not None
    assert (found.layout.num_nodes, found.layout.gpus_per_node) == (2, 2)
    assert [share.gpu_indices for share in found.shares] == [(0, 1), (0, 1)]


SWITCHES: dict[str, tuple[str, int, list[int]]] = {
    "a gang lies behind one switch": ("abab", 2, [1, 3]),
    "behind the one that has the fewest nodes to spare": ("aaabb", 2, [4, 5]),
    "one node is behind one switch anyway": ("ab", 1, [1]),
    "where no switch has enough, behind as few as possible": ("abbc", 3, [1, 2, 3]),
    "nodes whose switch nobody knows come last": (" aa ", 2, [2, 3]),
    "and are better than none": (" a ", 3, [1, 2, 3]),
}


@pytest.mark.parametrize("sentence", SWITCHES)
def test_switches(sentence: str) -> None:
    """A letter for the switch of each node, in the order of their numbers; which nodes a gang of so many gets."""
    switches, count, expected = SWITCHES[sentence]
    nodes = [
        node(number, 1, labels={} if switch == " " else {"switch": switch}) for number, switch in enumerate(switches, 1)
    ]
    found = find(World(nodes=nodes), job(1, count, 1))
    assert found is not None
    assert [share.node_id for share in found.shares] == expected


def test_a_smaller_last_share_comes_after_the_whole_ones() -> None:
    """12 GPUs on nodes of 8, as recorded jobs have them."""
    found = find(World(nodes=(node(1, 4), node(2, 8, cpus=64))), job(1, 1, 8, rest=4))
    assert found is not None
    assert found.shares == gang("2:0,1,2,3,4,5,6,7 1:0,1,2,3").shares


def test_of_equal_nodes_the_one_is_used_up_first_that_was_left_alone_longest() -> None:
    world = World(nodes=(node(1, 2), node(2, 2)))
    for number, at in ((1, 1.0), (2, 2.0)):
        world.add_waiting(job(number, 1, 2))
        world.start(number, gang(f"{number}:0,1"), at)
    world.ended(1)
    world.ended(2)
    found = find(world, job(3))
    assert found is not None
    assert found.shares == gang("1:0").shares
