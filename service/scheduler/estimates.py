"""How much time a job has left, as far as one can tell: from its reports, before those from its limit. Pure.

Estimates order and forecast. Promises never read them: those take the hard limit.
"""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from typing import Final

from service.scheduler.facts import Measured, WaitingJob

LEAST_LEFT_SECONDS: Final = 60.0
UNKNOWN_LEFT_SECONDS: Final = 24 * 3600.0
"""Taken for a job that gives no limit and does not report, until it has run for longer than that."""
REPORT_COUNTS_AFTER_SECONDS: Final = 120.0
"""Useful run of an attempt before what it reports is believed."""
MIN_RATIOS: Final = 20
"""Ended jobs before their ratios are believed."""
FEW_RATIOS: Final = 100
"""Up to so many each ended job may move the quantiles far."""
QUANTILE_SILENT: Final = 0.5
QUANTILE_REPORTING: Final = 0.25
"""A hopeful first estimate for those whose reports will mend it; whoever never reports gets the median."""
MAX_RATIOS: Final = 20_000
GRID: Final = 1.02
LOG_GRID: Final = math.log(GRID)


class Ratios:
    """Real time over limit of the jobs that ended, sorted; asked for two of its quantiles."""

    __slots__ = ("_sorted", "reporting", "silent")

    def __init__(self, ratios: Iterable[float] = ()):
        self._sorted = sorted(ratios)
        self.silent = 1.0
        self.reporting = 1.0
        self._read()

    def add(self, ratio: float) -> None:
        """One more job has ended."""
        bisect.insort(self._sorted, ratio)
        if len(self._sorted) > MAX_RATIOS:  # thin it out evenly: the quantiles stay where they are
            self._sorted = self._sorted[::2]
        self._read()

    def remove(self, ratio: float) -> None:
        """Take back what `add` did."""
        del self._sorted[bisect.bisect_left(self._sorted, ratio)]
        self._read()

    @property
    def quantiles(self) -> tuple[float, float]:
        """Of those that do not report, and of those that will."""
        return self.silent, self.reporting

    @property
    def are_few(self) -> bool:
        """Whether they are too few to be steady."""
        return len(self._sorted) <= FEW_RATIOS

    def of(self, job: WaitingJob) -> float:
        """The ratio by which the job's limit is scaled."""
        return self.reporting if job.will_report else self.silent

    def __len__(self) -> int:
        return len(self._sorted)

    def _read(self) -> None:
        count = len(self._sorted)
        if count < MIN_RATIOS:
            self.silent = self.reporting = 1.0
            return
        self.silent = on_grid(self._sorted[int(count * QUANTILE_SILENT)])
        self.reporting = on_grid(self._sorted[int(count * QUANTILE_REPORTING)])


def on_grid(ratio: float) -> float:
    """A ratio rounded to steps of 2 %: what is derived from it stays until that makes a difference."""
    return GRID ** round(math.log(max(ratio, 1e-6)) / LOG_GRID)


def left_of_waiting(job: WaitingJob, ratios: Ratios) -> float:
    """Seconds of run that a waiting job still needs."""
    if job.measured_left is not None:
        left = job.measured_left
    elif job.limit_seconds is None:
        left = max(UNKNOWN_LEFT_SECONDS, job.served_seconds)
    else:
        left = (job.limit_seconds - job.served_seconds) * ratios.of(job)
    return left if left > LEAST_LEFT_SECONDS else LEAST_LEFT_SECONDS


def left_of_running(
    job: WaitingJob, measured: Measured | None, useful_since: float, ratios: Ratios, now: float
) -> float:
    """Seconds of run that a running job still needs; `useful_since`: when it was where its last run had ended."""
    if measured is not None:
        left = measured.left_seconds - measured.rate * (now - measured.at)
    else:
        served = now - useful_since
        if served < 0.0:
            served = 0.0
        if job.measured_left is not None:
            left = job.measured_left - served
        elif job.limit_seconds is None:
            left = max(UNKNOWN_LEFT_SECONDS, job.served_seconds + served)
        else:
            left = (job.limit_seconds - job.served_seconds - served) * ratios.of(job)
    return left if left > LEAST_LEFT_SECONDS else LEAST_LEFT_SECONDS


def limit_end(job: WaitingJob, useful_since: float) -> float:
    """When the hard limit of a running job ends it, epoch seconds; infinite without one. Each attempt has all of it."""
    return float("inf") if job.limit_seconds is None else useful_since + job.limit_seconds
