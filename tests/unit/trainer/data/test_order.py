"""The order of samples is a pure function of (seed, position), and every step is cut the same way by any layout."""

from __future__ import annotations

import time
from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trainer.data.order import SampleOrder, partition


def epoch_of(order: SampleOrder, epoch: int) -> list[int]:
    first = epoch * order.num_samples
    return [index for _, index in order.items(first, first + order.num_samples)]


@settings(deadline=None)
@given(num_samples=st.integers(1, 5000), seed=st.integers(0, 2**63), epoch=st.integers(0, 10**6))
def test_each_epoch_has_every_item_once(num_samples: int, seed: int, epoch: int) -> None:
    assert sorted(epoch_of(SampleOrder(num_samples, seed), epoch)) == list(range(num_samples))


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 9), st.integers(0, 1000), st.integers(0, 50), st.integers(0, 50))
def test_where_the_reading_begins_changes_nothing(num_samples: int, seed: int, first: int, one: int, two: int) -> None:
    whole = SampleOrder(num_samples, seed).items(first, first + one + two)

    assert SampleOrder(num_samples, seed).items(first, first + one) == whole[:one]
    assert SampleOrder(num_samples, seed).items(first + one, first + one + two) == whole[one:]


def test_every_epoch_and_every_seed_has_an_order_of_its_own() -> None:
    orders = [tuple(epoch_of(SampleOrder(100, seed), epoch)) for seed in range(5) for epoch in range(5)]

    assert len(set(orders)) == 25


def test_all_orders_of_few_items_come_up_about_equally_often() -> None:
    counts = Counter(tuple(epoch_of(SampleOrder(4, seed), 0)) for seed in range(4800))

    assert len(counts) == 24
    assert min(counts.values()) > 140, counts  # 200 expected
    assert max(counts.values()) < 260, counts


def test_neighbours_in_the_data_are_not_neighbours_in_the_order() -> None:
    orders = np.array([epoch_of(SampleOrder(1000, seed), 1) for seed in range(100)])

    num_adjacent = (np.abs(np.diff(orders, axis=1)) == 1).sum(axis=1).mean()
    assert 1.5 < num_adjacent < 2.5  # 2 in a random permutation
    assert 0.7 < (orders == np.arange(1000)).sum(axis=1).mean() < 1.3  # 1 stays in place


def test_an_order_stays_what_it_was() -> None:
    # Resuming relies on it: a checkpoint says how many samples were seen, and nothing of their order.
    indices = [index for _, index in SampleOrder(10, 0).items(0, 20)]

    assert indices == [1, 5, 9, 7, 3, 0, 8, 2, 4, 6, 1, 7, 9, 4, 6, 8, 3, 5, 0, 2]


def test_unshuffled_it_is_the_datas_own_order() -> None:
    assert SampleOrder(3, 0, shuffle=False).items(2, 7) == [(0, 2), (1, 0), (1, 1), (1, 2), (2, 0)]


def test_any_place_of_ten_billion_items_is_found_at_once() -> None:
    started = time.thread_time()
    found = SampleOrder(10**10, 1).items(7 * 10**10 + 123456789, 7 * 10**10 + 123456789 + 100)

    # It takes a millisecond of the processor; to shuffle them all takes minutes, and 80 GB.
    assert time.thread_time() - started < 5
    assert {epoch for epoch, _ in found} == {7}
    assert len({index for _, index in found}) == 100
    assert all(0 <= index < 10**10 for _, index in found)


def test_there_is_no_order_of_nothing() -> None:
    with pytest.raises(ValueError, match="0 samples"):
        SampleOrder(0, 1)


@settings(deadline=None)
@given(st.integers(0, 1000), st.integers(1, 50))
def test_parts_hold_everything_once_and_differ_by_one_at_most(count: int, parts: int) -> None:
    slices = partition(count, parts)

    sizes = [last - first for first, last in slices]
    assert len(slices) == parts
    assert [index for first, last in slices for index in range(first, last)] == list(range(count))
    assert max(sizes) - min(sizes) <= 1
