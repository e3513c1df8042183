"""When jobs start, foretold: the policy run forward on a small copy, and what past forecasts teach."""

from __future__ import annotations

import pytest

from service.domain.reasons import Reason, ReasonCode
from service.scheduler.calibration import PRIOR, SOON_SECONDS, Calibration
from service.scheduler.facts import RunningJob, WaitingJob
from service.scheduler.forecast import LEAST_REACH, NEAR_SECONDS, USUAL_REACH, forecast, mended
from service.scheduler.look_ahead import MOST_PASSES, look_ahead
from service.scheduler.scheduling_pass import PolicyOptions
from service.scheduler.small_copy import MOST_NODES, small_copy
from service.scheduler.world import World
from tests.unit.service.worlds import DAY, HOUR, MINUTE, ended, job, node, running, team

NOW = 100_000.0
NEVER_STOP = PolicyOptions(preemption="none")
HELD = Reason(code=ReasonCode.HELD, text="It is held by ann.")


def waits(number: int, nodes: int = 1, gpus: int = 1, *, left: float = HOUR, **more: object) -> WaitingJob:
    return job(number, nodes, gpus, submitted_at=NOW, left=left, **more)


def runs(number: int, where: str, left: float, **more: object) -> RunningJob:
    return running(number, where, left_at=(left, NOW), since=NOW - DAY, **more)


def seconds_until(world: World, number: int, options: PolicyOptions = NEVER_STOP) -> float | None:
    """What running the policy forward gives."""
    found = look_ahead(world, world.queue.entries[number].job, NOW, "time-left", options)
    return None if found is None else found.seconds


def test_a_job_that_fits_starts_at_once() -> None:
    world = World([node(1, 4, cpus=64.0)], [waits(1)], now=NOW)

    made = forecast(world, 1, NOW, Calibration())

    assert (made.low, made.p50, made.p90, made.why_unknown) == (0.0, 0.0, 0.0, None)


def test_a_job_starts_when_the_one_that_holds_its_gpus_has_ended() -> None:
    world = World([node(1, 4, cpus=64.0)], [waits(1, gpus=4)], [runs(9, "1:0,1,2,3", 5 * HOUR)], now=NOW)

    assert seconds_until(world, 1) == pytest.approx(5 * HOUR, rel=0.01)


def test_jobs_ahead_of_it_take_their_turn_first() -> None:
    queue = [waits(1, gpus=4, left=3 * HOUR), waits(2, gpus=4, left=HOUR), waits(3, gpus=4, left=2 * HOUR)]
    world = World([node(1, 4, cpus=64.0)], queue, [runs(9, "1:0,1,2,3", HOUR)], now=NOW)

    assert seconds_until(world, 2) == pytest.approx(HOUR, rel=0.05)
    assert seconds_until(world, 3) == pytest.approx(2 * HOUR, rel=0.1)
    assert seconds_until(world, 1) == pytest.approx(4 * HOUR, rel=0.1)


def test_a_short_job_is_expected_to_stop_a_long_one_once_that_is_no_longer_protected() -> None:
    held = [running(9, "1:0,1,2,3", since=NOW - MINUTE, left_at=(5 * DAY, NOW))]
    world = World([node(1, 4, cpus=64.0)], [waits(1, gpus=4, left=HOUR)], held, now=NOW)

    assert seconds_until(world, 1, PolicyOptions()) == pytest.approx(9 * MINUTE, rel=0.1)
    assert seconds_until(world, 1) == pytest.approx(5 * DAY, rel=0.01)


def test_a_job_that_never_fits_has_no_start_and_says_why() -> None:
    world = World([node(1, 4)], [waits(1, gpus=8)], now=NOW)

    made = forecast(world, 1, NOW, Calibration())

    assert (made.p50, made.why_unknown) == (None, "As the pool is now it never starts, whatever ends.")


def test_a_held_job_has_no_start_and_says_what_holds_it() -> None:
    made = forecast(World([node(1, 4)], [waits(1, held=HELD)], now=NOW), 1, NOW, Calibration())

    assert not made.is_known
    assert made.why_unknown is not None
    assert made.why_unknown.startswith("It is held by ann.")


def test_a_job_that_must_not_start_before_a_date_starts_then_or_later() -> None:
    until = Reason(code=ReasonCode.NOT_YET, text="It must not start before 12:00.")
    busy = [runs(9, "1:0,1,2,3", HOUR)]
    world = World([node(1, 4, cpus=64.0)], [waits(1, held=until, not_before=NOW + 5 * HOUR)], busy, now=NOW)
    idle = World([node(1, 4, cpus=64.0)], [waits(1, held=until, not_before=NOW + 5 * HOUR)], now=NOW)

    made = forecast(world, 1, NOW, Calibration())

    assert forecast(idle, 1, NOW, Calibration()).p50 == 5 * HOUR
    assert made.low is not None
    assert made.low >= 5 * HOUR


def test_a_node_that_is_cordoned_for_a_time_counts_from_its_end() -> None:
    away = node(1, 4, cpus=64.0, blocked="cordoned until 12:00 (new fan)", blocked_until=NOW + 2 * HOUR)
    world = World([away, node(2, 1, cpus=64.0)], [waits(1, gpus=4)], now=NOW)

    assert seconds_until(world, 1) == pytest.approx(2 * HOUR, rel=0.01)
    assert world.nodes[1].view.blocked_by is not None, "of the copy alone"


def test_a_pause_after_a_failed_start_is_added() -> None:
    world = World([node(1, 4, cpus=64.0)], [waits(1, not_before=NOW + 90.0)], now=NOW)

    assert forecast(world, 1, NOW, Calibration()).p50 == 90.0


def test_a_forecast_leaves_the_world_as_it_was() -> None:
    world = World([node(1, 4, cpus=64.0)], [waits(1, gpus=4), waits(2, gpus=2)], [runs(9, "1:0,1,2,3", HOUR)], now=NOW)
    before, version = world.facts(), world.version

    forecast(world, 1, NOW, Calibration())
    forecast(world, waits(77, gpus=2), NOW, Calibration())

    assert world.facts() == before
    assert version <= world.version


def test_a_large_pool_is_looked_at_in_part_and_behaves_like_the_whole() -> None:
    count = MOST_NODES + 20
    nodes = [node(number, 4, cpus=64.0) for number in range(1, count + 1)]
    # One node of three is free after an hour, and each has a job ahead; the others are held for days.
    held = [runs(number, f"{number}:0,1,2,3", HOUR if number % 3 == 1 else 30 * DAY) for number in range(1, count + 1)]
    ahead = [waits(1000 + number, gpus=4, left=HOUR, preemptible=False) for number in range(count // 3)]
    world = World(nodes, [*ahead, waits(5000, gpus=4, left=2 * HOUR)], held, now=NOW)

    copy = small_copy(world, world.queue.entries[5000].job, NOW)

    assert not copy.is_whole
    assert len(copy.world.nodes) <= MOST_NODES
    assert len(copy.world.queue.entries) < len(world.queue.entries)
    assert HOUR <= (seconds_until(world, 5000) or 0.0) <= 6 * HOUR


def test_jobs_have_the_same_time_left_in_the_copy_as_in_the_world() -> None:
    queue = [job(number, limit=number * HOUR, reports=number % 2 == 0) for number in range(1, 9)]
    world = World([node(1, 4)], queue, ratios=ended(0.01 * number for number in range(100)), now=NOW)

    copy = small_copy(world, queue[3], NOW).world

    lefts = {entry.id: entry.left for entry in world.queue.entries.values()}
    assert {entry.id: entry.left for entry in copy.queue.entries.values()} == lefts


def test_a_gang_shrinks_with_the_pool_and_quotas_do_too() -> None:
    count = MOST_NODES + 1
    nodes = [node(number, 4, cpus=64.0) for number in range(1, count + 1)]
    world = World(nodes, [waits(1, count, 4)], teams=[team(0, quota_gpus=4 * count)], now=NOW)

    copy = small_copy(world, world.queue.entries[1].job, NOW)

    own = copy.world.queue.entries[1].job.least
    assert own.num_nodes <= len(copy.world.nodes)
    assert (copy.world.teams[0].quota_gpus or 0) <= 4 * len(copy.world.nodes) + 4


def test_the_steps_are_bounded_however_long_the_queue() -> None:
    queue = [waits(number, gpus=4, left=HOUR + number) for number in range(1, 1200)]
    world = World([node(1, 4, cpus=64.0)], queue, [runs(9999, "1:0,1,2,3", HOUR)], now=NOW)

    found = look_ahead(world, queue[-1], NOW, "time-left", NEVER_STOP)

    assert found is not None
    assert found.num_passes <= MOST_PASSES
    assert found.seconds > 200 * HOUR


# --- Experience ----------------------------------------------------------------------------------------------------


def test_what_took_twice_as_long_is_expected_to_do_so_again() -> None:
    calibration = Calibration()
    for number in range(100):
        calibration.foretold(number, 0, 2 * HOUR, number * DAY)
        calibration.started(number, number * DAY + 4 * HOUR)

    made = mended(2 * HOUR, 0, calibration, 200 * DAY)

    assert made.p50 is not None
    assert 3.2 * HOUR < made.p50 <= 4 * HOUR
    assert made.model_seconds == 2 * HOUR


def test_a_handful_of_jobs_of_one_crowd_moves_the_middle_little() -> None:
    calibration = Calibration()
    for number in range(5):
        calibration.foretold(number, 0, 10 * HOUR, 0.0)
        calibration.started(number, HOUR)

    made = mended(10 * HOUR, 0, calibration, DAY)

    assert made.p50 is not None
    assert made.p50 > 5 * HOUR


def test_a_range_holds_what_it_shows_and_never_turns_round() -> None:
    for seconds in (1.0, 59.0, SOON_SECONDS, 2 * HOUR, 10 * DAY):
        made = mended(seconds, 1, Calibration(), NOW)
        assert made.low is not None and made.p50 is not None and made.p90 is not None
        assert 0.0 <= made.low <= made.p50 <= made.p90


def test_those_that_still_wait_count_as_at_least_so_long() -> None:
    """A queue that grows: whoever got through did so fast, most have been waiting for a day."""
    calibration = Calibration()
    for number in range(20):
        calibration.foretold(number, 0, HOUR, 0.0)
    for number in range(4):
        calibration.started(number, 0.9 * HOUR)

    early = calibration.factors(0, HOUR, (0.5,), 0.9 * HOUR)[0]
    late = calibration.factors(0, HOUR, (0.5,), DAY)[0]

    assert late > early
    assert late >= max(PRIOR[False])


def test_a_job_that_was_cancelled_teaches_nothing() -> None:
    calibration = Calibration()
    calibration.foretold(1, 0, HOUR, 0.0)
    calibration.gone(1)
    calibration.started(1, 9 * DAY)

    assert calibration.factors(0, HOUR, (0.5,), 10 * DAY) == Calibration().factors(0, HOUR, (0.5,), 0.0)


def test_those_who_start_within_minutes_do_not_shorten_the_middle_of_the_others() -> None:
    calibration = Calibration()
    for number in range(60):
        calibration.foretold(number, 0, 3 * HOUR, number * DAY)
        calibration.started(number, number * DAY + (2 * MINUTE if number % 2 else 3 * HOUR))

    made = mended(3 * HOUR, 0, calibration, 100 * DAY)

    assert made.p50 == pytest.approx(3 * HOUR)
    assert made.low is not None
    assert made.low <= 2 * MINUTE


def test_many_waits_alike_do_not_make_the_range_narrow() -> None:
    """The last crowd was like that; the next one need not be."""
    calibration = Calibration()
    for number in range(200):
        calibration.foretold(number, 0, 2 * HOUR, number * DAY)
        calibration.started(number, number * DAY + 2 * HOUR)

    made = mended(2 * HOUR, 0, calibration, 300 * DAY)

    assert made.p50 == pytest.approx(2 * HOUR)
    assert made.p90 == pytest.approx(LEAST_REACH * 2 * HOUR)


def test_one_job_that_waited_very_long_does_not_make_the_range_boundless() -> None:
    calibration = Calibration()
    calibration.foretold(1, 0, 2 * HOUR, 0.0)
    calibration.started(1, 200 * HOUR)

    made = mended(2 * HOUR, 0, calibration, 20 * DAY)

    assert made.p90 is not None
    assert made.p90 <= 1.2 * USUAL_REACH * 2 * HOUR


def test_how_late_a_job_comes_that_should_have_started_soon_does_not_depend_on_how_soon() -> None:
    """One foretold as 60 s and one as 9 minutes wait for the same thing that nobody foresaw."""
    calibration = Calibration()
    for number in range(200):
        calibration.foretold(number, 0, 60.0, number * DAY)
        calibration.started(number, number * DAY + (HOUR if number % 10 == 0 else 60.0))

    nearly_at_once, in_minutes = (mended(seconds, 0, calibration, 300 * DAY) for seconds in (60.0, 540.0))

    assert nearly_at_once.p90 is not None and in_minutes.p90 is not None
    assert nearly_at_once.p90 < 2 * HOUR, "not 60 times as long as foretold, of everything"
    assert in_minutes.p90 < 4 * HOUR


def test_what_is_foretold_as_minutes_is_said_as_ten_and_what_is_foretold_as_moments_as_moments() -> None:
    for seconds, least in ((30.0, 0.0), (NEAR_SECONDS + 1.0, SOON_SECONDS), (SOON_SECONDS - 1.0, SOON_SECONDS)):
        made = mended(seconds, 0, Calibration(), NOW)
        assert made.p50 == pytest.approx(max(least, 60.0), rel=0.2)
