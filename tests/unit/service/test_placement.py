"""Which GPUs of a node a job gets: close together, and the leftovers of groups first."""

from __future__ import annotations

import pytest

from service.scheduler.placement import FreeNode, choose_gpus, place_gang
from tests.unit.service.worlds import gpu, job, node

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


@pytest.mark.parametrize("sentence", CHOICES)
def test_choose_gpus(sentence: str) -> None:
    groups, taken, count, expected = CHOICES[sentence]
    free = [gpu(index, group=group) for index, group in enumerate(groups) if index not in taken]
    assert choose_gpus(free, count) == expected
    assert choose_gpus(free[::-1], count) == expected, "the order in which they are listed changes nothing"


def test_gpus_without_a_link_group_are_grouped_by_numa_node() -> None:
    free = [gpu(index) for index in range(4)]
    assert choose_gpus(free, 2) == (0, 1)


def test_a_gang_is_placed_whole_or_takes_nothing() -> None:
    free = [FreeNode.of(node(1, 2)), FreeNode.of(node(2, 1))]
    before = [(list(one.gpus), one.cpus, one.memory_bytes) for one in free]

    assert place_gang(free, job(1, 2, 2)) is None
    assert [(list(one.gpus), one.cpus, one.memory_bytes) for one in free] == before


def test_what_is_placed_is_gone_for_the_next() -> None:
    free = [FreeNode.of(node(1, 2))]
    first = place_gang(free, job(1, cpus=2.0))
    second = place_gang(free, job(2, cpus=2.0))

    assert first is not None
    assert second is not None
    assert [share.gpu_indices for share in (*first.shares, *second.shares)] == [(0,), (1,)]
    assert free[0].cpus == 16.0 - 4.0
    assert place_gang(free, job(3)) is None


def test_the_node_ranks_of_a_gang_follow_the_names_of_its_nodes() -> None:
    free = [FreeNode.of(node(3, 1)), FreeNode.of(node(1, 4)), FreeNode.of(node(2, 2))]
    gang = place_gang(free, job(1, 3, 1))
    assert gang is not None
    assert [share.node_id for share in gang.shares] == [1, 2, 3]


def test_the_first_layout_that_fits_is_taken_and_told() -> None:
    free = [FreeNode.of(node(1, 3)), FreeNode.of(node(2, 2))]
    gang = place_gang(free, job(1, layouts=[(1, 4), (2, 2), (1, 3)]))
    assert gang is not None
    assert (gang.layout.num_nodes, gang.layout.gpus_per_node) == (2, 2)
    assert [share.gpu_indices for share in gang.shares] == [(0, 1), (0, 1)]
    assert [one.cpus for one in free] == [14.0, 14.0], "the CPUs are those of the layout that was taken"
