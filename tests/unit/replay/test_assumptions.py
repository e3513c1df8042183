"""What a replay assumes where a trace is silent: limits, who reports and may be preempted, how large the pool is."""

from __future__ import annotations

import dataclasses

import pytest

from service.replay.gangs import layout_of
from service.replay.limits import DAY, HOUR, MENU, human_limit, is_preemptible, limit_of, report_factor, will_report
from service.replay.pool_size import PoolShape, default_nodes, least_nodes, offered_load
from service.replay.traces import Trace, TraceJob
from tests.unit.replay.small_traces import trace

ROWS = range(2_000)


def job(row: int, duration: int = 3 * HOUR, limit: int | None = None) -> TraceJob:
    return TraceJob(row, str(row), 0, duration, 1, "", limit)


def test_a_human_limit_is_one_to_ten_times_the_truth_rounded_up_to_the_menu() -> None:
    limits = [human_limit(1, job(row)) for row in ROWS]
    assert set(limits) == {4 * HOUR, 12 * HOUR, DAY, 2 * DAY}, "three hours times 1 to 10"
    share = sum(limit == 4 * HOUR for limit in limits) / len(limits)
    assert share == pytest.approx(0.125, abs=0.02), "a wish of 3 to 4 h: log10(4/3) of the draws"


def test_a_human_limit_is_never_below_the_truth_nor_above_the_menu() -> None:
    assert all(human_limit(1, job(row, 50 * DAY)) == 60 * DAY for row in range(50))
    assert human_limit(1, job(0, 70 * DAY)) == 70 * DAY
    assert all(human_limit(1, job(row, 1)) == MENU[0] for row in range(50))


def test_the_generator_is_the_published_one() -> None:
    """`random.Random(f"{seed}:{row}")`: figures of other implementations can be compared with."""
    assert [human_limit(seed, job(row)) // HOUR for seed, row in ((1, 0), (1, 1), (2, 0), (2, 1))] == [24, 24, 12, 24]


def test_the_kinds_of_limits() -> None:
    assert [limit_of(kind, 1, job(7, 100)) for kind in ("true", "x5")] == [100, 500]
    assert limit_of("recorded", 1, job(7, 100, limit=250)) == 250
    assert limit_of("recorded", 1, job(7, 100, limit=50)) == 100, "a job that overran its limit ran all the same"
    assert limit_of("recorded", 1, job(7, 100)) is None, "what had no limit is not given one"


def test_a_larger_share_contains_the_smaller_one() -> None:
    few = {row for row in ROWS if is_preemptible(0.3, 1, job(row))}
    many = {row for row in ROWS if is_preemptible(0.6, 1, job(row))}
    assert few < many
    assert len(few) / len(ROWS) == pytest.approx(0.3, abs=0.03)
    assert all(is_preemptible(1.0, 1, job(row)) and not is_preemptible(0.0, 1, job(row)) for row in range(50))


@pytest.mark.parametrize("has_it", [True, False])
def test_as_recorded_is_what_the_source_tells_of_each_job_and_never_a_guess(has_it: bool) -> None:
    told = dataclasses.replace(job(1), is_preemptible=has_it, reports=not has_it)
    assert (is_preemptible(None, 1, told), will_report(None, 1, told)) == (has_it, not has_it)
    with pytest.raises(ValueError, match="does not tell it"):
        is_preemptible(None, 1, job(1))


def test_each_kind_of_draw_is_from_its_own_generator() -> None:
    preemptible = [is_preemptible(0.5, 1, job(row)) for row in ROWS]
    reporting = [will_report(0.5, 1, job(row)) for row in ROWS]
    alike = sum(one == other for one, other in zip(preemptible, reporting, strict=True)) / len(ROWS)
    assert alike == pytest.approx(0.5, abs=0.04)


def test_a_report_is_off_by_a_factor_drawn_for_each_run() -> None:
    factors = [report_factor(0.2, 1, row, run) for row in range(500) for run in range(2)]
    assert 0.8 <= min(factors) < 0.82 and 1.18 < max(factors) <= 1.2
    assert len(set(factors)) == len(factors)
    assert report_factor(0.2, 1, 3, 0) == report_factor(0.2, 1, 3, 0)
    assert report_factor(0.0, 1, 3, 0) == 1.0


def test_a_gang_takes_whole_nodes_and_what_is_left_over_on_another() -> None:
    layouts = [layout_of(gpus, 8) for gpus in (1, 8, 12, 64)]
    assert [(one.num_nodes, one.gpus_per_node, one.rest_gpus) for one in layouts] == [
        (1, 1, 0),
        (1, 8, 0),
        (1, 8, 4),
        (8, 8, 0),
    ]
    assert [one.num_gpus for one in layouts] == [1, 8, 12, 64]


def test_the_offered_load_counts_demand_inside_the_window_alone() -> None:
    jobs = trace((0, 50, 8), (50, 10_000, 4), (100, 10_000, 64))
    assert offered_load(jobs, 1, 8) == pytest.approx((8 * 50 + 4 * 50) / (100 * 8))


def test_a_pool_is_sized_by_name_else_by_load_and_never_below_the_largest_job() -> None:
    jobs = trace((0, 100, 8), (0, 100, 8), (100, 10, 1))
    assert default_nodes(jobs, 8) == 3, "two nodes would be offered 100 %"
    assert default_nodes(trace((0, 1, 64), (100, 10, 1)), 8) == least_nodes(trace((0, 1, 64)), 8) == 8
    assert default_nodes(trace((5, 10, 1)), 8) == 1, "one job has no window"
    known = Trace("itp06.csv.gz", jobs.jobs)
    assert (default_nodes(known, 8), default_nodes(known, 4)) == (12, 5)


def test_a_pool_of_nodes_that_differ_is_as_many_gpus_on_nodes_of_the_most_common_size() -> None:
    mixed = PoolShape(((8, 3), (4, 5)))
    assert (mixed.gpus_per_node, mixed.nodes_of(4), mixed.nodes_of(8), mixed.is_even) == (4, 11, 6, False)
    assert mixed.text == "3 x 8 + 5 x 4 GPUs"
    assert PoolShape(((8, 2), (4, 2))).gpus_per_node == 8, "of as many, the larger"
