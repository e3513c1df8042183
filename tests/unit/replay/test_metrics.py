"""The figures of a replay, each against a case that can be worked out by hand."""

from __future__ import annotations

import pytest

from service.replay.metrics import HOUR, figures_of, jain_index, percentile
from service.replay.run_record import RunRecord, Surroundings
from service.replay.traces import Trace
from tests.unit.replay.small_traces import Fifo, run, trace

H = int(HOUR)


def test_completion_and_waiting_times() -> None:
    figures = figures_of(run(trace((0, 2 * H, 8), (H, 3 * H, 8))))
    assert (figures.mean_jct_hours, figures.median_jct_hours) == (3.0, 3.0)
    assert (figures.mean_wait_hours, figures.max_wait_hours) == (0.5, 1.0)
    assert figures.span_days == pytest.approx(5 / 24)


def test_a_restore_counts_as_waiting() -> None:
    assert figures_of(run(trace((0, H, 8)), Fifo(stops={600: [0]}))).mean_wait_hours == pytest.approx(60 / 3600)


def test_the_slowdown_of_a_short_job_is_bounded() -> None:
    figures = figures_of(run(trace((0, 600, 8), (0, 10, 8))))
    assert figures.mean_slowdown == pytest.approx((1.0 + 610 / 600) / 2)


def test_utilisation_and_idle_are_of_the_window_between_first_and_last_submission() -> None:
    figures = figures_of(run(trace((0, 100, 4), (10, 50, 8), (60, 1, 8))))
    assert figures.utilisation_percent == pytest.approx(50.0)
    assert figures.idle_percent == pytest.approx(50.0)


def test_preemptions_are_counted_per_job_and_at_most() -> None:
    figures = figures_of(run(trace((0, 1000, 4), (0, 1000, 4)), Fifo(stops={100: [0], 300: [0, 1]})))
    assert (figures.preemptions_per_job, figures.max_preemptions) == (1.5, 2)


def test_big_jobs_are_judged_by_their_first_start() -> None:
    figures = figures_of(run(trace((0, 2 * H, 8), (0, 30 * H, 8), (0, H, 8), (0, H, 4))))
    assert figures.big_after_1h_percent == pytest.approx(100 * 2 / 3)
    assert figures.big_after_24h_percent == pytest.approx(100 * 1 / 3)


@pytest.mark.parametrize(("duration", "starved"), [(7 * H, 50.0), (9 * H, 0.0)])
def test_a_job_starves_that_waits_over_a_day_and_three_times_its_duration(duration: int, starved: float) -> None:
    assert figures_of(run(trace((0, 25 * H, 8), (0, duration, 8)))).starved_percent == starved


def test_teams_are_compared_by_their_mean_slowdown_small_ones_left_out() -> None:
    jobs = trace(*[(0, 600, 1)] * 51, teams=["a"] * 25 + ["b"] * 25 + ["c"])
    figures = figures_of(run(jobs, Fifo(1), nodes=1))
    slow = [(figures_of_team(jobs, team)) for team in ("a", "b")]
    assert figures.worst_team_slowdown == pytest.approx(max(slow))
    assert figures.jain == pytest.approx(jain_index(slow))


def figures_of_team(jobs: Trace, team: str) -> float:
    """Mean slowdown of a team where eight jobs of 600 s at a time go in the order of the file."""
    own = [place // 8 + 1 for place, job in enumerate(jobs.jobs) if job.team == team]
    return sum(own) / len(own)


def test_a_single_team_is_not_compared() -> None:
    assert figures_of(run(trace((0, 10, 1)))).jain is None


def test_jains_index() -> None:
    assert jain_index([3.0, 3.0, 3.0]) == pytest.approx(1.0)
    assert jain_index([1.0, 0.0, 0.0]) == pytest.approx(1 / 3)


def test_percentiles_lie_between_neighbours() -> None:
    assert [percentile([0.0, 10.0, 20.0], percent) for percent in (0, 25, 50, 95, 100)] == [0, 5, 10, 19, 20]


def test_an_unfinished_run_has_no_figures() -> None:
    with pytest.raises(ValueError, match="has not ended"):
        figures_of(RunRecord.of(trace((0, 10, 1)), Surroundings(nodes=1)))
