"""The leader learns from its forecasts and writes down what it learnt: it outlives the process, and all may read it.

Part of the scheduler's shell. Not for: what is learnt (`calibration`), nor forecasts that somebody asked for
(`service.operations.explain_job`).
"""

from __future__ import annotations

import json
import logging
from typing import Final

from sqlalchemy import Connection, insert, select, update

from service.db.leadership import assert_leader
from service.db.session import Database
from service.db.tables import forecast_experience
from service.scheduler.calibration import Calibration
from service.scheduler.forecast import forecast
from service.scheduler.scheduling_pass import PolicyOptions
from service.scheduler.world import World

log = logging.getLogger("gangline.scheduler")

LEARN_SECONDS: Final = 10.0
"""Between two forecasts that are made to be learnt from."""
WRITE_SECONDS: Final = 60.0
"""Between two times that it is written down."""


def load_experience(connection: Connection) -> Calibration:
    """What the leader wrote down last; none yet, or one of another version: no experience. Does I/O."""
    text = connection.execute(select(forecast_experience.c.experience)).scalar_one_or_none()
    if text is None:
        return Calibration()
    try:
        return Calibration.from_json(json.loads(text))
    except (KeyError, TypeError, ValueError) as error:
        log.warning("forecast_experience_unreadable why=%r: it is learnt anew", error)
        return Calibration()


class Learner:
    """The experience of the leader."""

    def __init__(self, database: Database, epoch: int, policy: str, options: PolicyOptions):
        """Reads what was written down."""
        self._database, self._epoch = database, epoch
        self._policy, self._options = policy, options
        self._learnt_at = self._written_at = 0.0
        with database.read() as connection:
            self.calibration = load_experience(connection)
        self._written = self._text()

    def learn(self, world: World, now: float) -> None:
        """Judge the forecasts of jobs that have started, and make one more: a sample of the jobs is enough."""
        calibration = self.calibration
        for job_id in list(calibration.open_jobs):
            if job_id in world.runs:
                calibration.started(job_id, now)
            elif job_id not in world.queue.entries and job_id not in world.nominated:
                calibration.gone(job_id)
        if abs(now - self._learnt_at) < LEARN_SECONDS:
            return
        self._learnt_at = now
        known = set(calibration.open_jobs)
        fresh = next((job_id for job_id in reversed(world.queue.entries) if job_id not in known), None)
        if fresh is not None:
            made = forecast(world, fresh, now, calibration, self._policy, self._options)
            if made.model_seconds is not None:
                calibration.foretold(fresh, made.size, made.model_seconds, now)

    def write(self, now: float) -> None:
        """Write it down once a minute, if there is anything new. Does I/O. Raises LostLeadership."""
        if abs(now - self._written_at) < WRITE_SECONDS:
            return
        self._written_at = now
        text = self._text()
        if text == self._written:
            return
        with self._database.write() as tx:
            assert_leader(tx, self._epoch)
            row = {"experience": text, "written_at": tx.now}
            if not tx.connection.execute(update(forecast_experience).values(**row)).rowcount:
                tx.connection.execute(insert(forecast_experience).values(id=1, **row))
        self._written = text

    def _text(self) -> str:
        return json.dumps(self.calibration.to_json(), separators=(",", ":"))
