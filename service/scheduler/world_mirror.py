"""The scheduler's world, kept by changes: what others marked as changed is read again, and nothing else.

Each minute it is compared with one that is read anew; a difference is logged by name, and the new one is taken. The
marks are deleted with the pass that used them. Part of the scheduler's shell. Not for: what a world is (`world`), nor
how rows become facts (`load_world`, `load_nodes`).
"""

from __future__ import annotations

import logging
from collections import defaultdict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any, Final

from sqlalchemy import Connection, select

from service.db.session import Database
from service.db.tables import attempts, world_changes
from service.domain.states import AttemptState
from service.scheduler.facts import Measured, NodeView, RunningJob, WaitingJob
from service.scheduler.jobs import Run
from service.scheduler.load_nodes import load_blocks, load_nodes
from service.scheduler.load_nominations import load_nominations
from service.scheduler.load_world import (
    LoadedJobs,
    load_ended_ratios,
    load_jobs,
    load_teams,
    load_users,
    measured_of,
    world_of,
)
from service.scheduler.world import World
from service.settings import Settings

log = logging.getLogger("gangline.scheduler")

COMPARE_SECONDS: Final = 60.0
SAMPLE_SECONDS_PER_RUN: Final = 0.01
SAMPLE_SECONDS: Final = 10.0
"""Between looks at what running jobs report: so much for each of them, and at most so much in all."""
LEAST_NEWS_SECONDS: Final = 60.0
LEAST_NEWS_SHARE: Final = 0.05
"""A report is news when it differs by more than both from what was expected by now."""
MOST_CHANGES: Final = 2_000
"""Above so many changed jobs, reading all of them is cheaper."""

_CHANGES = select(world_changes.c.id, world_changes.c.kind, world_changes.c.key).order_by(world_changes.c.id)
_REPORTS = select(attempts.c.job_id, attempts.c.progress, attempts.c.checkpointed_at).where(
    attempts.c.state == AttemptState.RUNNING
)


class _Untraceable(Exception):
    """A change that the kept world cannot follow: it is read anew."""


class WorldMirror:
    """Keeps a world. After any error in `refresh`, call `forget`."""

    def __init__(self, database: Database, settings: Settings):
        self._database = database
        self._settings = settings
        self._world: World | None = None
        self._due: dict[int, float] = {}
        self._compared_at = 0.0
        self._sampled_at = 0.0
        self._last_progress: dict[int, str] = {}
        self._promotions_due = False
        self.reasons: dict[int, str | None] = {}
        """The reason of each waiting job that was written last, as JSON text."""
        self.read_changes: set[int] = set()
        """Marks that have been read and are still to be deleted."""
        self.dead_nominations: tuple[int, ...] = ()
        self.num_rebuilt = 0
        """How often it was read anew because it differed, or could not follow."""

    @property
    def world(self) -> World:
        """The world as of the last `refresh`."""
        assert self._world is not None, "refresh first"
        return self._world

    def forget(self) -> None:
        """Read everything anew at the next `refresh`."""
        self._world = None

    def refresh(self) -> float:
        """Bring the world up to date; returns the time for which it holds, epoch seconds of the database."""
        with self._database.read() as connection:
            if not self._database.is_sqlite:
                # What belongs together is read as of one moment.
                connection = connection.execution_options(isolation_level="REPEATABLE READ")
            now = self._database.now(connection)
            changes = self._read_changes(connection)
            if self._world is None:
                self._take(connection, now)
            else:
                self._follow(connection, changes, now)
            self._release(now)
        return now

    def next_due(self, now: float) -> float | None:
        """The earliest moment after `now` at which there is something to do though nothing has changed."""
        times = [at for at in self._due.values() if at > now]
        timer = self.world.next_timer(now)
        return min([*times, *([] if timer is None else [timer])], default=None)

    def newly_promoted(self) -> dict[int, float]:
        """Jobs whose promotion is not stored yet, and since when they are promoted."""
        if not self._promotions_due:
            return {}
        self._promotions_due = False
        return {
            entry.id: entry.promoted_at
            for entry in self.world.queue.entries.values()
            if entry.is_promoted and entry.job.promoted_at is None
        }

    # --- All of it ---------------------------------------------------------------------------------------------------

    def _take(self, connection: Connection, now: float) -> None:
        loaded = load_jobs(connection, now)
        nominations = load_nominations(connection, now)
        self._world = world_of(connection, now, self._settings, loaded, nominations)
        self.reasons = dict(loaded.reasons)
        self._due = dict(loaded.due)
        self.dead_nominations = nominations.dead
        self._compared_at = self._sampled_at = now
        self._last_progress = {}
        self._promotions_due = True

    def _follow(self, connection: Connection, changes: Mapping[str, Collection[int]], now: float) -> None:
        try:
            if len(changes["job"]) > MOST_CHANGES:
                raise _Untraceable("too many changes")
            self._follow_nodes(connection, changes["node"], now)
            self._follow_people(connection, changes)
            self._follow_jobs(connection, changes["job"], now)
            self._sample_reports(connection, now)
            self._follow_nominations(connection, now)
        except _Untraceable as why:
            log.info("world_read_anew why=%s", why)
            self.num_rebuilt += 1
            self._take(connection, now)
            return
        if abs(now - self._compared_at) >= COMPARE_SECONDS:
            self._compare(connection, now)

    def _compare(self, connection: Connection, now: float) -> None:
        kept = self.world
        kept.release_due(now)
        self._take(connection, now)
        self.world.release_due(now)
        if names := sorted(differences(kept, self.world)):
            self.num_rebuilt += 1
            log.warning("world_differs what=%s", ", ".join(names[:20]))
        else:
            kept.take_ratios(self.world.ratios)
            self._world = kept

    def _release(self, now: float) -> None:
        promotion = self.world.queue.next_promotion()
        self._promotions_due = self._promotions_due or (promotion is not None and promotion <= now)
        if (due := self.world.next_due()) is not None and due <= now:
            self.world.release_due(now)

    # --- Changes -----------------------------------------------------------------------------------------------------

    def _read_changes(self, connection: Connection) -> Mapping[str, Collection[int]]:
        found: defaultdict[str, set[int]] = defaultdict(set)
        for row in connection.execute(_CHANGES):
            if row.id not in self.read_changes:
                self.read_changes.add(row.id)
                found[row.kind].add(row.key)
        return found

    def _follow_nodes(self, connection: Connection, ids: Collection[int], now: float) -> None:
        world = self.world
        blocks = load_blocks(connection, now, self._settings)
        again = {*ids, *(blocks.keys() - world.nodes.keys())}
        if again or world.nodes.keys() - blocks.keys():
            seen = load_nodes(connection, now, self._settings, again, with_changed_at=False) if again else ()
            for view in seen:
                self._follow_node(view)
            for node_id in world.nodes.keys() - blocks.keys():
                if _is_used(world, node_id):
                    raise _Untraceable(f"node {node_id} has gone")
                world.remove_node(node_id)
        for node_id, block in blocks.items():
            view = world.nodes[node_id].view
            if (view.blocked_by, view.blocked_until) != block:
                world.set_node(replace(view, blocked_by=block.why, blocked_until=block.until))

    def _follow_node(self, view: NodeView) -> None:
        known = self.world.nodes.get(view.id)
        if known is None:
            self.world.set_node(view)
            return
        if known.view.gpus != view.gpus and _is_used(self.world, view.id):
            raise _Untraceable(f"the GPUs of {view.name} have changed")
        self.world.set_node(replace(view, changed_at=known.view.changed_at))

    def _follow_people(self, connection: Connection, changes: Mapping[str, Collection[int]]) -> None:
        if changes["team"]:
            for team in load_teams(connection, changes["team"]):
                self.world.set_team(team)
        if changes["user"]:
            for user in load_users(connection, changes["user"]):
                self.world.set_user(user)

    def _follow_jobs(self, connection: Connection, changed: Collection[int], now: float) -> None:
        ids = sorted({*changed, *(job_id for job_id, at in self._due.items() if at <= now)})
        if not ids:
            return
        loaded = load_jobs(connection, now, ids)
        gone = [job_id for job_id in ids if job_id not in loaded.waiting and job_id not in loaded.running]
        ratios = load_ended_ratios(connection, gone) if gone else {}
        for job_id in ids:
            self._due.pop(job_id, None)
            self.reasons.pop(job_id, None)
            _follow_job(self.world, job_id, loaded, ratios.get(job_id), now)
        self._due.update(loaded.due)
        self.reasons.update(loaded.reasons)

    def _follow_nominations(self, connection: Connection, now: float) -> None:
        world = self.world
        loaded = load_nominations(connection, now)
        self.dead_nominations = loaded.dead
        wanted = {nomination.job_id: nomination for nomination in loaded.alive}
        for job_id, nomination in list(world.nominations.items()):
            if wanted.get(job_id) != nomination:
                world.drop_nomination(job_id)
        for job_id, nomination in wanted.items():
            is_known = job_id in world.queue.entries or job_id in world.runs
            if job_id not in world.nominations and is_known:
                world.nominate(job_id, nomination.gang, nomination.after)

    def _sample_reports(self, connection: Connection, now: float) -> None:
        pause = min(SAMPLE_SECONDS, SAMPLE_SECONDS_PER_RUN * len(self.world.runs))
        if abs(now - self._sampled_at) < pause:
            return
        self._sampled_at = now
        last, self._last_progress = self._last_progress, {}
        for row in connection.execute(_REPORTS):
            run = self.world.runs.get(row.job_id)
            if run is None:
                continue
            if row.checkpointed_at is not None and row.checkpointed_at != run.checkpointed_at:
                self.world.checkpointed(row.job_id, row.checkpointed_at)
            if row.progress is None:
                continue
            self._last_progress[row.job_id] = row.progress
            if last.get(row.job_id) != row.progress:
                measured = measured_of(row.progress, run.useful_since)
                if measured is not None and _is_news(run, measured):
                    self.world.measured(row.job_id, measured.left_seconds, measured.at, measured.rate)


def _follow_job(world: World, job_id: int, loaded: LoadedJobs, ratio: float | None, now: float) -> None:
    waiting, running = loaded.waiting.get(job_id), loaded.running.get(job_id)
    if waiting is None and running is None:
        _drop_nomination_of(world, job_id)
        world.remove(job_id)
        world.ended(job_id, ratio)
    elif waiting is not None:
        if job_id in world.runs:
            if waiting.held_by is not None or (waiting.not_before or 0.0) > now:
                _drop_nomination_of(world, job_id)
            world.stopped(job_id, waiting, now)
        elif _waiting_in(world, job_id) != waiting:
            world.add_waiting(waiting, now)
    elif running is not None:
        _follow_run(world, job_id, running)


def _follow_run(world: World, job_id: int, running: RunningJob) -> None:
    run = world.runs.get(job_id)
    if run is None:
        _drop_nomination_of(world, job_id)
        world.remove(job_id)
        world.add_running(running)
        return
    known = _without_reports(run.facts())
    if known == _without_reports(running):
        return
    if replace(known, is_stopping=running.is_stopping) == _without_reports(running) and running.is_stopping:
        world.begin_stop(job_id)
        return
    measured = run.measured
    world.ended(job_id)
    world.add_running(replace(running, measured=measured) if measured is not None else running)


def _drop_nomination_of(world: World, job_id: int) -> None:
    if job_id in world.nominations:
        world.drop_nomination(job_id)


def _waiting_in(world: World, job_id: int) -> WaitingJob | None:
    entry = world.queue.entries.get(job_id) or world.nominated.get(job_id)
    return entry.job if entry is not None else world.held.get(job_id)


def _without_reports(run: RunningJob) -> RunningJob:
    """What is told by marks; the rest is sampled."""
    return replace(run, measured=None, checkpointed_at=None, job=replace(run.job, home=None))


def _is_used(world: World, node_id: int) -> bool:
    node = world.nodes[node_id]
    return bool(node.runs or node.leaving or node.promised)


def _is_news(run: Run, measured: Measured) -> bool:
    if run.measured is None:
        return True
    expected = run.measured.left_seconds - run.measured.rate * (measured.at - run.measured.at)
    return abs(measured.left_seconds - expected) > max(LEAST_NEWS_SECONDS, LEAST_NEWS_SHARE * expected)


def differences(one: World, other: World) -> Iterator[str]:
    """Names of what two worlds say otherwise, but for what is only sampled, and turns that were fixed earlier."""
    mine, theirs = _comparable(one), _comparable(other)
    for kind, known in mine.items():
        for key in known.keys() | theirs[kind].keys():
            if known.get(key) != theirs[kind].get(key):
                yield f"{kind} {key}"


def _comparable(world: World) -> dict[str, dict[Any, Any]]:
    facts = world.facts()
    return {
        "node": {key: (replace(value[0], changed_at=0.0), *value[1:]) for key, value in facts["nodes"].items()},
        "running job": {key: _without_reports(run) for key, run in facts["runs"].items()},
        "waiting job": {key: job for key, (job, _) in facts["waiting"].items()},
        "held job": facts["held"],
        "nomination of job": facts["nominations"],
        "GPUs of team": facts["team_gpus"],
        "GPUs of user": facts["user_gpus"],
        "team": world.teams,
        "user": world.users,
        "jobs that leave": {"": facts["num_freeing"]},
    }
