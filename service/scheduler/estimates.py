"""How much time a job has left, as far as one can tell: from its reports, before those from its limit. Pure.

Estimates order and forecast. Promises never read them: those take the hard limit.
"""

from __future__ import annotations

import bisect
import math
from collections import defaultdict
from collections.abc import Iterable
from typing import Final, NamedTuple

from service.scheduler.facts import EndedRatio, Measured, WaitingJob

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


class _Circle:
    """Ratios of the jobs of one user, one team or the pool, sorted; asked for two of their quantiles."""

    __slots__ = ("_sorted", "is_known", "reporting", "silent")

    def __init__(self, ratios: Iterable[float] = ()):
        self._sorted = sorted(ratios)
        self.is_known = False
        """Whether they are enough to be believed."""
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
    def num_ended(self) -> int:
        """Of how many jobs."""
        return len(self._sorted)

    def _read(self) -> None:
        count = len(self._sorted)
        self.is_known = count >= MIN_RATIOS
        if not self.is_known:
            self.silent = self.reporting = 1.0
            return
        self.silent = on_grid(self._sorted[int(count * QUANTILE_SILENT)])
        self.reporting = on_grid(self._sorted[int(count * QUANTILE_REPORTING)])


class Ratios:
    """Real time over limit of the jobs that ended: a job's estimate is of its user's, else its team's, else the pool's.

    The first circle counts that knows `MIN_RATIOS` ended jobs.
    """

    __slots__ = ("_pool", "_teams", "_users")

    def __init__(self, ended: Iterable[EndedRatio] = ()):
        known = list(ended)
        self._pool = _Circle(one.ratio for one in known)
        self._teams = _circles((one.team_id, one.ratio) for one in known)
        self._users = _circles((one.user_id, one.ratio) for one in known)

    def add(self, ended: EndedRatio) -> None:
        """One more job has ended."""
        self._pool.add(ended.ratio)
        self._teams.setdefault(ended.team_id, _Circle()).add(ended.ratio)
        self._users.setdefault(ended.user_id, _Circle()).add(ended.ratio)

    def remove(self, ended: EndedRatio) -> None:
        """Take back what `add` did."""
        self._pool.remove(ended.ratio)
        self._teams[ended.team_id].remove(ended.ratio)
        self._users[ended.user_id].remove(ended.ratio)

    def of(self, job: WaitingJob) -> float:
        """The ratio by which the job's limit is scaled."""
        circle = self._circle_of(job.user_id, job.team_id)
        return circle.reporting if job.will_report else circle.silent

    def silent_of(self, job: WaitingJob) -> float:
        """The median: what a limit is scaled by where the job is to be seen as one that does not report."""
        return self._circle_of(job.user_id, job.team_id).silent

    def views_of(self, user_id: int, team_id: int) -> tuple[RatioView, RatioView, RatioView]:
        """What jobs of this user, of others of the team, and of other teams are estimated by, if nearer circles say
        nothing."""
        of_user, of_team = self._circle_of(user_id, team_id), self._circle_of(None, team_id)
        return _view(of_user), _view(of_team), _view(self._pool)

    def __len__(self) -> int:
        return self._pool.num_ended

    def _circle_of(self, user_id: int | None, team_id: int) -> _Circle:
        circle = self._users.get(user_id) if user_id is not None else None
        if circle is not None and circle.is_known:
            return circle
        circle = self._teams.get(team_id)
        return circle if circle is not None and circle.is_known else self._pool


class RatioView(NamedTuple):
    """What a circle says."""

    silent: float
    """For jobs that do not report."""
    reporting: float
    """For jobs that will."""
    is_unsteady: bool
    """Each ended job may move it far: it knows few."""


def _view(circle: _Circle) -> RatioView:
    return RatioView(circle.silent, circle.reporting, circle.num_ended <= FEW_RATIOS)


def _circles(ended: Iterable[tuple[int, float]]) -> dict[int, _Circle]:
    by_owner: defaultdict[int, list[float]] = defaultdict(list)
    for owner_id, ratio in ended:
        by_owner[owner_id].append(ratio)
    return {owner_id: _Circle(ratios) for owner_id, ratios in by_owner.items()}


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
