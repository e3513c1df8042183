"""Each law of the scheduler fails on a planted fault: a law that nothing breaks proves nothing."""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import pytest

from service.scheduler import placement, quota, victims
from service.scheduler import plan as plan_module
from service.scheduler.facts import Nomination
from service.scheduler.jobs import FOREVER, Run
from service.scheduler.node import Node
from service.scheduler.plan import plan
from service.scheduler.policies.time_left import _TimeLeft
from service.scheduler.reservation import _Room
from service.scheduler.scheduling_pass import Pass
from service.scheduler.world import World
from tests.property import laws, test_plan, test_pool_in_time
from tests.property.laws import NOW, WAYS, busy_scene, free_scene

NUM_SEEDS = 120
time_left, walk = (  # the package has functions of these names
    importlib.import_module(f"service.scheduler.policies.{name}") for name in ("time_left", "walk")
)
Law = Callable[[], None]


@dataclass(frozen=True, kw_only=True)
class Mutant:
    """One fault, and the check that must go red on it."""

    target: tuple[Any, str]
    """What is replaced."""
    replacement: Callable[[Any], Any]
    """Of what is there now."""
    law: Law


def in_scenes(name: str) -> Law:
    """The law of one pass, over scenes of all kinds."""

    def check() -> None:
        for seed in range(NUM_SEEDS):
            for scene in (free_scene(seed), busy_scene(seed), busy_scene(seed, with_bounds=True)):
                for way in WAYS[:2]:
                    law = laws.LAWS.get(name)
                    decided = scene.plan(way)
                    if law is not None:
                        law(scene, decided)
                    elif way[1] == "all":
                        laws.no_fitting_gpu_stays_free_beside_an_eligible_job(scene, decided)

    return check


def lives() -> None:
    """Pools that live until every job has ended."""
    for seed in range(6):
        test_pool_in_time.lives_well(seed, WAYS[0])


def leaves_no_trace() -> None:
    """A plan leaves the world as it was."""
    for seed in range(NUM_SEEDS):
        world = busy_scene(seed).world()
        plan(world, NOW)
        before = world.facts()
        plan(world, NOW)
        assert world.facts() == before


def same_plan_again() -> None:
    """The same world gives the same plan."""
    for seed in range(NUM_SEEDS):
        scene = busy_scene(seed)
        assert test_plan.decisions(scene.plan(WAYS[0])) == test_plan.decisions(scene.plan(WAYS[0]))


def a_node_joins() -> None:
    """It leaves all that runs and all that is promised alone."""
    for seed in range(20):
        world = busy_scene(seed).world()
        before = world.facts()
        world.set_node(test_plan.roomy(99))
        after = world.facts()
        assert after["runs"] == before["runs"] and after["nominations"] == before["nominations"]


def what_is_free_comes_first() -> None:
    """Nodes on which all that waits fits stop nothing."""
    for seed in range(NUM_SEEDS):
        test_plan.stops_nothing_with_roomy_nodes(busy_scene(seed), WAYS[0])


def the_flood() -> None:
    """A gang of the whole pool starts within its bound."""
    way = ("time-left", "all")
    test_pool_in_time.test_a_gang_of_the_whole_pool_starts_within_its_bound_under_a_flood_of_small_jobs(way, False)


def the_flood_of_all() -> None:
    """So does a job that wants a node for itself, and one that needs most of the memory."""
    for asked in ("one GPU, on a node for itself", "most memory of a node"):
        assert test_pool_in_time.flood_of_all(("time-left", "all"), asked, 1_200.0) <= 25 * 3_600.0


def _sees_held_gpus_as_free(refresh: Any) -> Any:
    def mutated(self: Node) -> None:
        self.available = self.usable & ~self.promised

    return mutated


def _forgets_promises(refresh: Any) -> Any:
    def mutated(self: Node) -> None:
        self.available = self.usable & ~(self.held & ~self.freeing)

    return mutated


def _one_share_short(find: Any) -> Any:
    def mutated(*args: Any) -> Any:
        taken = find(*args)
        return taken[:-1] if taken is not None and len(taken) > 1 else taken

    return mutated


def _without_the_last_reason(waits: Any) -> Any:
    def mutated(pass_: Pass) -> Any:
        return list(waits(pass_))[:-1]

    return mutated


def _blocks_all_behind(is_blocked: Any) -> Any:
    return lambda lane, other, is_strict: True


def _protects_nobody(init: Any) -> Any:
    def mutated(self: Run, *args: Any) -> None:
        init(self, *args)
        if self.open_at < FOREVER:
            self.open_at = 0.0

    return mutated


def _forgets_to_undo(undo: Any) -> Any:
    def mutated(self: World) -> None:
        if self._journal:
            self._journal.pop(0)
        undo(self)

    return mutated


def _starts_nominated_elsewhere(ready: Any) -> Any:
    def mutated(self: World) -> list[Nomination]:
        found = []
        for one in ready(self):
            shares = tuple(
                replace(share, gpu_indices=tuple(range(len(share.gpu_indices)))) for share in one.gang.shares
            )
            found.append(replace(one, gang=replace(one.gang, shares=shares)))
        return found

    return mutated


def _drops_promises_when_nodes_change(set_node: Any) -> Any:
    def mutated(self: World, view: Any) -> None:
        set_node(self, view)
        if view.id == 99:
            for job_id in list(self.nominations):
                self.drop_nomination(job_id)

    return mutated


def _stops_first(attempt: Any) -> Any:
    def mutated(self: Any, pass_: Pass, lane: Any, entry: Any, standing: Any) -> Any:
        if pass_.now >= entry.patient_at:
            for run in [run for run in pass_.world.runs.values() if run.open_at <= NOW and not run.is_stopping][:1]:
                pass_.stop(run, entry, "less_time_left")
        return attempt(self, pass_, lane, entry, standing)

    return mutated


class _Dice:
    """A choice that differs from call to call."""

    def __init__(self) -> None:
        self.count = 0

    def __call__(self, choose: Any) -> Any:
        def mutated(node: Node, candidates: int, count: int) -> int:
            self.count += 1
            chosen: int = choose(node, candidates, count)
            others = candidates & ~chosen
            if self.count % 2 and count == 1 and others:
                return others & -others
            return chosen

        return mutated


MUTANTS: dict[str, Mutant] = {
    "GPUs that others hold are given away": Mutant(
        target=(Node, "refresh"), replacement=_sees_held_gpus_as_free, law=in_scenes("no_gpu_is_held_twice")
    ),
    "a job starts though somebody is still leaving its GPUs": Mutant(
        target=(Pass, "holders_of"),
        replacement=lambda _: lambda self, gang, job: frozenset(),
        law=in_scenes("no_gpu_is_held_twice"),
    ),
    "a gang starts with one share less": Mutant(
        target=(placement, "_find"), replacement=_one_share_short, law=in_scenes("gangs_are_all_or_nothing")
    ),
    "a job is placed wherever its checkpoint lies": Mutant(
        target=(placement, "fits"),
        replacement=lambda fits: lambda node, job, layout: fits(node, replace(job, home=None), layout),
        law=in_scenes("a_job_gets_what_it_asks_for"),
    ),
    "several nodes need no common folder": Mutant(
        target=(placement, "together"),
        replacement=lambda _: lambda nodes, layout, view_of: [nodes],
        law=in_scenes("a_job_gets_what_it_asks_for"),
    ),
    "CPUs are not counted": Mutant(
        target=(World, "_give"), replacement=lambda _: lambda *_: None, law=in_scenes("no_node_gives_more_than_it_has")
    ),
    "an exclusive job takes what is free beside others": Mutant(
        target=(placement, "fits"),
        replacement=lambda fits: lambda node, job, layout: fits(node, replace(job, is_exclusive=False), layout),
        law=in_scenes("an_exclusive_job_is_alone_on_its_nodes"),
    ),
    "a job is forgotten when reasons are given": Mutant(
        target=(plan_module, "_waits"),
        replacement=_without_the_last_reason,
        law=in_scenes("every_waiting_job_is_decided_on_once_and_told_why"),
    ),
    "back-off counts for nothing": Mutant(
        target=(World, "add_waiting"),
        replacement=lambda add: lambda self, job, now=0.0: add(self, replace(job, not_before=None), now),
        law=in_scenes("nothing_starts_that_is_held_back"),
    ),
    "caps count for nothing": Mutant(
        target=(walk, "bound_of"), replacement=lambda _: lambda *_: None, law=in_scenes("caps_are_never_exceeded")
    ),
    "a cap counts what is asked for at least, and an elastic job takes more": Mutant(
        target=(time_left, "most_gpus"),
        replacement=lambda _: lambda *_: None,
        law=in_scenes("caps_are_never_exceeded"),
    ),
    "jobs that stay borrow": Mutant(
        target=(walk, "bound_of"),
        replacement=lambda bound_of: lambda world, lane, standing: bound_of(world, lane, quota.Standing.IN_QUOTA),
        law=in_scenes("only_jobs_that_can_be_stopped_borrow"),
    ),
    "a team loses what it has within its quota": Mutant(
        target=(victims, "borrowed_gpus"),
        replacement=lambda _: lambda world, team_id: world.team_gpus[team_id],
        law=in_scenes("only_a_team_that_borrows_loses_jobs_to_others"),
    ),
    "promised GPUs are given away": Mutant(
        target=(Node, "refresh"), replacement=_forgets_promises, law=in_scenes("a_nomination_is_never_stolen")
    ),
    "a nominated job starts on other GPUs than were kept": Mutant(
        target=(World, "ready_nominations"),
        replacement=_starts_nominated_elsewhere,
        law=lives,
    ),
    "protected runs are stopped": Mutant(
        target=(Run, "__init__"), replacement=_protects_nobody, law=in_scenes("only_jobs_that_can_be_stopped_are")
    ),
    "whoever comes after one that does not fit is not looked at": Mutant(
        target=(walk, "_is_blocked"), replacement=_blocks_all_behind, law=in_scenes("")
    ),
    "the first change of a plan is not undone": Mutant(
        target=(World, "undo"), replacement=_forgets_to_undo, law=leaves_no_trace
    ),
    "GPUs are chosen by dice": Mutant(target=(Node, "choose"), replacement=_Dice(), law=same_plan_again),
    "a node that joins costs others their promises": Mutant(
        target=(World, "set_node"), replacement=_drops_promises_when_nodes_change, law=a_node_joins
    ),
    "a job that leaves is still counted for its team": Mutant(
        target=(World, "_count"),
        replacement=lambda count: lambda self, run, sign: count(self, run, max(sign, 0)),
        law=lives,
    ),
    "the same job is told to leave twice": Mutant(
        target=(Pass, "stop"),
        replacement=lambda stop: lambda self, run, entry, why: [stop(self, run, entry, why) for _ in range(2)],
        law=in_scenes("a_pass_does_not_take_back_what_it_gave"),
    ),
    "jobs are stopped where others are free": Mutant(
        target=(_TimeLeft, "attempt"), replacement=_stops_first, law=what_is_free_comes_first
    ),
    "what was reported is not kept": Mutant(
        target=(World, "measured"), replacement=lambda _: lambda *_: None, law=lives
    ),
    "a promoted job has nothing kept for it": Mutant(
        target=(_TimeLeft, "_reserve"), replacement=lambda _: lambda *_: None, law=the_flood
    ),
    "what is reserved is counted in GPUs alone": Mutant(
        target=(_Room, "holds"),
        replacement=lambda _: lambda room, job, layout, count: room.gpus >= count,
        law=the_flood_of_all,
    ),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_the_law_fails_on_the_mutant(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    mutant = MUTANTS[name]
    owner, attribute = mutant.target
    monkeypatch.setattr(owner, attribute, mutant.replacement(getattr(owner, attribute)))
    with pytest.raises(AssertionError):
        mutant.law()


@pytest.mark.parametrize(
    "law",
    [lives, leaves_no_trace, same_plan_again, a_node_joins, what_is_free_comes_first, the_flood, the_flood_of_all],
    ids=lambda law: law.__name__,
)
def test_and_holds_without_it(law: Law) -> None:
    """Those of a pass are checked in `test_plan`."""
    law()
