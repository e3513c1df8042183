"""Forecasts within a replay: made at submission, judged at the start, taught by the past alone."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest
from click.testing import CliRunner

from service.replay.command import replay
from service.replay.forecasts import ForecastingEngine, Judged, forecast_figures
from service.replay.limits import Assumptions
from service.replay.run_record import Surroundings
from service.replay.simulate import simulate
from service.replay.traces import Trace
from service.scheduler.forecast import Forecast
from service.scheduler.plan import PolicyOptions
from tests.unit.replay.small_traces import trace

HOUR = 3600.0


def crowded(count: int) -> Trace:
    """So many jobs on a pool of two nodes that is always full."""
    draw = random.Random(3)
    return trace(*[(row * 400, draw.randint(900, 20_000), draw.choice((1, 2, 4, 8))) for row in range(count)])


def foretold(jobs: Trace) -> dict[float, Forecast]:
    """The forecast of each job by its time of submission."""
    surroundings = Surroundings(nodes=2)
    engine = ForecastingEngine(surroundings, "time-left", PolicyOptions())
    simulate(jobs, engine, surroundings, Assumptions(), 1)
    return {one.made_at: one.forecast for one in engine.judged}


def test_a_forecast_knows_nothing_of_what_comes_after_it() -> None:
    whole, first_half = crowded(80), crowded(40)

    later, earlier = foretold(whole), foretold(first_half)

    assert len(earlier) == 40
    assert all(later[at] == made for at, made in earlier.items())


def test_every_job_is_judged_once() -> None:
    surroundings = Surroundings(nodes=2)
    engine = ForecastingEngine(surroundings, "time-left", PolicyOptions())
    record = simulate(crowded(60), engine, surroundings, Assumptions(), 1)

    waited = sorted(one.waited_seconds for one in engine.judged)
    assert waited == sorted(
        at - job.submitted_at
        for at, job in zip(record.first_started_at, record.trace.jobs, strict=True)
        if at is not None
    )


def known(low: float, p50: float, p90: float) -> Forecast:
    return Forecast(low=low, p50=p50, p90=p90)


def test_the_figures_are_of_the_jobs_that_waited_long_and_an_unknown_start_is_a_miss() -> None:
    figures = forecast_figures(
        [
            Judged(known(0, 1, 2), 0.0, 300.0),
            Judged(known(0, HOUR, 4 * HOUR), 0.0, 1.9 * HOUR),
            Judged(known(HOUR, 2 * HOUR, 3 * HOUR), 0.0, 5 * HOUR),
            Judged(Forecast(why_unknown="no limits"), 0.0, HOUR),
            Judged(known(HOUR, 2 * HOUR, 6 * HOUR), 0.0, HOUR),
        ]
    )

    assert (figures.jobs, figures.inside_percent, figures.within_2x_percent) == (4, 50.0, 50.0)
    assert (figures.unknown_percent, figures.median_p90_over_p50) == (25.0, 3.0)
    assert figures.median_width_hours == pytest.approx(4.0)


def test_the_command_prints_how_good_forecasts_were(tmp_path: Path) -> None:
    path = tmp_path / "small.csv"
    rows = [f"{job.submitted_at},{job.duration},{job.gpus}" for job in crowded(60).jobs]
    path.write_text("\n".join(["submit_s,duration_s,gpus", *rows]))

    def run(*words: str) -> str:
        done = CliRunner().invoke(replay, [str(path), "--nodes", "2", "--jobs", "1", "--forecast", *words])
        assert done.exit_code == 0, done.output
        return done.stdout

    assert "time-left, forecasts at submission, " in run()
    items = {row["policy"]: row["forecast"] for row in json.loads(run("-o", "json"))["items"]}
    assert items["time-left"]["jobs"] > 0
    assert items["srtf"] is None
