"""Set what a team is guaranteed and the most that it may hold at once. Nothing running is touched by it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from sqlalchemy import func, select, update

from service.db.session import Database, Write
from service.db.tables import gpus, nodes, teams
from service.db.transitions import add_event
from service.db.world_changes import mark_changed
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

    Quotas that add up to more than the pool has are accepted, since pools grow: a warning says the numbers. Raises
    NotFound, and InvalidRequest for a cap below the team's own quota.
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
        return after, _warnings(tx)


def _check(team: str, after: Mapping[str, int | None]) -> None:
    quota, cap = after["quota_gpus"], after["cap_gpus"]
    if quota is not None and cap is not None and cap < quota:
        raise InvalidRequest(
            f"team {team} would be guaranteed {quota} GPUs and could hold at most {cap} of them",
            fix=f"Set a cap of at least {quota}, a smaller quota, or no cap.",
        )


def _shown(number: int | None) -> str:
    return "none" if number is None else str(number)


def _warnings(tx: Write) -> list[str]:
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
