"""Quotas and caps: what a team or user may still take, and whose GPUs may be taken back. Pure.

A quota is a promise: within it a team gets GPUs whenever it asks, if need be back from whoever borrows. Beyond it a
team borrows what others leave idle, with jobs that can be stopped. Reclaim ends where the lender has its quota; a team
never loses GPUs that it holds within its own. A cap is a bound that idle GPUs do not lift.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum
from typing import Final

from service.scheduler.jobs import Run
from service.scheduler.queue import Lane
from service.scheduler.world import World


class Standing(IntEnum):
    """How a job would run; the smaller go first."""

    IN_QUOTA = 0
    BORROWS = 1


@dataclass(frozen=True, kw_only=True)
class Bound:
    """Why a job must not start though GPUs may be free."""

    kind: str
    """`team_cap`, `user_cap`, `cannot_borrow`, or `cannot_borrow_nodes`: its numbers are of whole nodes."""
    limit: int
    used: int
    asked: int


NO_QUOTA: Final = 0


def standing_of(world: World, lane: Lane) -> Standing:
    """Whether the next job of the lane would run within its team's quota. Who asks for no GPU borrows none."""
    asked = asked_gpus(lane)
    if not world.has_quotas or not asked:
        return Standing.IN_QUOTA
    team = world.teams.get(lane.team_id)
    if team is None:
        return Standing.BORROWS
    used = world.team_gpus[lane.team_id]
    in_gpus = used + asked <= (NO_QUOTA if team.quota_gpus is None else team.quota_gpus)
    if team.quota_nodes is not None and takes_whole_nodes(lane):
        num_nodes = lane.shape.layouts[-1].num_nodes
        in_nodes = world.team_nodes[lane.team_id] + num_nodes <= team.quota_nodes
        return Standing.IN_QUOTA if in_nodes and (in_gpus or team.quota_gpus is None) else Standing.BORROWS
    return Standing.IN_QUOTA if in_gpus else Standing.BORROWS


def bound_of(world: World, lane: Lane, standing: Standing) -> Bound | None:
    """What forbids the next job of the lane to start, or None."""
    team, asked = world.teams.get(lane.team_id), asked_gpus(lane)
    if not asked:
        return None
    if team is not None and team.cap_gpus is not None:
        used = world.team_gpus[lane.team_id]
        if used + asked > team.cap_gpus:
            return Bound(kind="team_cap", limit=team.cap_gpus, used=used, asked=asked)
    user = world.users.get(lane.user_id)
    if user is not None and user.cap_gpus is not None:
        used = world.user_gpus[lane.user_id]
        if used + asked > user.cap_gpus:
            return Bound(kind="user_cap", limit=user.cap_gpus, used=used, asked=asked)
    if world.has_quotas and standing is Standing.BORROWS and not lane.may_borrow:
        return _bound_of_quota(world, lane, asked)
    return None


def _bound_of_quota(world: World, lane: Lane, asked: int) -> Bound:
    """Which part of its team's quota the next job of the lane does not fit into."""
    team, used = world.teams.get(lane.team_id), world.team_gpus[lane.team_id]
    fits_in_gpus = team is not None and (team.quota_gpus is None or used + asked <= team.quota_gpus)
    if team is not None and team.quota_nodes is not None and takes_whole_nodes(lane) and fits_in_gpus:
        num_nodes, held = lane.shape.layouts[-1].num_nodes, world.team_nodes[lane.team_id]
        return Bound(kind="cannot_borrow_nodes", limit=team.quota_nodes, used=held, asked=num_nodes)
    return Bound(kind="cannot_borrow", limit=guaranteed_gpus(world, lane.team_id), used=used, asked=asked)


def asked_gpus(lane: Lane) -> int:
    """GPUs that the next job of the lane takes from others at least; of whole nodes all, used or not."""
    if not lane.shape.is_exclusive:
        return lane.num_gpus
    return max(lane.num_gpus, lane.shape.layouts[-1].num_nodes * largest_node(lane))


def count_in(world: World, lane: Lane) -> None:
    """Count what the next job of the lane would take, as if it had it."""
    asked = asked_gpus(lane)
    world.team_gpus[lane.team_id] += asked
    world.user_gpus[lane.user_id] += asked
    if asked and takes_whole_nodes(lane):
        world.team_nodes[lane.team_id] += lane.shape.layouts[-1].num_nodes


def most_gpus(world: World, lane: Lane, standing: Standing) -> int | None:
    """How many GPUs an elastic job may take at most, so that no cap or quota is passed; None: any number."""
    bounds: list[int] = []
    if not asked_gpus(lane):
        return None
    team, user = world.teams.get(lane.team_id), world.users.get(lane.user_id)
    if team is not None and team.cap_gpus is not None:
        bounds.append(team.cap_gpus - world.team_gpus[lane.team_id])
    if user is not None and user.cap_gpus is not None:
        bounds.append(user.cap_gpus - world.user_gpus[lane.user_id])
    if world.has_quotas and standing is Standing.IN_QUOTA and not lane.may_borrow and team is not None:
        bounds.append(lane.num_gpus if team.quota_gpus is None else team.quota_gpus - world.team_gpus[lane.team_id])
    if bounds and lane.shape.is_exclusive:  # it takes whole nodes: `bound_of` has counted those of its least layout
        return lane.num_gpus
    return min(bounds, default=None)


def takes_whole_nodes(lane: Lane) -> bool:
    """Whether each of its shares takes all GPUs of a node of the pool."""
    share = lane.shape.layouts[-1].gpus_per_node
    return lane.shape.is_exclusive or (share > 0 and share >= largest_node(lane))


def largest_node(lane: Lane) -> int:
    """GPUs of the largest node that the lane may use."""
    return len(lane.index.buckets) - 1


def borrowed_gpus(world: World, team_id: int) -> int:
    """GPUs that a team holds beyond its quota."""
    return max(0, world.team_gpus[team_id] - guaranteed_gpus(world, team_id))


def guaranteed_gpus(world: World, team_id: int) -> int:
    """GPUs that a team has within its quota; of a quota of nodes alone, those of the nodes that it holds."""
    team = world.teams.get(team_id)
    if team is None:
        return NO_QUOTA
    if team.quota_gpus is None and team.quota_nodes is not None:
        return min(world.team_nodes[team_id], team.quota_nodes) * world.largest_node
    return NO_QUOTA if team.quota_gpus is None else team.quota_gpus


def are_borrowed(world: World, lane: Lane, victims: Iterable[Run]) -> bool:
    """Whether each of these runs of other teams could be stopped while its team still holds more than its quota."""
    if not world.has_quotas:
        return True
    sizes: defaultdict[int, list[int]] = defaultdict(list)
    for run in victims:
        if run.job.team_id != lane.team_id:
            sizes[run.job.team_id].append(run.counted[0])
    return all(sum(taken) - max(taken) < borrowed_gpus(world, team_id) for team_id, taken in sizes.items())


def may_stop(world: World, lane: Lane, standing: Standing, run: Run) -> bool:
    """Whether quotas let a job of this lane stop that run because it pays (not to reclaim)."""
    if not world.has_quotas or run.job.team_id == lane.team_id:
        return True
    return borrowed_gpus(world, run.job.team_id) > 0 and standing in (Standing.IN_QUOTA, Standing.BORROWS)
