"""Give a job more time: its limit is the total from then on. Refused where it breaks what another job was promised."""

from __future__ import annotations

from typing import Any

from sqlalchemy import Row, select, update

from gangline.protocol.durations import exact_duration
from gangline.protocol.outcomes import JobState
from service.clock import rfc3339
from service.db.session import Database
from service.db.tables import attempts, jobs, teams, users
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.domain.states import AttemptState
from service.errors import Conflict
from service.scheduler.load_world import load_world
from service.scheduler.promises import BrokenPromise, find_broken_promise
from service.scheduler.scheduling_pass import PolicyOptions
from service.settings import Settings


def extend_limit(database: Database, settings: Settings, job_id: int, *, seconds: float, actor: str) -> None:
    """Set the limit of a job to `seconds` in all; the supervisors of a running one are told.

    Raises Conflict for a job that ends or has no limit, for less time for one that runs, and for a broken promise.
    """
    with database.read() as connection:
        row = connection.execute(select(jobs).where(jobs.c.id == job_id)).one()
        _check(row, seconds)
        if row.state != JobState.WAITING:
            now = database.now(connection)
            world, _ = load_world(connection, now, settings)
            options = PolicyOptions(preemption=settings.preemption)
            broken = find_broken_promise(world, now, settings.policy, options, job_id, seconds)
            if broken is not None:
                raise _refusal(connection.execute(_OTHER.where(jobs.c.id == broken.job_id)).one(), broken, job_id)
    with database.write() as tx:
        row = tx.connection.execute(select(jobs).where(jobs.c.id == job_id).with_for_update()).one()
        _check(row, seconds)
        if row.limit_seconds == seconds:
            return
        tx.connection.execute(
            update(jobs).where(jobs.c.id == job_id).values(limit_seconds=seconds, version=jobs.c.version + 1)
        )
        told = tx.connection.execute(
            update(attempts)
            .where(attempts.c.job_id == job_id, attempts.c.state != AttemptState.ENDED)
            .values(directive_version=attempts.c.directive_version + 1)
            .returning(attempts.c.id)
        ).scalars()
        tx.wake(f"job:{job_id}", *(f"directive:{attempt_id}" for attempt_id in told))
        add_event(
            tx,
            "limit_changed",
            actor=actor,
            job_id=job_id,
            text=f"{actor} changed its time limit from {exact_duration(row.limit_seconds)} to "
            f"{exact_duration(seconds)} in all.",
            data={"from": row.limit_seconds, "to": seconds},
        )
        mark_changed(tx, "job", job_id)


_OTHER = (
    select(jobs.c.id, jobs.c.is_private, users.c.name.label("owner"), teams.c.name.label("team"))
    .join(users, users.c.id == jobs.c.owner_id)
    .join(teams, teams.c.id == jobs.c.team_id)
)


def _check(row: Row[Any], seconds: float) -> None:
    state = JobState(row.state)
    if state.is_terminal:
        raise Conflict(f"job {row.id} has ended ({state})", fix="Submit it again with more time: resources.time.")
    if state is JobState.STOPPING:
        raise Conflict(f"job {row.id} is stopping", fix="Wait until it has stopped: gang show.")
    if row.limit_seconds is None:
        raise Conflict(f"job {row.id} has no time limit", fix="Nothing to do: it runs until it ends.")
    if state is not JobState.WAITING and seconds < row.limit_seconds:
        raise Conflict(
            f"job {row.id} runs, and its limit is {exact_duration(row.limit_seconds)} in all: "
            f"{exact_duration(seconds)} would be less",
            fix="Name the total that it may run, not what is added.",
        )


def _refusal(other: Any, broken: BrokenPromise, job_id: int) -> Conflict:
    name = f"a private job of team {other.team}" if other.is_private else f"job {other.id} of {other.owner}"
    then = "at an unknown time" if broken.then_at is None else f"by {rfc3339(broken.then_at)}"
    return Conflict(
        f"{name} is to start by {rfc3339(broken.promised_at)} at the latest; with more time for job {job_id} it would "
        f"start {then}",
        fix="Let it write a checkpoint and go on in another attempt (on_time_limit: requeue), or ask for less time.",
    )
