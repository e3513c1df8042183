"""What would become of a job that is not there yet: now or when, at whose expense, and what would be sooner."""

from __future__ import annotations

from service.scheduler.calibration import Calibration
from service.scheduler.facts import WaitingJob
from service.scheduler.scheduling_pass import PolicyOptions
from service.scheduler.what_if import Outlook, Variant, variants, what_if
from service.scheduler.world import World
from tests.unit.service.worlds import DAY, HOUR, MINUTE, job, node, running

NOW = 100_000.0
LONG_AGO = NOW - DAY


def new(gpus: int, *, nodes: int = 1, **more: object) -> WaitingJob:
    """A job that would be submitted now."""
    return job(10**9, nodes, gpus, submitted_at=NOW, **{"limit": HOUR, **more})


def ask(world: World, one: WaitingJob, preemption: str = "all") -> Outlook:
    return what_if(world, one, NOW, "time-left", PolicyOptions(preemption=preemption), Calibration())


def sooner(world: World, one: WaitingJob) -> dict[str, Variant]:
    """The variants by `kind value`."""
    options = PolicyOptions(preemption="none")
    base = what_if(world, one, NOW, "time-left", options, Calibration())
    found = variants(world, one, base, NOW, "time-left", options, Calibration())
    return {f"{variant.kind} {variant.value}": variant for variant in found}


def test_a_job_that_fits_would_start_now_and_stop_nobody() -> None:
    found = ask(World([node(1, 4, cpus=64.0)], now=NOW), new(2))

    assert (found.starts_in, found.stops, found.reason) == (0.0, (), None)


def test_a_short_job_would_stop_a_long_one_after_its_minutes_of_patience() -> None:
    held = [running(9, "1:0,1,2,3", since=LONG_AGO, left_at=(20 * DAY, NOW))]
    found = ask(World([node(1, 4, cpus=64.0)], running=held, now=NOW), new(4))

    assert (found.starts_in, found.stops) == (5 * MINUTE, (9,))
    assert found.reason is not None


def test_a_job_for_which_nobody_is_stopped_gets_a_forecast_and_a_reason() -> None:
    held = [running(9, "1:0,1,2,3", since=LONG_AGO, left_at=(2 * HOUR, NOW))]
    found = ask(World([node(1, 4, cpus=64.0)], running=held, now=NOW), new(4))

    assert (found.starts_in, found.stops) == (None, ())
    assert found.reason is not None
    assert (found.forecast.model_seconds or 0.0) > HOUR


def test_fewer_gpus_are_offered_where_they_start_sooner() -> None:
    held = [running(9, "1:0,1", since=LONG_AGO, left_at=(9 * HOUR, NOW))]
    found = sooner(World([node(1, 4, cpus=64.0)], running=held, now=NOW), new(4))

    assert found["gpus 2"].outlook.starts_in == 0.0


def test_another_type_of_gpu_is_offered_where_one_is_free() -> None:
    nodes = [node(1, 4, cpus=64.0, model="A100"), node(2, 4, cpus=64.0, model="H100")]
    held = [running(9, "1:0,1,2,3", since=LONG_AGO, left_at=(9 * HOUR, NOW))]
    found = sooner(World(nodes, running=held, now=NOW), new(4, gpu_type="A100"))

    assert found["gpu_type H100"].outlook.starts_in == 0.0


def test_a_shorter_limit_is_offered_where_it_takes_the_turn_of_others() -> None:
    held = [running(9, "1:0,1,2,3", since=LONG_AGO, left_at=(HOUR, NOW))]
    queue = [job(number, 1, 4, submitted_at=NOW - HOUR, limit=5 * HOUR) for number in range(1, 6)]
    found = sooner(World([node(1, 4, cpus=64.0)], queue, held, now=NOW), new(4, limit=8 * HOUR))

    assert set(found) & {f"limit {4 * HOUR:g}", f"limit {2 * HOUR:g}"}


def test_nothing_is_offered_to_a_job_that_would_start_now() -> None:
    assert sooner(World([node(1, 4, cpus=64.0)], now=NOW), new(4)) == {}


def test_a_look_leaves_the_world_as_it_was() -> None:
    held = [running(9, "1:0,1,2,3", since=LONG_AGO, left_at=(20 * DAY, NOW))]
    world = World([node(1, 4, cpus=64.0)], [job(1, 1, 4, submitted_at=NOW - HOUR)], held, now=NOW)
    before = world.facts()

    ask(world, new(4))
    sooner(world, new(4))

    assert world.facts() == before
