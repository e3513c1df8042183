"""Laws of a pass over thousands of small random pools: nothing twice, all or nothing, a word for everybody."""

from __future__ import annotations

import functools
import random
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from service.domain.gang_layout import GangLayout
from service.scheduler.facts import NodeView, WaitingJob
from service.scheduler.plan import Plan, decide, plan
from service.scheduler.scheduling_pass import PolicyOptions
from service.scheduler.world import World
from tests.property.laws import (
    LAWS,
    NOW,
    WAYS,
    Scene,
    Way,
    busy_scene,
    free_scene,
    no_fitting_gpu_stays_free_beside_an_eligible_job,
    rough_node,
    stops_are_of_the_kind_that_the_pool_allows,
)
from tests.unit.service.worlds import GIB, gpu

FEW = settings(max_examples=40, deadline=None, phases=[Phase.explicit, Phase.generate])
MANY = settings(FEW, max_examples=1_000)
SEEDS = st.integers(0, 2**32)  # a seed shrinks to nothing: the pool drawn from a smaller one is another pool
KINDS: dict[str, Callable[[int], Scene]] = {
    "free": free_scene,
    "busy": busy_scene,
    "bounds": functools.partial(busy_scene, with_bounds=True),
}
"""Nothing runs yet; jobs run, leave and are promised GPUs; and teams and users have quotas and caps besides."""
WAY_IDS = [" ".join(way) for way in WAYS]
kinds = pytest.mark.parametrize("kind", KINDS)
ways = pytest.mark.parametrize("way", WAYS, ids=WAY_IDS)


def obeys_all_laws(scene: Scene, way: Way) -> None:
    """One pass breaks none of the laws."""
    decided = scene.plan(way)
    for law in LAWS.values():
        law(scene, decided)
    stops_are_of_the_kind_that_the_pool_allows(scene, decided, way)
    if way == ("time-left", "all"):
        no_fitting_gpu_stays_free_beside_an_eligible_job(scene, decided)


def decisions(decided: Plan) -> tuple[object, ...]:
    """A plan to be compared: in which order jobs are told why they wait means nothing."""
    reasons = {wait.job_id: wait.reason for wait in decided.waits}
    return decided.stops, decided.places, decided.nominations, reasons


@kinds
@ways
def test_a_pass_obeys_all_laws(way: Way, kind: str) -> None:
    @FEW
    @given(SEEDS)
    def check(seed: int) -> None:
        obeys_all_laws(KINDS[kind](seed), way)

    check()


@pytest.mark.full
@kinds
@ways
def test_a_thousand_passes_obey_all_laws(way: Way, kind: str) -> None:
    @MANY
    @given(SEEDS)
    def check(seed: int) -> None:
        obeys_all_laws(KINDS[kind](seed), way)

    check()


# --- Same world, same plan; a plan leaves no trace -------------------------------------------------------------------


@kinds
def test_the_same_world_gives_the_same_plan_in_whatever_order_it_is_listed(kind: str) -> None:
    @FEW
    @given(SEEDS, st.sampled_from(WAYS))
    def check(seed: int, way: Way) -> None:
        scene = KINDS[kind](seed)
        shuffled = Scene(
            **{
                name: tuple(random.Random(seed).sample(value, len(value)))
                for name, value in ((name, getattr(scene, name)) for name in scene.__dataclass_fields__)
            }
        )
        assert decisions(scene.plan(way)) == decisions(shuffled.plan(way))

    check()


@kinds
def test_a_plan_leaves_the_world_as_it_was_and_the_next_one_is_the_same(kind: str) -> None:
    @FEW
    @given(SEEDS, st.sampled_from(WAYS))
    def check(seed: int, way: Way) -> None:
        world = KINDS[kind](seed).world()
        options = PolicyOptions(preemption=way[1])
        first = plan(world, NOW, way[0], options)
        before = world.facts()
        second = plan(world, NOW, way[0], options)
        assert world.facts() == before
        assert decisions(second) == decisions(first)
        carried_out = decide(world, NOW, way[0], options, explain=True)
        assert decisions(carried_out) == decisions(first), "what is carried out is what was planned"

    check()


@FEW
@given(SEEDS)
def test_plans_of_other_policies_in_between_change_nothing(seed: int) -> None:
    world, fresh = busy_scene(seed).world(), busy_scene(seed).world()
    for policy, preemption in WAYS:
        plan(world, NOW, policy, PolicyOptions(preemption=preemption))
    assert decisions(plan(world, NOW)) == decisions(plan(fresh, NOW))


# --- More nodes ------------------------------------------------------------------------------------------------------


def roomy(number: int) -> NodeView:
    """A node on which any of the jobs fits that are not tied to others."""
    return NodeView(
        id=number,
        name=f"roomy-{number}",
        blocked_by=None,
        gpus=tuple(gpu(index, model="A100") for index in range(16)),
        cpus=1_000.0,
        memory_bytes=1_000 * GIB,
        free_cpus=1_000.0,
        free_memory_bytes=1_000 * GIB,
        shared_folder_id="roomy",
        labels={"zone": "x"},
    )


@FEW
@given(SEEDS)
def test_a_node_that_joins_leaves_all_that_runs_and_all_that_is_promised_alone(seed: int) -> None:
    scene = busy_scene(seed)
    world = scene.world()
    before = world.facts()
    world.set_node(roomy(99))
    after = world.facts()
    assert {name: after[name] for name in after if name != "nodes"} == {
        name: before[name] for name in before if name != "nodes"
    }
    assert {node_id: facts for node_id, facts in after["nodes"].items() if node_id != 99} == before["nodes"]


def stops_nothing_with_roomy_nodes(scene: Scene, way: Way) -> None:
    """As many more nodes as all that waits could use at once."""
    nominated = {one.job_id for one in scene.nominations}
    waiting = tuple(one for one in scene.waiting if one.home is None or one.id in nominated)
    more = tuple(roomy(number) for number in range(100, 100 + 3 * len(waiting) + 3))
    assert not scene.plan(way, nodes=(*scene.nodes, *more), waiting=waiting).stops


@FEW
@given(SEEDS, st.sampled_from(WAYS))
def test_nodes_on_which_all_that_waits_fits_stop_nothing(seed: int, way: Way) -> None:
    """Quotas or not: what is free comes before what has to be made free."""
    stops_nothing_with_roomy_nodes(busy_scene(seed, with_bounds=seed % 2 == 0), way)


def first_in_line(scene: Scene) -> WaitingJob | None:
    """The job that no other can take anything from: alone in the queue."""
    ready = [one for one in scene.waiting if one.not_before is None or one.not_before <= NOW]
    return ready[0] if ready else None


@FEW
@given(SEEDS, st.sampled_from(WAYS))
def test_another_node_never_keeps_the_first_job_from_starting(seed: int, way: Way) -> None:
    scene, another = free_scene(seed), rough_node(random.Random(seed), 101)
    first = first_in_line(scene)
    if first is None:
        return
    if scene.plan(way, waiting=(first,)).places:
        assert scene.plan(way, waiting=(first,), nodes=(*scene.nodes, another)).places


@FEW
@given(SEEDS)
def test_a_job_with_a_range_of_gpus_gets_the_most_that_fit_and_never_more_or_less_than_it_said(seed: int) -> None:
    """The first of the queue: whatever it would have got in a larger layout did not fit."""
    scene = free_scene(seed)
    first = first_in_line(scene)
    if first is None:
        return
    for place in scene.plan(("time-left", "all"), waiting=(first,)).places:
        sizes = [layout.num_gpus for layout in first.layouts]
        assert min(sizes) <= place.gang.layout.num_gpus <= max(sizes)
        for larger in (one for one in first.layouts if one.num_gpus > place.gang.layout.num_gpus):
            assert not _starts(scene, first, larger)


def _starts(scene: Scene, one: WaitingJob, layout: GangLayout) -> bool:
    return bool(scene.plan(("time-left", "all"), waiting=(replace(one, layouts=(layout,)),)).places)


# --- A world that is kept by changes ---------------------------------------------------------------------------------


@FEW
@given(SEEDS)
def test_a_world_into_which_everything_came_one_by_one_holds_the_same_facts(seed: int) -> None:
    """In any order: nodes before or after the jobs that run on them, quotas last."""
    scene = busy_scene(seed, with_bounds=True)
    drawn = random.Random(seed)
    world = World()
    for view in drawn.sample(scene.nodes, len(scene.nodes)):
        world.set_node(replace(view, blocked_by="unreachable") if drawn.random() < 0.3 else view)
    for run in drawn.sample(scene.running, len(scene.running)):
        world.add_running(run)
    for one in drawn.sample(scene.waiting, len(scene.waiting)):
        world.add_waiting(one, NOW)
    for view in scene.nodes:
        world.set_node(view)
    for team in scene.teams:
        world.set_team(team)
    for user in scene.users:
        world.set_user(user)
    for promise in scene.nominations:
        world.nominate(promise.job_id, promise.gang, promise.after)
    assert world.facts() == scene.world().facts()
