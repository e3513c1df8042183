"""Read who held GPUs in a window of time, as far as the caller may see it. The sums are `service.domain.usage`."""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import Connection, func, or_, select, true

from service.auth.principals import Principal
from service.db.tables import allocations, attempt_nodes, attempts, jobs, teams, users
from service.domain.usage import AttemptUse, HeldShare


@dataclass(frozen=True, kw_only=True)
class Window:
    """From `since` to before `until`, epoch seconds."""

    since: float
    until: float


def load_usage(connection: Connection, principal: Principal, window: Window, *, now: float) -> list[AttemptUse]:
    """Every attempt that held a GPU in the window: of all for an admin, else of one's own teams and of oneself."""
    in_window = (
        select(attempt_nodes.c.attempt_id)
        .join(allocations, allocations.c.attempt_node_id == attempt_nodes.c.id)
        .where(
            allocations.c.allocated_at < window.until,
            or_(allocations.c.released_at.is_(None), allocations.c.released_at > window.since),
        )
    )
    is_visible = (
        true()
        if principal.is_admin
        else or_(jobs.c.owner_id == principal.user_id, jobs.c.team_id.in_([team_id for team_id, _ in principal.teams]))
    )
    rows = connection.execute(
        select(
            attempts.c.id,
            attempts.c.job_id,
            users.c.name.label("user"),
            teams.c.name.label("team"),
            attempts.c.busy_gpu_seconds,
            attempts.c.lost_gpu_seconds,
            attempts.c.ended_at,
            func.count().label("num_gpus"),
            func.min(allocations.c.allocated_at).label("held_from"),
            allocations.c.released_at,
        )
        .join(attempt_nodes, attempt_nodes.c.attempt_id == attempts.c.id)
        .join(allocations, allocations.c.attempt_node_id == attempt_nodes.c.id)
        .join(jobs, jobs.c.id == attempts.c.job_id)
        .join(users, users.c.id == jobs.c.owner_id)
        .join(teams, teams.c.id == jobs.c.team_id)
        .where(attempts.c.id.in_(in_window), is_visible)
        .group_by(
            attempts.c.id,
            attempts.c.job_id,
            users.c.name,
            teams.c.name,
            attempts.c.busy_gpu_seconds,
            attempts.c.lost_gpu_seconds,
            attempts.c.ended_at,
            attempt_nodes.c.id,
            allocations.c.released_at,
        )
        .order_by(attempts.c.id)
    )
    shares: dict[int, list[HeldShare]] = {}
    facts = {}
    for row in rows:
        facts[row.id] = row
        until = now if row.released_at is None else row.released_at
        share = HeldShare(num_gpus=row.num_gpus, since=row.held_from, until=max(row.held_from, until))
        shares.setdefault(row.id, []).append(share)
    return [
        AttemptUse(
            job_id=row.job_id,
            user=row.user,
            team=row.team,
            busy_gpu_seconds=row.busy_gpu_seconds,
            lost_gpu_seconds=row.lost_gpu_seconds,
            ended_at=row.ended_at,
            shares=tuple(shares[attempt_id]),
        )
        for attempt_id, row in facts.items()
    ]
