"""Curves in bounded space: every bucket of the pyramid is what a walk over all its points would give."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.domain.metric_pyramid import (
    KEPT_BUCKETS,
    LEVEL_FACTOR,
    MAX_POINTS,
    NUM_LEVELS,
    Bucket,
    buckets_of,
    level_for,
    merge,
    width,
)

Point = tuple[int, str, float | str]
points = st.lists(
    st.tuples(
        st.integers(0, 2_000),
        st.sampled_from(["loss", "lr"]),
        st.floats(allow_nan=False, allow_infinity=False) | st.sampled_from(["NaN", "Infinity", "-Infinity"]),
    ),
    max_size=60,
)


def brute_force(all_points: Sequence[Point], key: str, level: int, bucket: int) -> Bucket:
    """The bucket from all of its points, in the order in which they came."""
    inside = [(step, value) for step, name, value in all_points if name == key and step // width(level) == bucket]
    finite = [value for _, value in inside if isinstance(value, float)]
    step, last = inside[-1]
    return Bucket(
        key=key,
        level=level,
        bucket=bucket,
        step=step,
        minimum=min(finite, default=None),
        maximum=max(finite, default=None),
        last=last if isinstance(last, float) else None,
        last_text=last if isinstance(last, str) else None,
        count=len(inside),
    )


@given(points)
def test_each_bucket_has_the_minimum_maximum_last_and_count_of_its_points(all_points: list[Point]) -> None:
    found = buckets_of(all_points)

    assert found == [brute_force(all_points, one.key, one.level, one.bucket) for one in found]
    assert sum(one.count for one in found) == len(all_points) * NUM_LEVELS
    assert len({(one.key, one.level, one.bucket) for one in found}) == len(found)


@given(points, st.integers(0, 60))
@settings(max_examples=50)
def test_two_deliveries_merged_are_one_delivery(all_points: list[Point], cut: int) -> None:
    merged = {(one.key, one.level, one.bucket): one for one in buckets_of(all_points[:cut])}
    for one in buckets_of(all_points[cut:]):
        place = (one.key, one.level, one.bucket)
        merged[place] = merge(merged[place], one) if place in merged else one
    assert merged == {(one.key, one.level, one.bucket): one for one in buckets_of(all_points)}


@pytest.mark.parametrize("num_points", [1, 7, 100, MAX_POINTS, 10 * MAX_POINTS])
def test_a_level_draws_any_range_in_at_most_the_points_asked_for(num_points: int) -> None:
    generator = random.Random(7)
    for _ in range(300):
        first = generator.randrange(10**6)
        last = first + generator.randrange(10 ** generator.randrange(1, 8))
        level = level_for(first, last, num_points)
        drawn = last // width(level) - first // width(level) + 1
        assert drawn <= min(num_points, MAX_POINTS) or level == NUM_LEVELS - 1
        if level:
            finer = last // width(level - 1) - first // width(level - 1) + 1
            assert finer > min(num_points, MAX_POINTS), "a finer level would have done"


def test_each_level_is_wider_by_the_same_factor() -> None:
    assert [width(level) for level in range(NUM_LEVELS)] == [LEVEL_FACTOR**level for level in range(NUM_LEVELS)]


def test_what_is_kept_of_a_level_is_enough_to_draw_it() -> None:
    assert KEPT_BUCKETS >= MAX_POINTS
