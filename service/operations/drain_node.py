"""Drain a node: it gets no new work, and the jobs that resume are stopped after a checkpoint and placed elsewhere.

What cannot go on elsewhere runs on to its end, unless the admin wants it stopped as well: a job that does not resume,
and one whose checkpoints the nodes that take work cannot read (without a shared folder they lie on its own nodes, as
the one that it would write when it is stopped does) or that none of these could hold. What has not begun is always
taken back. A job stopped by a drain starts again, at no charge. The sweeper repeats `stop_for_drain`, for a server that
ends in between, for what was just being placed and for what can move by now.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from sqlalchemy import ColumnElement, Connection, exists, select

from gangline.protocol.outcomes import StopIntent
from service.db.resuming import does_resume
from service.db.session import Database, Write
from service.db.tables import attempt_nodes, attempts, jobs, nodes
from service.domain.checkpoints import CheckpointHome
from service.domain.states import AttemptNodeState, AttemptState
from service.operations.cordon_node import set_cordon
from service.operations.job_lock import lock_job_of
from service.operations.named_node import lock_node
from service.operations.stop_attempt import stop_attempt
from service.scheduler.capability import never_fits
from service.scheduler.facts import NodeView, RunningJob, WaitingJob
from service.scheduler.load_nodes import load_nodes
from service.scheduler.load_world import load_jobs
from service.scheduler.world import World
from service.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Drained:
    """What a drain means for the jobs on the node."""

    stopped: tuple[int, ...]
    """Ids of jobs that stop for it, or did already."""
    going_on: tuple[int, ...]
    """Ids of jobs that run on to their end."""
    cannot_move: tuple[tuple[int, str], ...]
    """Of both: the jobs that can go on nowhere else as the pool is now, and why."""


@dataclass(frozen=True, kw_only=True)
class OnNode:
    """An attempt on a draining node, and what a drain is to it."""

    attempt: Any
    """Row with id, job_id, state, node_name, cordon_reason and `resumes`."""
    stays_because: str | None
    """Why its job could go on nowhere else; None: it could."""

    @property
    def gives_way(self) -> bool:
        """Whether a drain alone stops it: nothing of it has begun, or its job goes on elsewhere from a checkpoint."""
        has_begun = self.attempt.state != AttemptState.ALLOCATED
        return not has_begun or (bool(self.attempt.resumes) and self.stays_because is None)


_earlier = attempts.alias("earlier")
_HAS_SAVED = exists(
    select(_earlier.c.id).where(
        _earlier.c.job_id == attempts.c.job_id,
        _earlier.c.checkpointed_at.is_not(None),
        _earlier.c.forgotten_at.is_(None),
    )
)
_HELD_BY = (
    select(
        attempts.c.id,
        attempts.c.job_id,
        attempts.c.state,
        nodes.c.name.label("node_name"),
        nodes.c.cordon_reason,
        _HAS_SAVED.label("has_saved"),
    )
    .join(attempt_nodes, attempt_nodes.c.attempt_id == attempts.c.id)
    .join(nodes, nodes.c.id == attempt_nodes.c.node_id)
    .join(jobs, jobs.c.id == attempts.c.job_id)
    .where(attempt_nodes.c.state != AttemptNodeState.ENDED, attempts.c.state != AttemptState.ENDED)
    .order_by(attempts.c.job_id)
)


def drain_node(
    database: Database, settings: Settings, *, name: str, reason: str, until: float | None, is_now: bool, actor: str
) -> Drained:
    """Drain a node until `until` (epoch seconds; None: until it is resumed). `is_now`: stop also what would run on.
    Raises NotFound."""
    with database.write() as tx:
        node = lock_node(tx, name)
        set_cordon(tx, node, reason=reason, until=until, actor=actor, is_draining=True)
    with database.read() as connection:
        held = _load_held(connection, database.now(connection), settings, nodes.c.id == node.id)
    stopped = [one for one in held if is_now or one.gives_way]
    for one in stopped:
        with database.write() as tx:
            stop_for_drain(tx, one.attempt, actor=actor, settle_seconds=settings.settle_seconds)
    return Drained(
        stopped=tuple(one.attempt.job_id for one in stopped),
        going_on=tuple(one.attempt.job_id for one in held if one not in stopped),
        cannot_move=tuple((one.attempt.job_id, one.stays_because) for one in held if one.stays_because is not None),
    )


def load_in_the_way(connection: Connection, now: float, settings: Settings) -> list[Any]:
    """Attempts on draining nodes that give way and were not told yet."""
    is_over = nodes.c.cordon_until.is_not(None) & (nodes.c.cordon_until <= now)
    held = _load_held(connection, now, settings, nodes.c.is_draining & ~is_over)
    return [one.attempt for one in held if one.gives_way and one.attempt.state != AttemptState.STOPPING]


def _load_held(connection: Connection, now: float, settings: Settings, where: ColumnElement[bool]) -> list[OnNode]:
    found = connection.execute(_HELD_BY.add_columns(does_resume(connection).label("resumes")).where(where)).all()
    if not found:
        return []
    views = load_nodes(connection, now, settings, with_changed_at=False)
    running = load_jobs(connection, now, {attempt.job_id for attempt in found}).running
    return [
        OnNode(attempt=attempt, stays_because=_why_it_stays(attempt, running.get(attempt.job_id), views, now))
        for attempt in found
    ]


def _why_it_stays(attempt: Any, run: RunningJob | None, views: Sequence[NodeView], now: float) -> str | None:
    if run is None:  # it has ended meanwhile
        return None
    job = replace(run.job, home=_home_after_stop(attempt, run, views), held_by=None, not_before=None)
    takers = [view for view in views if view.blocked_by is None]
    if _could_run(job, [view for view in takers if job.may_run_on(view)], now):
        return None
    if job.home is None or not _could_run(job, takers, now):
        return "no other node that takes work could hold it"
    if job.home.shared_folder_id is not None:
        return "checkpoints lie in a shared folder that too few other nodes see"
    return f"checkpoints lie on {', '.join(job.home.node_names)} alone"


def _home_after_stop(attempt: Any, run: RunningJob, views: Sequence[NodeView]) -> CheckpointHome | None:
    """Where the job would find its newest checkpoint once the attempt has stopped; None: it has none to find."""
    home = run.job.home
    if home is None or not attempt.resumes:
        return None
    if attempt.state == AttemptState.ALLOCATED:
        return home if attempt.has_saved else None
    if home.shared_folder_id is not None:
        return home
    own = {share.node_id for share in run.gang.shares}
    # It writes one more when it is told to stop, on its own nodes.
    return replace(home, node_names=tuple(sorted(view.name for view in views if view.id in own)))


def _could_run(job: WaitingJob, views: Sequence[NodeView], now: float) -> bool:
    """Whether these nodes could hold the job if they were idle."""
    if not views:
        return False
    world = World(views, [replace(job, home=None)], now=now)
    (lane,) = world.queue.lanes.values()
    return not never_fits(world, lane)


def stop_for_drain(tx: Write, attempt: Any, *, actor: str, settle_seconds: float) -> None:
    """Ask one attempt to leave a draining node; nothing when it has ended, or stops already."""
    lock_job_of(tx, attempt.id)
    stop_attempt(
        tx,
        attempt.id,
        StopIntent.DRAIN,
        detail=f"{attempt.node_name} is drained: {attempt.cordon_reason}",
        settle_seconds=settle_seconds,
        actor=actor,
    )
