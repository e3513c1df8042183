"""Set what a team is guaranteed and the most that it may hold at once.

Nothing is stopped here. What a team then holds beyond its quota is borrowed, and the scheduler asks it back when
another team asks for its own.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import exists, func, not_, or_, select, update

from service.db.session import Database, Write
from service.db.tables import gpus, jobs, nodes, teams
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
from service.domain.states import JobState
from service.errors import InvalidRequest, NotFound

MEANINGS: Final[Mapping[str, str]] = {
    "quota_gpus": "guaranteed GPUs",
    "quota_nodes": "guaranteed whole nodes",
    "cap_gpus": "most GPUs at once",
}
"""Columns of a team that can be set, and what each says."""


def set_quota(
    database: Database, *, team: str, changes: Mapping[str, int | None], actor: str
) -> tuple[dict[str, int | None], list[str]]:
    """Set these columns of `MEANINGS` (None: none of it), keep the others. Returns all of them, and warnings.

    Quotas that add up to more than the pool has are accepted, since pools grow: a warning says the numbers. Another
    names teams whose jobs the first quota of the pool keeps from starting. Raises NotFound, and InvalidRequest for a
    cap below the team's own quota.
    """
    with database.write() as tx:
        row = tx.connection.execute(select(teams).where(teams.c.name == team).with_for_update()).one_or_none()
        if row is None:
            raise NotFound(f"there is no team {team}", fix="Look it up: gang admin team ls.")
        before = {name: getattr(row, name) for name in MEANINGS}
        after = {**before, **changes}
        _check(team, after)
        if after != before:
            tx.connection.execute(update(teams).where(teams.c.id == row.id).values(**after))
            changed = [name for name in MEANINGS if after[name] != before[name]]
            told = ", ".join(f"{MEANINGS[name]} {_shown(before[name])} → {_shown(after[name])}" for name in changed)
            add_event(
                tx,
                "team_quota",
                actor=actor,
                text=f"{actor} changed team {team}: {told}.",
                data={"team": team, "from": before, "to": after},
            )
            mark_changed(tx, "team", row.id)
        return after, [*_more_than_the_pool(tx), *_kept_from_starting(tx)]


def _check(team: str, after: Mapping[str, int | None]) -> None:
    quota, cap = after["quota_gpus"], after["cap_gpus"]
    if quota is not None and cap is not None and cap < quota:
        raise InvalidRequest(
            f"team {team} would be guaranteed {quota} GPUs and could hold at most {cap} of them",
            fix=f"Set a cap of at least {quota}, a smaller quota, or no cap.",
        )


def _shown(number: int | None) -> str:
    return "none" if number is None else str(number)


def _more_than_the_pool(tx: Write) -> list[str]:
    """Where the quotas of all teams exceed the pool as it is now."""
    sums: Any = tx.connection.execute(select(func.sum(teams.c.quota_gpus), func.sum(teams.c.quota_nodes))).one()
    num_gpus = select(func.count()).select_from(gpus).where(gpus.c.removed_at.is_(None))
    num_nodes = select(func.count()).select_from(nodes).where(nodes.c.last_heartbeat_at.is_not(None))
    promised = zip(("GPUs", "whole nodes"), sums, (num_gpus, num_nodes), strict=True)
    warnings = []
    for what, total, query in promised:
        has = tx.connection.execute(query).scalar_one()
        if total is not None and total > has:
            warnings.append(
                f"The teams' quotas add up to {total} {what}, and the pool has {has}: not all of them can have what "
                "they are guaranteed at the same time."
            )
    return warnings


def _kept_from_starting(tx: Write) -> list[str]:
    """Which teams have no quota where others do, and wait with jobs that cannot be stopped: these must not borrow."""
    has_quota = or_(teams.c.quota_gpus.is_not(None), teams.c.quota_nodes.is_not(None))
    if not tx.connection.execute(select(exists().where(has_quota))).scalar_one():
        return []
    query = (
        select(teams.c.name, func.count())
        .join(jobs, jobs.c.team_id == teams.c.id)
        .where(
            jobs.c.state == JobState.WAITING,
            jobs.c.is_preemptible.is_(False),
            or_(jobs.c.gpus_per_node > 0, jobs.c.is_exclusive),  # the others take no GPU, so they borrow none
            not_(has_quota),
        )
        .group_by(teams.c.name)
        .order_by(teams.c.name)
    )
    return [
        f"Team {name} has no quota, so its jobs borrow, and {number} of those that wait cannot be stopped: such jobs "
        f"must not borrow and do not start. Give it one: gang admin quota {name} --gpus N."
        for name, number in tx.connection.execute(query)
    ]
