"""Forecasts within a replay: made when a job arrives, judged when it starts, learning from what has happened alone.

Pure. Not for: how a forecast is made (`service.scheduler.forecast`).
"""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

from service.replay.engine import ProductionEngine
from service.replay.run_record import Surroundings
from service.scheduler.calibration import SOON_SECONDS, Calibration
from service.scheduler.facts import WaitingJob
from service.scheduler.forecast import Forecast, forecast
from service.scheduler.plan import Plan, PolicyOptions

WITHIN_FACTOR: Final = 2.0


class Judged(NamedTuple):
    """A forecast, and for how long the job then waited."""

    forecast: Forecast
    made_at: float
    waited_seconds: float


class ForecastingEngine(ProductionEngine):
    """The production engine that also makes a forecast for every job at its submission."""

    def __init__(self, surroundings: Surroundings, policy: str, options: PolicyOptions):
        super().__init__(surroundings, policy, options)
        self.calibration = Calibration()
        self.judged: list[Judged] = []
        self._made: dict[int, tuple[float, Forecast]] = {}

    def arrived(self, job: WaitingJob, now: float) -> None:
        """See `Engine`."""
        super().arrived(job, now)
        made = forecast(self.world, job.id, now, self.calibration, self._policy, self._options)
        self._made[job.id] = (now, made)
        if made.model_seconds:  # what starts at once teaches nothing
            self.calibration.foretold(job.id, made.size, made.model_seconds, now)

    def decide(self, now: float) -> Plan:
        """See `Engine`."""
        plan = super().decide(now)
        for place in plan.places:
            made = self._made.pop(place.job_id, None)
            if made is not None:
                self.judged.append(Judged(made[1], made[0], now - made[0]))
                self.calibration.started(place.job_id, now)
        return plan


@dataclass(frozen=True, kw_only=True)
class ForecastFigures:
    """How good forecasts were, of the jobs that waited for over ten minutes. Shares in percent."""

    jobs: int
    inside_percent: float
    """Started within the range; an unknown start counts as a miss."""
    within_2x_percent: float
    """Waited between half and twice the median foretold."""
    unknown_percent: float
    median_p90_over_p50: float
    median_width_hours: float
    """Of the range, from its low end to its high one."""


def forecast_figures(judged: Iterable[Judged]) -> ForecastFigures:
    """The figures of one or several replays."""
    late = [one for one in judged if one.waited_seconds > SOON_SECONDS]
    known = [one for one in late if one.forecast.is_known]
    return ForecastFigures(
        jobs=len(late),
        inside_percent=_percent(sum(map(_is_inside, known)), len(late)),
        within_2x_percent=_percent(sum(map(_is_within, known)), len(late)),
        unknown_percent=_percent(len(late) - len(known), len(late)),
        median_p90_over_p50=_median([_ratio(one.forecast) for one in known]),
        median_width_hours=_median([_width(one.forecast) for one in known]) / 3600.0,
    )


def _is_inside(one: Judged) -> bool:
    low, high = one.forecast.low, one.forecast.p90
    return low is not None and high is not None and low <= one.waited_seconds <= high


def _is_within(one: Judged) -> bool:
    middle = one.forecast.p50
    return middle is not None and middle / WITHIN_FACTOR <= one.waited_seconds <= middle * WITHIN_FACTOR


def _ratio(one: Forecast) -> float:
    return (one.p90 or 0.0) / max(1.0, one.p50 or 0.0)


def _width(one: Forecast) -> float:
    return (one.p90 or 0.0) - (one.low or 0.0)


def _median(values: Sequence[float]) -> float:
    return statistics.median(values) if values else 0.0


def _percent(count: int, of: int) -> float:
    return 100.0 * count / of if of else 0.0
