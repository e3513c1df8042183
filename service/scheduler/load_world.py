"""Load the scheduler's `World` from SQL, whole or job by job. Part of the shell: `world` itself is pure.

Not for: nodes (`load_nodes`), nor keeping a world by changes (`world_mirror`).
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Final

from sqlalchemy import ColumnElement, Connection, Row, Select, func, select

from service.db.dependencies import load_needs
from service.db.resuming import does_resume, kind_of
from service.db.tables import allocations, attempt_nodes, attempts, checkpoints, jobs, nodes, teams, users
from service.domain.checkpoints import CheckpointHome
from service.domain.gang_layout import GangLayout, layouts_of
from service.domain.progress import Progress
from service.domain.reasons import Reason
from service.domain.states import AttemptNodeState, AttemptState, JobState
from service.domain.training_evidence import TRAINED_KINDS
from service.scheduler.estimates import REPORT_COUNTS_AFTER_SECONDS
from service.scheduler.facts import EndedRatio, Measured, NodeShare, PlacedGang, RunningJob, Team, User, WaitingJob
from service.scheduler.holds import HoldFacts, hold_of
from service.scheduler.load_nodes import load_nodes
from service.scheduler.load_nominations import LoadedNominations, load_nominations
from service.scheduler.world import World
from service.settings import Settings

__all__ = ["LoadedJobs", "load_jobs", "load_nodes", "load_ratios", "load_world", "measured_of"]

ACTIVE: Final = (JobState.WAITING, JobState.STARTING, JobState.RUNNING, JobState.STOPPING)
RATIO_DAYS: Final = 90.0
MAX_RATIOS_READ: Final = 20_000

_JOBS = select(
    jobs.c.id,
    jobs.c.owner_id,
    jobs.c.team_id,
    jobs.c.state,
    jobs.c.priority,
    jobs.c.submitted_at,
    jobs.c.gpu_type,
    jobs.c.gpu_memory_bytes,
    jobs.c.node_labels,
    jobs.c.is_exclusive,
    jobs.c.memory_bytes_per_node,
    jobs.c.not_before,
    jobs.c.reason,
    jobs.c.layouts,
    jobs.c.num_nodes,
    jobs.c.gpus_per_node,
    jobs.c.processes_per_node,
    jobs.c.cpus_per_node,
    jobs.c.is_preemptible,
    jobs.c.limit_seconds,
    jobs.c.hold_reason,
    jobs.c.start_after,
    jobs.c.start_zone,
    jobs.c.wait_began_at,
    jobs.c.num_stops,
    jobs.c.num_attempts,
    jobs.c.served_seconds,
    jobs.c.measured_left_seconds,
    jobs.c.promoted_at,
).where(jobs.c.state.in_(ACTIVE))
_OPEN_ATTEMPTS = select(
    attempts.c.id,
    attempts.c.job_id,
    attempts.c.state,
    attempts.c.nominated_for,
    attempts.c.num_nodes,
    attempts.c.gpus_per_node,
    attempts.c.processes_per_node,
    attempts.c.progress,
    attempts.c.checkpointed_at,
    attempts.c.shared_folder_id,
    attempts.c.resume_from,
    attempts.c.created_at,
).where(attempts.c.state != AttemptState.ENDED)
_PARTS = (
    select(
        attempt_nodes.c.attempt_id,
        attempt_nodes.c.node_id,
        attempt_nodes.c.cpus,
        nodes.c.name.label("node_name"),
        nodes.c.shared_folder_id,
        allocations.c.gpu_index,
    )
    .join(attempts, attempts.c.id == attempt_nodes.c.attempt_id)
    .join(nodes, nodes.c.id == attempt_nodes.c.node_id)
    .join(
        allocations,
        (allocations.c.attempt_node_id == attempt_nodes.c.id) & allocations.c.released_at.is_(None),
        isouter=True,
    )
    .where(attempt_nodes.c.state != AttemptNodeState.ENDED, attempts.c.state != AttemptState.ENDED)
    .order_by(attempt_nodes.c.node_rank, allocations.c.gpu_index)
)
_EARLIER_STARTS = (
    select(attempts.c.job_id, attempts.c.running_at - attempts.c.created_at)
    .join(jobs, jobs.c.id == attempts.c.job_id)
    .where(
        attempts.c.state == AttemptState.ENDED,
        attempts.c.running_at.is_not(None),
        jobs.c.state.in_((JobState.STARTING, JobState.RUNNING, JobState.STOPPING)),
    )
    .order_by(attempts.c.job_id, attempts.c.number)
)
_later = attempts.alias("later")
_FOLDERS = (
    select(attempts.c.job_id, attempts.c.shared_folder_id, nodes.c.name)
    .join(jobs, jobs.c.id == attempts.c.job_id)
    .join(attempt_nodes, attempt_nodes.c.attempt_id == attempts.c.id)
    .join(nodes, nodes.c.id == attempt_nodes.c.node_id)
    .where(
        jobs.c.is_preemptible,
        jobs.c.state.in_(ACTIVE),
        attempts.c.number
        == select(func.max(_later.c.number))
        .where(_later.c.job_id == jobs.c.id, _later.c.checkpointed_at.is_not(None), _later.c.forgotten_at.is_(None))
        .scalar_subquery(),
    )
    .order_by(attempts.c.job_id, nodes.c.name)
)
"""Nodes of the newest attempt of each job that told of a checkpoint which counts."""
_RATIOS = (
    select((jobs.c.served_seconds / jobs.c.limit_seconds).label("ratio"), jobs.c.owner_id, jobs.c.team_id)
    .where(
        jobs.c.state.in_([state for state in JobState if state.is_terminal]),
        jobs.c.started_at.is_not(None),
        jobs.c.limit_seconds > 0,
        jobs.c.served_seconds > 0,  # one that never ran says nothing of its limit
    )
    .order_by(jobs.c.submitted_at.desc())
    .limit(MAX_RATIOS_READ)
)
_TEAMS = select(teams.c.id, teams.c.name, teams.c.quota_gpus, teams.c.quota_nodes, teams.c.cap_gpus)
_USERS = select(users.c.id, users.c.name, users.c.cap_gpus)


@dataclass
class LoadedJobs:
    """Jobs that wait or hold GPUs, by id."""

    waiting: dict[int, WaitingJob] = field(default_factory=dict)
    running: dict[int, RunningJob] = field(default_factory=dict)
    reasons: dict[int, str | None] = field(default_factory=dict)
    """Of the waiting ones: the stored reason, as JSON text."""
    due: dict[int, float] = field(default_factory=dict)
    """Of waiting ones that must not start before a time: when that is, epoch seconds."""


def load_world(connection: Connection, now: float, settings: Settings) -> tuple[World, dict[int, str | None]]:
    """The whole world, and the stored reason (JSON text) of each waiting job."""
    loaded = load_jobs(connection, now)
    return world_of(connection, now, settings, loaded, load_nominations(connection, now)), loaded.reasons


def world_of(
    connection: Connection, now: float, settings: Settings, loaded: LoadedJobs, nominations: LoadedNominations
) -> World:
    """The world of these jobs and nominations, with the nodes, teams and users as they are."""
    return World(
        load_nodes(connection, now, settings),
        loaded.waiting.values(),
        loaded.running.values(),
        teams=load_teams(connection),
        users=load_users(connection),
        nominations=nominations.alive,
        ratios=load_ratios(connection, now),
        now=now,
    )


def load_jobs(connection: Connection, now: float, ids: Collection[int] | None = None) -> LoadedJobs:
    """All jobs that wait or hold GPUs, or those among `ids`; one that is in neither part has ended."""

    def some(query: Select[Any], column: ColumnElement[Any]) -> Select[Any]:
        return query if ids is None else query.where(column.in_(ids))

    kind, resumes = kind_of(connection).label("kind"), does_resume(connection).label("resumes")
    rows = connection.execute(some(_JOBS.add_columns(kind, resumes), jobs.c.id)).all()
    needs = load_needs(connection, None if ids is None else [row.id for row in rows])
    folders = some(_FOLDERS.where(kind_of(connection).not_in(TRAINED_KINDS)), attempts.c.job_id)
    homes = {**_load_homes(connection, ids), **_homes_of_folders(connection.execute(folders))}
    restores = {row[0]: row[1] for row in connection.execute(some(_EARLIER_STARTS, attempts.c.job_id))}
    parts: defaultdict[int, list[Row[Any]]] = defaultdict(list)
    for part in connection.execute(some(_PARTS, attempts.c.job_id)):
        parts[part.attempt_id].append(part)
    open_attempts = {row.job_id: row for row in connection.execute(some(_OPEN_ATTEMPTS, attempts.c.job_id))}
    loaded = LoadedJobs()
    for row in rows:
        attempt = open_attempts.get(row.id)
        is_trained = row.kind in TRAINED_KINDS
        common = {
            "is_preemptible": bool(row.resumes),
            "may_borrow": bool(row.is_preemptible),
            "will_report": is_trained,
            "home": homes.get(row.id),
        }
        if row.state == JobState.WAITING:
            hold = hold_of(
                HoldFacts(
                    job_id=row.id,
                    hold_reason=row.hold_reason,
                    start_after=row.start_after,
                    start_zone=row.start_zone,
                    needs=needs.get(row.id, ()),
                ),
                now,
            )
            if hold is not None and hold[1] is not None:
                loaded.due[row.id] = hold[1]
            loaded.reasons[row.id] = row.reason
            loaded.waiting[row.id] = _job_of(row, hold, **common)
        elif attempt is not None:
            held = parts[attempt.id]
            if is_trained:
                common["home"] = _home_of_run(attempt, held, homes.get(row.id))
            loaded.running[row.id] = _run_of(_job_of(row, None, **common), attempt, held, restores.get(row.id, 0.0))
    return loaded


def load_teams(connection: Connection, ids: Collection[int] | None = None) -> list[Team]:
    """All teams, or those of `ids`."""
    query = _TEAMS if ids is None else _TEAMS.where(teams.c.id.in_(ids))
    return [Team(**row._mapping) for row in connection.execute(query)]


def load_users(connection: Connection, ids: Collection[int] | None = None) -> list[User]:
    """The users with a cap; of `ids`, all."""
    query = _USERS.where(users.c.cap_gpus.is_not(None)) if ids is None else _USERS.where(users.c.id.in_(ids))
    return [User(**row._mapping) for row in connection.execute(query)]


def load_ratios(connection: Connection, now: float) -> list[EndedRatio]:
    """Real time over limit of the jobs that ended lately, the newest first."""
    recent = _RATIOS.where(jobs.c.submitted_at > now - RATIO_DAYS * 86_400.0)
    return [
        EndedRatio(ratio=min(1.0, float(row.ratio)), user_id=row.owner_id, team_id=row.team_id)
        for row in connection.execute(recent)
    ]


def load_ended_ratios(connection: Connection, ids: Iterable[int]) -> dict[int, float]:
    """Real time over limit of those of `ids` that ended and have one."""
    query = select(jobs.c.id, jobs.c.served_seconds / jobs.c.limit_seconds).where(
        jobs.c.id.in_(list(ids)),
        jobs.c.state.not_in(ACTIVE),
        jobs.c.started_at.is_not(None),
        jobs.c.limit_seconds > 0,
        jobs.c.served_seconds > 0,
    )
    return {job_id: min(1.0, float(ratio)) for job_id, ratio in connection.execute(query)}


def measured_of(stored: str | None, useful_since: float) -> Measured | None:
    """What a run last reported of the time that it has left, once it has run usefully for long enough to be believed.

    `stored`: the attempt's progress as JSON text.
    """
    if stored is None:
        return None
    progress = Progress.from_json(json.loads(stored))
    if progress.updated_at - useful_since < REPORT_COUNTS_AFTER_SECONDS:
        return None
    left = progress.eta_seconds(progress.updated_at)
    return None if left is None else Measured(left_seconds=left, at=progress.updated_at)


def _job_of(row: Row[Any], hold: tuple[Reason, float | None] | None, **more: Any) -> WaitingJob:
    """`hold`: as `hold_of` says it; until nobody knows when, a pause after a failed start tells nothing."""
    held_by, not_before = (None, row.not_before) if hold is None else hold
    labels: Mapping[str, str] = json.loads(row.node_labels) if row.node_labels else {}
    began = row.wait_began_at if row.start_after is None else max(row.wait_began_at, row.start_after)
    return WaitingJob(
        id=row.id,
        user_id=row.owner_id,
        team_id=row.team_id,
        priority=row.priority,
        submitted_at=row.submitted_at,
        layouts=layouts_of(row.layouts, row.num_nodes, row.gpus_per_node, row.processes_per_node, row.cpus_per_node),
        gpu_type=row.gpu_type,
        gpu_memory_bytes=row.gpu_memory_bytes,
        labels=tuple(sorted(labels.items())),
        is_exclusive=bool(row.is_exclusive),
        memory_bytes_per_node=row.memory_bytes_per_node,
        not_before=not_before,
        held_by=held_by,
        limit_seconds=row.limit_seconds,
        served_seconds=row.served_seconds,
        wait_began_at=began,
        num_stops=row.num_stops,
        measured_left=row.measured_left_seconds,
        promoted_at=row.promoted_at,
        **more,
    )


def _run_of(job: WaitingJob, attempt: Row[Any], parts: list[Row[Any]], restore_seconds: float) -> RunningJob:
    indices: dict[int, list[int]] = {}
    for part in parts:
        held = indices.setdefault(part.node_id, [])
        if part.gpu_index is not None:
            held.append(part.gpu_index)
    layout = GangLayout(
        num_nodes=attempt.num_nodes,
        gpus_per_node=attempt.gpus_per_node,
        processes_per_node=attempt.processes_per_node,
        cpus_per_node=parts[0].cpus if parts else job.least.cpus_per_node,
    )
    shares = tuple(NodeShare(node_id=node_id, gpu_indices=tuple(held)) for node_id, held in indices.items())
    return RunningJob(
        job=job,
        gang=PlacedGang(layout=layout, shares=shares),
        started_at=attempt.created_at,
        is_stopping=attempt.state == AttemptState.STOPPING and attempt.nominated_for is not None,
        is_leaving=attempt.state == AttemptState.STOPPING and attempt.nominated_for is None,
        restore_seconds=restore_seconds,
        measured=measured_of(attempt.progress, attempt.created_at + restore_seconds),
        checkpointed_at=attempt.checkpointed_at,
    )


def _home_of_run(attempt: Row[Any], parts: list[Row[Any]], known: CheckpointHome | None) -> CheckpointHome:
    """Where a running training will resume: where its checkpoints lie, or will once it writes the first."""
    if known is not None:
        return known
    names = tuple(sorted({part.node_name for part in parts}))
    if attempt.resume_from is not None:  # claimed, so that this is settled
        return CheckpointHome(shared_folder_id=attempt.shared_folder_id, node_names=names)
    return CheckpointHome.of_nodes({part.node_name: part.shared_folder_id for part in parts})


def _load_homes(connection: Connection, ids: Collection[int] | None) -> dict[int, CheckpointHome]:
    """Where the newest checkpoint of each job lies; jobs without any are not in it."""
    place = func.row_number().over(
        partition_by=checkpoints.c.job_id, order_by=(checkpoints.c.step.desc(), checkpoints.c.id.desc())
    )
    query = (
        select(checkpoints.c.job_id, checkpoints.c.shared_folder_id, checkpoints.c.node_names, place.label("place"))
        .join(jobs, jobs.c.id == checkpoints.c.job_id)
        .where(jobs.c.state.in_(ACTIVE), checkpoints.c.removed_at.is_(None))
    )
    ranked = (query if ids is None else query.where(checkpoints.c.job_id.in_(ids))).subquery()
    newest = select(ranked.c.job_id, ranked.c.shared_folder_id, ranked.c.node_names).where(ranked.c.place == 1)
    return {
        row.job_id: CheckpointHome.of_row(row.shared_folder_id, row.node_names) for row in connection.execute(newest)
    }


def _homes_of_folders(rows: Iterable[Row[Any]]) -> dict[int, CheckpointHome]:
    """Where the folders of scripts lie that told of a checkpoint: each node keeps its own, unless they share one.

    Where else a script may have saved is not known: it starts again where it surely finds it.
    """
    names: defaultdict[tuple[int, str | None], list[str]] = defaultdict(list)
    for row in rows:
        names[row.job_id, row.shared_folder_id].append(row.name)
    return {
        job_id: CheckpointHome(shared_folder_id=shared_folder_id, node_names=tuple(found))
        for (job_id, shared_folder_id), found in names.items()
    }
