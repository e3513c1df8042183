"""Apply a plan: one transaction of the leader, in which each decision that still holds is written, and no other.

All rows that decisions rest on are locked first, nodes before jobs (`service.operations.job_lock`), so that what is
found true stays true until the commit. A decision whose assumptions broke is dropped alone, with what rests on it:
where a victim cannot be stopped, or its GPUs would go to a job that waits no more, nobody is stopped for that job.
Losing is normal: somebody else was faster, and the next pass sees it.
"""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from sqlalchemy import bindparam, delete, insert, select, update
from sqlalchemy.exc import IntegrityError

from gangline.protocol.outcomes import JobState, StopIntent
from service.db.leadership import assert_leader
from service.db.session import Database, Write
from service.db.tables import (
    attempts,
    gpus,
    jobs,
    nodes,
    nominations,
    teams,
    users,
    world_changes,
)
from service.db.transitions import StaleTransition
from service.db.world_changes import mark_all_changed
from service.domain.gang_layout import layouts_to_json
from service.domain.states import AttemptState, NodeState
from service.operations.start_attempt import start_attempt
from service.operations.stop_attempt import stop_attempt
from service.scheduler.facts import PlacedGang
from service.scheduler.plan import Nominate, Place, Plan, Stop
from service.scheduler.world import World
from service.settings import Settings

log = logging.getLogger("gangline.scheduler")

NOMINATION_SLACK_SECONDS: Final = 60.0
"""Beyond grace and settling, until GPUs that did not come free are promised to nobody any more."""
STOPPABLE: Final = (JobState.STARTING, JobState.RUNNING)
WHYS: Final[Mapping[str, str]] = {
    "less_time_left": "{job} has less time left",
    "promoted": "{job} has waited for too long",
    "reclaim": "team {team} gets its quota back, for {job}",
    "clear": "its nodes are cleared for {job}",
    "move": "it goes on elsewhere, to make room for {job}",
}
"""What the owner of a stopped job is told, by `Stop.why`."""


@dataclass(frozen=True, kw_only=True)
class Orders:
    """All that one pass wants written."""

    plan: Plan
    reasons: Mapping[int, str]
    """New reasons of waiting jobs, as JSON text."""
    promoted: Mapping[int, float]
    """Jobs that were promoted, and since when."""
    dead_nominations: Collection[int] = ()
    read_changes: Collection[int] = ()
    """Ids of rows of `world_changes` that have been read."""

    def __bool__(self) -> bool:
        plan = self.plan
        decided = plan.stops or plan.places or plan.nominations
        return bool(decided or self.reasons or self.promoted or self.dead_nominations or self.read_changes)


@dataclass(frozen=True, kw_only=True)
class Applied:
    """What became of the orders."""

    num_placed: int = 0
    dropped: frozenset[int] = frozenset()
    """Jobs of decisions that were dropped."""


def apply_plan(database: Database, settings: Settings, epoch: int, world: World, orders: Orders) -> Applied:
    """Write it all, in one transaction. Raises LostLeadership."""
    if not orders:
        return Applied()
    with database.write() as tx:
        assert_leader(tx, epoch)
        return _Application(tx, settings, epoch, world, orders).run()


_LOCK_NODES = (
    select(nodes.c.id, nodes.c.name, nodes.c.state, nodes.c.cordon_reason)
    .where(nodes.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(nodes.c.id)
    .with_for_update(read=True)
)
_LOCK_JOBS = (
    select(
        jobs.c.id,
        jobs.c.state,
        jobs.c.is_cancel_wished,
        jobs.c.hold_reason,
        jobs.c.is_private,
        jobs.c.num_attempts,
        jobs.c.start_reason,
        jobs.c.memory_bytes_per_node,
        jobs.c.layouts,
        users.c.name.label("owner"),
        teams.c.name.label("team"),
    )
    .join(users, users.c.id == jobs.c.owner_id)
    .join(teams, teams.c.id == jobs.c.team_id)
    .where(jobs.c.id.in_(bindparam("ids", expanding=True)))
    .order_by(jobs.c.id)
    .with_for_update(of=jobs)
)
_LOCK_ROWS = (
    select(jobs.c.id).where(jobs.c.id.in_(bindparam("ids", expanding=True))).order_by(jobs.c.id).with_for_update()
)
_BAD_GPUS = select(gpus.c.node_id, gpus.c.gpu_index).where(
    gpus.c.node_id.in_(bindparam("ids", expanding=True)),
    gpus.c.quarantine_reason.is_not(None) | gpus.c.removed_at.is_not(None),
)
_OPEN_ATTEMPTS = select(
    attempts.c.id, attempts.c.job_id, attempts.c.created_at, attempts.c.settle_at, attempts.c.stop_grace_seconds
).where(attempts.c.job_id.in_(bindparam("ids", expanding=True)), attempts.c.state != AttemptState.ENDED)
_FORGET_CHANGES = delete(world_changes).where(world_changes.c.id.in_(bindparam("ids", expanding=True)))
_FORGET_NOMINATIONS = delete(nominations).where(nominations.c.job_id.in_(bindparam("ids", expanding=True)))
_INSERT_NOMINATION = insert(nominations)
_PROMOTE = (
    update(jobs)
    .where(jobs.c.id == bindparam("job_id"), jobs.c.promoted_at.is_(None), jobs.c.state == JobState.WAITING)
    .values(promoted_at=bindparam("at"), version=jobs.c.version + 1)
)
_SET_REASON = (
    update(jobs)
    .where(jobs.c.id == bindparam("job_id"), jobs.c.state == JobState.WAITING)
    .values(reason=bindparam("new_reason"), version=jobs.c.version + 1)
)
_CHUNK: Final = 10_000


class _Application:
    """The transaction of one pass."""

    def __init__(self, tx: Write, settings: Settings, epoch: int, world: World, orders: Orders):
        self.tx, self.settings, self.epoch, self.world = tx, settings, epoch, world
        self.orders, self.plan = orders, orders.plan
        self.dropped: set[int] = set()
        self.node_names: dict[int, str] = {}
        """Of the nodes that may get work."""
        self.bad_gpus: set[tuple[int, int]] = set()
        """GPUs of those nodes that are quarantined or gone."""
        self.jobs: dict[int, Any] = {}
        self.attempts: dict[int, Any] = {}
        """Open attempts, by job."""

    def run(self) -> Applied:
        """Write what holds."""
        self._lock()
        self._forget()
        self._promote()  # while they still wait: some of them start now
        self._stop_victims()
        num_placed = sum(self._try(place.job_id, partial(self._place, place)) for place in self.plan.places)
        for nomination in self.plan.nominations:
            if nomination.job_id not in self.dropped:
                self._try(nomination.job_id, partial(self._nominate, nomination))
        self._tell()
        return Applied(num_placed=num_placed, dropped=frozenset(self.dropped))

    def _lock(self) -> None:
        plan = self.plan
        gangs = [place.gang for place in plan.places] + [one.gang for one in plan.nominations]
        node_ids = sorted({share.node_id for gang in gangs for share in gang.shares})
        concerned = {place.job_id for place in plan.places} | {one.job_id for one in plan.nominations}
        concerned |= {job_id for stop in plan.stops for job_id in (stop.job_id, stop.for_job_id)}
        execute = self.tx.connection.execute
        if node_ids:
            self.bad_gpus = {(row.node_id, row.gpu_index) for row in execute(_BAD_GPUS, {"ids": node_ids})}
            self.node_names = {
                row.id: row.name
                for row in execute(_LOCK_NODES, {"ids": node_ids})
                if row.state == NodeState.READY and row.cordon_reason is None
            }
        # All job rows that this pass writes, in one ascending order: reasons and promotions too.
        written = sorted(concerned | self.orders.reasons.keys() | self.orders.promoted.keys())
        if not self.tx.is_sqlite:
            for start in range(0, len(written), _CHUNK):
                execute(_LOCK_ROWS, {"ids": written[start : start + _CHUNK]})
        if concerned:
            self.jobs = {row.id: row for row in execute(_LOCK_JOBS, {"ids": sorted(concerned)})}
        leaving = {stop.job_id for stop in plan.stops} | {
            job_id for nomination in plan.nominations for job_id in nomination.after
        }
        if leaving:
            self.attempts = {row.job_id: row for row in execute(_OPEN_ATTEMPTS, {"ids": sorted(leaving)})}

    def _forget(self) -> None:
        changes = sorted(self.orders.read_changes)
        for start in range(0, len(changes), _CHUNK):
            self.tx.connection.execute(_FORGET_CHANGES, {"ids": changes[start : start + _CHUNK]})
        started = {place.job_id for place in self.plan.places} & self.world.nominations.keys()
        if gone := sorted({*self.orders.dead_nominations, *started}):
            self.tx.connection.execute(_FORGET_NOMINATIONS, {"ids": gone})

    # --- Guards ------------------------------------------------------------------------------------------------------

    def _why_not_waiting(self, job_id: int) -> str | None:
        row = self.jobs.get(job_id)
        if row is None or row.state != JobState.WAITING or row.is_cancel_wished:
            return f"job {job_id} waits no more"
        return f"job {job_id} is held" if row.hold_reason is not None else None

    def _why_not_there(self, gang: PlacedGang) -> str | None:
        missing = [share.node_id for share in gang.shares if share.node_id not in self.node_names]
        if missing:
            return f"a node is not ready any more (id {missing[0]})"
        held = [(share.node_id, index) for share in gang.shares for index in share.gpu_indices]
        bad = [one for one in held if one in self.bad_gpus]
        return f"GPU {bad[0][1]} of node {bad[0][0]} is set aside by now" if bad else None

    def _why_not_stopped(self, stop: Stop) -> str | None:
        row, attempt = self.jobs.get(stop.job_id), self.attempts.get(stop.job_id)
        if row is None or row.state not in STOPPABLE or row.is_cancel_wished or attempt is None:
            return f"job {stop.job_id} is not running any more"
        return None if self._is_known(attempt) else f"job {stop.job_id} runs in another attempt by now"

    def _is_known(self, attempt: Any) -> bool:
        """Whether it is the attempt that the plan has seen, not one that has begun since."""
        run = self.world.runs.get(attempt.job_id)
        return run is not None and run.started_at == attempt.created_at

    # --- Decisions ---------------------------------------------------------------------------------------------------

    def _stop_victims(self) -> None:
        """Stop the victims of each waiting job, all of them or none, if it can still have what they leave."""
        groups: defaultdict[int, list[Stop]] = defaultdict(list)
        for stop in self.plan.stops:
            groups[stop.for_job_id].append(stop)
        promised = {nomination.job_id: nomination for nomination in self.plan.nominations}
        broken: set[int] = set()
        for job_id, stops in groups.items():
            own = promised.get(job_id)
            moved = [promised[stop.job_id] for stop in stops if stop.job_id in promised]
            why = self._why_not_waiting(job_id)
            why = why or next(filter(None, (self._why_not_stopped(stop) for stop in stops)), None)
            gangs = [one.gang for one in ([] if own is None else [own]) + moved]
            why = why or next(filter(None, map(self._why_not_there, gangs)), None)
            if own is not None and own.after & broken:
                why = why or "a job that should have left for it stays"
            if why is not None or not self._try(job_id, partial(self._stop_all, stops)):
                log.info("stops_dropped for_job_id=%s why=%s", job_id, why)
                broken.update(stop.job_id for stop in stops)
                self.dropped.update((job_id, *(stop.job_id for stop in stops)))
        # What is promised of GPUs that nobody leaves is promised no more.
        self.dropped.update(one.job_id for one in self.plan.nominations if one.after & broken)

    def _stop_all(self, stops: Sequence[Stop]) -> None:
        for stop in stops:
            attempt_id = self.attempts[stop.job_id].id
            is_asked = stop_attempt(
                self.tx,
                attempt_id,
                StopIntent.PREEMPT,
                detail=self._why_in_words(stop),
                settle_seconds=self.settings.settle_seconds,
                actor="scheduler",
                nominated_for=stop.for_job_id,
            )
            if not is_asked:
                raise StaleTransition(f"job {stop.job_id} stops already")

    def _why_in_words(self, stop: Stop) -> str:
        row = self.jobs[stop.for_job_id]
        name = f"a private job of team {row.team}" if row.is_private else f"job {row.id} of {row.owner}"
        return WHYS[stop.why].format(job=name, team=row.team)

    def _place(self, place: Place) -> None:
        why = self._why_not_waiting(place.job_id) or self._why_not_there(place.gang)
        if why is not None:
            raise StaleTransition(why)
        start_attempt(self.tx, self.jobs[place.job_id], place.gang, self.epoch, self.node_names)

    def _nominate(self, nomination: Nominate) -> None:
        is_moved = nomination.job_id in nomination.after
        why = (None if is_moved else self._why_not_waiting(nomination.job_id)) or self._why_not_there(nomination.gang)
        if why is not None:
            raise StaleTransition(why)
        execute = self.tx.connection.execute
        # Some may have ended at once: they had not been claimed yet.
        leaving = [row for row in execute(_OPEN_ATTEMPTS, {"ids": sorted(nomination.after)}) if self._is_known(row)]
        latest = max([self.tx.now, *(row.settle_at for row in leaving if row.settle_at is not None)])
        execute(_FORGET_NOMINATIONS, {"ids": [nomination.job_id]})
        execute(
            _INSERT_NOMINATION,
            {
                "job_id": nomination.job_id,
                "layout": layouts_to_json([nomination.gang.layout]),
                "shares": json.dumps([[share.node_id, share.gpu_indices] for share in nomination.gang.shares]),
                "victims": json.dumps([row.id for row in leaving]),
                "leader_epoch": self.epoch,
                "created_at": self.tx.now,
                "expires_at": latest + NOMINATION_SLACK_SECONDS,
            },
        )
        mark_all_changed(self.tx, "job", [nomination.job_id])

    def _try(self, job_id: int, change: Callable[[], None]) -> bool:
        """One decision in a savepoint: False, and nothing of it is written, when its assumptions broke."""
        try:
            with self.tx.connection.begin_nested():
                change()
        except (StaleTransition, IntegrityError) as error:
            log.info("decision_dropped job_id=%s why=%s", job_id, str(error).split("\n", 1)[0])
            self.dropped.add(job_id)
            return False
        return True

    # --- What is told ------------------------------------------------------------------------------------------------

    def _promote(self) -> None:
        rows = [{"job_id": job_id, "at": at} for job_id, at in self.orders.promoted.items()]
        if rows:
            self.tx.connection.execute(_PROMOTE, rows)
            mark_all_changed(self.tx, "job", self.orders.promoted)

    def _tell(self) -> None:
        rows = [
            {"job_id": job_id, "new_reason": text}
            for job_id, text in self.orders.reasons.items()
            if job_id not in self.dropped
        ]
        if rows:
            self.tx.connection.execute(_SET_REASON, rows)
            self.tx.wake(*(f"job:{row['job_id']}" for row in rows))
