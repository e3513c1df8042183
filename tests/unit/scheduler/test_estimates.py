"""How much time a job has left: by its reports, before those by its limit and what became of the limits of others."""

from __future__ import annotations

import random
from dataclasses import replace
from typing import Any

import pytest

from service.scheduler.estimates import MAX_RATIOS, Ratios, RatioView, left_of_running, left_of_waiting, limit_end
from service.scheduler.facts import Measured
from tests.unit.service.worlds import DAY, HOUR, ended, job

TWENTY = Ratios(ended(number / 20 for number in range(20)))
"""0, 0.05, … 0.95: the quartile is 0.25, the median 0.5."""


def about(seconds: float) -> Any:
    """Ratios are read in steps of a percent, so that estimates stand still while single jobs end."""
    return pytest.approx(seconds, rel=0.011)


def all_views(ratios: Ratios) -> list[tuple[RatioView, RatioView, RatioView]]:
    return [ratios.views_of(user, team) for user in range(5) for team in range(3)]


def test_limits_are_believed_until_20_jobs_have_ended() -> None:
    ratios = Ratios(ended([0.1] * 19))
    assert left_of_waiting(job(1, limit=HOUR), ratios) == HOUR
    ratios.add(*ended([0.1]))
    assert left_of_waiting(job(1, limit=HOUR), ratios) == about(HOUR / 10)


def test_from_then_on_they_are_scaled_by_the_median_of_those_or_the_quartile_for_a_job_that_will_report() -> None:
    assert left_of_waiting(job(1, limit=HOUR), TWENTY) == about(HOUR * 0.5)
    assert left_of_waiting(job(1, limit=HOUR, reports=True), TWENTY) == about(HOUR * 0.25)


def test_what_it_has_run_counts_against_its_limit() -> None:
    assert left_of_waiting(job(1, limit=10 * HOUR, served=6 * HOUR), TWENTY) == about(2 * HOUR)
    assert left_of_running(job(1, limit=10 * HOUR, served=5 * HOUR), None, 0.0, TWENTY, HOUR) == about(2 * HOUR)


def test_a_report_is_believed_alone_and_stays_valid_while_the_job_waits() -> None:
    assert left_of_waiting(job(1, limit=9 * HOUR, left=500.0), TWENTY) == 500.0
    assert left_of_running(job(1, limit=9 * HOUR, left=500.0), None, 100.0, TWENTY, 200.0) == 400.0
    reported = Measured(left_seconds=1_000.0, at=50.0)
    assert left_of_running(job(1, limit=9 * HOUR, left=500.0), reported, 0.0, TWENTY, 250.0) == 800.0


def test_a_report_may_shrink_faster_or_slower_than_the_clock() -> None:
    reported = Measured(left_seconds=1_000.0, at=0.0, rate=0.8)
    assert left_of_running(job(1), reported, 0.0, TWENTY, 100.0) == 920.0


def test_nothing_is_run_while_the_last_checkpoint_is_restored() -> None:
    assert left_of_running(job(1, limit=HOUR), None, 60.0, Ratios(), 30.0) == HOUR


def test_no_job_has_less_than_a_minute_left() -> None:
    assert left_of_waiting(job(1, limit=10.0), TWENTY) == 60.0
    assert left_of_running(job(1), Measured(left_seconds=5.0, at=0.0), 0.0, TWENTY, 100.0) == 60.0


def test_a_job_without_limit_or_report_has_a_day_left_or_as_long_as_it_has_run() -> None:
    assert left_of_waiting(job(1), TWENTY) == DAY
    assert left_of_waiting(job(1, served=3 * DAY), TWENTY) == 3 * DAY
    assert left_of_running(job(1, served=DAY), None, 0.0, TWENTY, DAY) == 2 * DAY


def test_each_attempt_has_the_whole_hard_limit_and_nothing_scales_it() -> None:
    assert limit_end(job(1, limit=HOUR, served=600.0), 5_000.0) == 5_000.0 + HOUR
    assert limit_end(job(1), 5_000.0) == float("inf")


def test_ratios_added_one_by_one_are_those_given_at_once_and_can_be_taken_back() -> None:
    dice = random.Random(1)
    drawn = [one for number in range(400) for one in ended([dice.random()], user=number % 5, team=number % 3)]
    ratios = Ratios(drawn[:100])
    for one in drawn[100:]:
        ratios.add(one)
    assert all_views(ratios) == all_views(Ratios(drawn))
    for one in drawn[100:]:
        ratios.remove(one)
    assert all_views(ratios) == all_views(Ratios(drawn[:100]))
    assert len(set(all_views(ratios))) > 3


def test_the_users_own_past_goes_before_the_teams_and_that_before_the_pools() -> None:
    pool, team = ended([0.8] * 500, user=9, team=9), ended([0.4] * 20, user=2, team=1)
    ratios = Ratios([*pool, *team, *ended([0.1] * 19, user=1, team=1)])
    mine, mates, strangers = (job(1, limit=HOUR, user=user, team=team) for user, team in ((1, 1), (3, 1), (4, 4)))
    assert left_of_waiting(strangers, ratios) == about(HOUR * 0.8)
    assert left_of_waiting(mates, ratios) == about(HOUR * 0.4)
    assert left_of_waiting(mine, ratios) == about(HOUR * 0.4), "19 jobs say too little"

    ratios.add(*ended([0.1], user=1, team=1))
    assert left_of_waiting(mine, ratios) == about(HOUR * 0.1)
    assert left_of_waiting(replace(mine, team_id=9), ratios) == about(HOUR * 0.1), "in whatever team"


def test_ratios_do_not_grow_for_ever_and_keep_their_quantiles() -> None:
    ratios = Ratios(ended(number / MAX_RATIOS for number in range(MAX_RATIOS)))
    before = ratios.of(job(1))
    ratios.add(*ended([0.5]))
    assert len(ratios) <= MAX_RATIOS
    assert ratios.of(job(1)) == pytest.approx(before, abs=0.001)
