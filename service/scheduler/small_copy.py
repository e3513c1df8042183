"""A small copy of the pool that behaves like it, so that looking ahead costs the same for pools of any size. Pure.

Of a large pool every so many nodes and, of the queue, every so many jobs are taken, and gangs shrink by the same
factor. Not for: decisions that are carried out.
"""

from __future__ import annotations

import bisect
from collections.abc import Container, Iterator
from dataclasses import dataclass, replace
from typing import Final

from service.domain.gang_layout import GangLayout
from service.scheduler.facts import PlacedGang, RunningJob, Team, User, WaitingJob
from service.scheduler.jobs import Entry, Run
from service.scheduler.world import World

MOST_NODES: Final = 160
"""A pool of up to so many nodes is copied whole: what is learnt from a part is much coarser."""
NODES_OF_PART: Final = 24
MOST_AHEAD: Final = 200
MOST_AHEAD_OF_PART: Final = 50
"""Jobs of the queue in the copy that have their turn before the one that it is made for."""
MOST_BEHIND: Final = 40


@dataclass(frozen=True, kw_only=True)
class SmallCopy:
    """The copy, with the job waiting in it."""

    world: World
    weight: float
    """How many jobs ahead each one there stands for, beside what the number of nodes explains."""
    is_whole: bool
    """Whether it has all nodes of the pool."""


def small_copy(world: World, job: WaitingJob, now: float) -> SmallCopy:
    """A copy in which `job` waits, whether it does in the world or not. Leaves the world as it is."""
    views = ((node, node.view) for node in world.nodes.values())
    able = [node for node, view in views if view.blocked_by is None or view.blocked_until is not None]
    # By what is free, so that a part has its share of full nodes and of those where a job still fits.
    able.sort(key=lambda node: (-node.available.bit_count(), node.order))
    factor = 1 if len(able) <= MOST_NODES else -(-len(able) // NODES_OF_PART)
    nodes = {node.id: node for node in able[::factor]}
    before, after = _counts(world, turn := _turn_of(world, job, now))
    stride = max(factor, -(-before // (MOST_AHEAD if factor == 1 else MOST_AHEAD_OF_PART)))
    rest = max(factor, -(-after // MOST_BEHIND))
    copy = World(
        (node.view for node in nodes.values()),
        teams=[_team(team, factor) for team in world.teams.values()],
        users=[_user(user, factor) for user in world.users.values()],
        order=world.order,
    )
    copy.ratios = world.ratios  # before any job is put in: they say how much time it has left
    there = {run.id: run for node in nodes.values() for run in (*node.runs.values(), *node.leaving.values())}
    for run in sorted(there.values(), key=lambda run: (run.started_at, run.id)):
        copy.add_running(_part_of(run, nodes, factor))
    for entry in (*world.nominated.values(), *_around(world, turn, stride, rest)):
        if entry.id != job.id:
            copy.add_waiting(_shrunk(entry.job, factor), now)
    if factor == 1:
        for nomination in world.nominations.values():
            if nomination.job_id in copy.queue.entries or nomination.job_id in copy.runs:
                copy.nominate(nomination.job_id, nomination.gang, nomination.after)
    if job.id not in copy.nominated:
        copy.add_waiting(_shrunk(job, factor), now)
    return SmallCopy(world=copy, weight=stride / factor, is_whole=factor == 1)


def _counts(world: World, turn: tuple[float, ...]) -> tuple[int, int]:
    """How many jobs of the queue have their turn before that one, and after it."""
    before = sum(bisect.bisect_left(lane.entries, (turn,)) for lane in world.queue.lanes.values())
    return before, len(world.queue.entries) - before


def _around(world: World, turn: tuple[float, ...], stride: int, rest: int) -> Iterator[Entry]:
    """Every so many of those before that turn, and of those after it, lane by lane."""
    skip, skip_rest = stride // 2, rest // 2
    for lane in world.queue.lanes.values():
        entries, place = lane.entries, bisect.bisect_left(lane.entries, (turn,))
        for number in range(skip, place, stride):
            yield entries[number][2]
        skip = (skip - place) % stride
        for number in range(place + skip_rest, len(entries), rest):
            yield entries[number][2]
        skip_rest = (skip_rest - (len(entries) - place)) % rest


def _turn_of(world: World, job: WaitingJob, now: float) -> tuple[float, ...]:
    """The job's place in the order of the queue, or the one that it would have."""
    entry = world.queue.entries.get(job.id)
    if entry is not None and entry.job is job:
        return entry.turn
    world.begin()
    try:
        world.add_waiting(job, now)
        entry = world.queue.entries.get(job.id)
        return () if entry is None else entry.turn
    finally:
        world.undo()


def _shrunk(job: WaitingJob, factor: int) -> WaitingJob:
    if factor == 1 or all(layout.num_nodes == 1 and not layout.rest_gpus for layout in job.layouts):
        return job
    return replace(job, layouts=tuple(_small_layout(layout, factor) for layout in job.layouts))


def _small_layout(layout: GangLayout, factor: int) -> GangLayout:
    return replace(layout, num_nodes=max(1, round(layout.num_nodes / factor)), rest_gpus=0)


def _part_of(run: Run, node_ids: Container[int], factor: int) -> RunningJob:
    """What a run has on the nodes of the copy: something at least."""
    facts = run.facts()
    if factor == 1:
        return facts
    shares = tuple(share for share in run.gang.shares if share.node_id in node_ids)
    layout = replace(run.gang.layout, num_nodes=len(shares), rest_gpus=0)
    return replace(facts, job=_shrunk(facts.job, factor), gang=PlacedGang(layout=layout, shares=shares))


def _team(team: Team, factor: int) -> Team:
    return replace(
        team,
        quota_gpus=_part(team.quota_gpus, factor),
        quota_nodes=_part(team.quota_nodes, factor),
        cap_gpus=_part(team.cap_gpus, factor),
    )


def _user(user: User, factor: int) -> User:
    return replace(user, cap_gpus=_part(user.cap_gpus, factor))


def _part(bound: int | None, factor: int) -> int | None:
    return None if bound is None else -(-bound // factor)
