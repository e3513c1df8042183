"""The shell around `plan`: keep the world, plan when something may be decided otherwise, apply. `Scheduler` repeats it.

Not for: how a plan becomes rows (`apply_plan`), nor how rows become a world (`world_mirror`, `load_world`).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from typing import Final

from service import clock
from service.background import BackgroundThread
from service.db.leadership import LostLeadership
from service.db.session import Database
from service.domain.reasons import Reason, ReasonCode
from service.errors import DatabaseUnavailable
from service.events.bus import Bus
from service.scheduler.apply_plan import Orders, apply_plan
from service.scheduler.experience import Learner
from service.scheduler.held_world import HeldWorld
from service.scheduler.load_world import load_world
from service.scheduler.plan import Plan, PolicyOptions, Wait, plan
from service.scheduler.world import World
from service.scheduler.world_mirror import WorldMirror
from service.settings import Settings

log = logging.getLogger("gangline.scheduler")

MAX_RETOLD: Final = 100
"""Reasons of one pass that are written anew although only their numbers changed; the others follow in later passes."""
MOST_UNDELETED: Final = 500
"""Marks of changes that were read and led to nothing, before they are deleted for their own sake."""
_NOTHING: Final = Plan(stops=(), places=(), nominations=())


def run_cycle(database: Database, settings: Settings, epoch: int) -> int:
    """One pass over a world that is read whole. Returns the number of jobs placed. Raises LostLeadership."""
    with database.read() as connection:
        now = database.now(connection)
        world, reasons = load_world(connection, now, settings)
    if not reasons:
        return 0
    decided = plan(world, now, settings.policy, options_of(settings))
    orders = Orders(plan=decided, reasons=_new_reasons(decided.waits, reasons), promoted={})
    return apply_plan(database, settings, epoch, world, orders).num_placed


def options_of(settings: Settings) -> PolicyOptions:
    """What the settings say of the policy."""
    return PolicyOptions(preemption=settings.preemption)


class Cycle:
    """Passes over a world that is kept by changes."""

    def __init__(self, database: Database, settings: Settings, epoch: int, held: HeldWorld | None = None):
        self._database = database
        self._settings = settings
        self._epoch = epoch
        self._held = held
        self.mirror = WorldMirror(database, settings)
        self.num_passes = 0
        self._planned: tuple[World, int] | None = None
        """The world of the last pass and its version then."""
        self._planned_at = self._looked_at = 0.0
        self._due_at: float | None = None
        self._learner: Learner | None = None
        """Made at the first turn, since it reads."""

    def turn(self) -> int:
        """Look what changed, and plan if that or the time may make a difference; returns the number of jobs placed.

        Raises LostLeadership. After any error the world is read anew.
        """
        learner = self._learner or Learner(
            self._database, self._epoch, self._settings.policy, options_of(self._settings)
        )
        self._learner = learner
        with nullcontext() if self._held is None else self._held.lock:
            try:
                num_placed = self._turn()
            except BaseException:
                if self._held is not None:
                    self._held.drop()
                raise
            learner.learn(self.mirror.world, self._looked_at)
            if self._held is not None:
                self._held.keep(self.mirror.world, self._looked_at, learner.calibration)
        learner.write(self._looked_at)
        return num_placed

    def _turn(self) -> int:
        try:
            now = self._looked_at = self.mirror.refresh()
            if not self._may_differ(now):
                self._delete_marks()
                return 0
            return self._pass(now)
        except BaseException:
            self.mirror.forget()
            self._planned = None
            raise

    def seconds_to_next(self) -> float:
        """How long from the last turn on nothing has to be done unless something changes."""
        rest = self._settings.schedule_seconds
        return rest if self._due_at is None else min(rest, max(0.01, self._due_at - self._looked_at))

    def _may_differ(self, now: float) -> bool:
        world = self.mirror.world
        if self._planned is None or self._planned[0] is not world or self._planned[1] != world.version:
            return True
        if self.mirror.dead_nominations or (self._due_at is not None and now >= self._due_at):
            return True
        is_slow_tick = abs(now - self._planned_at) >= self._settings.schedule_seconds
        return is_slow_tick and bool(world.queue.entries or world.nominated)

    def _pass(self, now: float) -> int:
        mirror, world = self.mirror, self.mirror.world
        decided = plan(world, now, self._settings.policy, options_of(self._settings))
        orders = Orders(
            plan=decided,
            reasons=_new_reasons(decided.waits, mirror.reasons),
            promoted=mirror.newly_promoted(),
            dead_nominations=mirror.dead_nominations,
            read_changes=mirror.read_changes,
        )
        applied = apply_plan(self._database, self._settings, self._epoch, world, orders)
        mirror.read_changes.clear()
        mirror.reasons.update(
            (job_id, text) for job_id, text in orders.reasons.items() if job_id not in applied.dropped
        )
        self.num_passes += 1
        # Of what was dropped, the reason lies in changes that come with their own marks.
        self._planned = (world, world.version)
        self._planned_at = now
        self._due_at = mirror.next_due(now)
        return applied.num_placed

    def _delete_marks(self) -> None:
        if len(self.mirror.read_changes) >= MOST_UNDELETED:
            orders = Orders(plan=_NOTHING, reasons={}, promoted={}, read_changes=self.mirror.read_changes)
            apply_plan(self._database, self._settings, self._epoch, self.mirror.world, orders)
            self.mirror.read_changes.clear()


def _new_reasons(waits: Sequence[Wait], stored: Mapping[int, str | None]) -> dict[int, str]:
    """The reason, as JSON text, of each job whose stored one says something else.

    Where only numbers changed, a few are written in each pass, so that one start never rewrites thousands of rows.
    """
    texts: dict[Reason, str] = {}  # thousands of jobs share a few reasons
    changed: dict[int, str] = {}
    num_retold = 0
    for wait in waits:
        text = texts.get(wait.reason)
        if text is None:
            text = texts[wait.reason] = json.dumps(wait.reason.to_json(), ensure_ascii=False)
        before = stored.get(wait.job_id)
        if text == before:
            continue
        if before is not None and before.startswith(f'{{"code": "{wait.reason.code}"'):
            # The seconds of a back-off change with every pass; rewriting them would wake every watcher for nothing.
            if wait.reason.code is ReasonCode.BACK_OFF or num_retold >= MAX_RETOLD:
                continue
            num_retold += 1
        changed[wait.job_id] = text
    return changed


class Scheduler(BackgroundThread):
    """Runs turns in a thread: at once when woken (`schedule`), when a timer is due, else on a slow tick."""

    REST_FACTOR = 3.0
    """A pass rests for this many times its own length, so that a long queue never starves the API of the processor."""

    def __init__(self, database: Database, settings: Settings, bus: Bus, epoch: int, held: HeldWorld | None = None):
        super().__init__("scheduler", bus.thread_event("schedule"))
        self._settings = settings
        self._bus = bus
        self._epoch = epoch
        self._held = held
        self._cycle = Cycle(database, settings, epoch, held)
        self.has_lost_leadership = False

    def run(self) -> None:
        """See `BackgroundThread`."""
        try:
            self._run()
        finally:
            if self._held is not None:
                self._held.drop()

    def _run(self) -> None:
        self._wake.set()
        pause = self._settings.schedule_seconds
        while not self._stopping.is_set():
            self._wake.wait(pause)
            self._wake.clear()
            if self._stopping.is_set():
                return
            began = clock.monotonic()
            pause = self._settings.schedule_seconds
            try:
                self._cycle.turn()
                pause = self._cycle.seconds_to_next()
            except LostLeadership:
                log.warning("leadership_lost epoch=%s", self._epoch)
                self.has_lost_leadership = True
                return
            except DatabaseUnavailable as error:
                log.warning("cycle_skipped why=%s", error.detail)
                self._stopping.wait(1.0)
            except Exception:
                # One poisoned row must not end scheduling for everybody; the trace names it, the next tick tries again.
                log.exception("cycle_failed")
                self._stopping.wait(1.0)
            self._stopping.wait((clock.monotonic() - began) * self.REST_FACTOR)
