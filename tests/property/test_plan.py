"""Laws of the scheduler over thousands of small random worlds: nothing twice, all or nothing, a word for everybody."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from service.domain.gang_layout import equal_shares
from service.scheduler.placement import FreeNode, place_gang
from service.scheduler.plan import Plan, plan
from service.scheduler.world import NodeView, WaitingJob, World, queue_order
from tests.unit.service.worlds import GIB, gpu, home, job

NOW = 1_000.0
EXAMPLES = settings(max_examples=150, deadline=None)


@st.composite
def node_views(draw: st.DrawFn, number: int) -> NodeView:
    """A node with up to 8 GPUs in groups, a few of them held, perhaps some of its CPUs and memory too."""
    device = st.tuples(st.sampled_from("ab"), st.sampled_from([True, True, False]), st.sampled_from(["A100", "H100"]))
    devices = draw(st.lists(device, max_size=8))
    gpus = [gpu(index, group=group, model=model, free=is_free) for index, (group, is_free, model) in enumerate(devices)]
    cpus, memory = float(draw(st.sampled_from([4, 16, 64]))), draw(st.sampled_from([8, 64])) * GIB
    return NodeView(
        id=number,
        name=f"node-{number}",
        blocked_by=draw(st.sampled_from([None, None, None, "unreachable"])),
        gpus=tuple(gpus),
        cpus=cpus,
        memory_bytes=memory,
        free_cpus=cpus * draw(st.sampled_from([1.0, 1.0, 0.5, 0.0])),
        free_memory_bytes=memory // draw(st.sampled_from([1, 1, 2])),
        shared_folder_id=draw(st.sampled_from([None, "nfs", "lustre"])),
    )


@st.composite
def waiting_jobs(draw: st.DrawFn, number: int) -> WaitingJob:
    """A job of any shape, or of a range of sizes; some back off, some share their moment of submission."""
    only = (draw(st.sampled_from([1, 1, 1, 2, 3])), draw(st.sampled_from([0, 1, 1, 2, 4])))
    bounds = draw(st.sampled_from([None, None, (1, 4), (2, 6), (2, 16), (5, 7)]))
    return job(
        number,
        layouts=[only] if bounds is None else list(equal_shares(*bounds, 8, 6)),
        is_split=draw(st.booleans()),
        priority=draw(st.integers(-1, 1)),
        submitted_at=float(draw(st.integers(0, 3))),
        gpu_type=draw(st.sampled_from([None, None, "A100", "H100"])),
        cpus=float(draw(st.sampled_from([1, 1, 3, 6]))),
        memory=draw(st.sampled_from([0, 0, 4, 16])) * GIB,
        not_before=draw(st.sampled_from([None, None, None, NOW - 1, NOW + 1])),
        home=draw(st.sampled_from([None, None, home(1), home(1, 2), home(2, 3, shared="nfs"), home(1, shared="gone")])),
    )


@st.composite
def worlds(draw: st.DrawFn) -> World:
    """A pool of up to six nodes and a queue of up to eight jobs."""
    nodes = tuple(draw(node_views(number)) for number in range(1, draw(st.integers(0, 6)) + 1))
    return World(
        nodes=nodes, waiting=tuple(draw(waiting_jobs(number)) for number in range(1, draw(st.integers(0, 8)) + 1))
    )


def placed_ids(decided: Plan) -> set[int]:
    return {place.job_id for place in decided.places}


@EXAMPLES
@given(worlds())
def test_every_waiting_job_is_in_exactly_one_decision(world: World) -> None:
    decided = plan(world, NOW)
    listed = [place.job_id for place in decided.places] + [wait.job_id for wait in decided.waits]
    assert Counter(listed) == Counter(one.id for one in world.waiting)


@EXAMPLES
@given(worlds())
def test_no_gpu_is_placed_twice_nor_one_that_is_not_free(world: World) -> None:
    placed = Counter(
        (share.node_id, index)
        for place in plan(world, NOW).places
        for share in place.gang.shares
        for index in share.gpu_indices
    )
    free = {(node.id, one.index) for node in world.nodes for one in node.gpus if one.is_free}
    assert all(count == 1 for count in placed.values())
    assert placed.keys() <= free


@EXAMPLES
@given(worlds())
def test_a_gang_gets_all_that_it_asked_for_on_different_nodes(world: World) -> None:
    jobs, nodes = {one.id: one for one in world.waiting}, {node.id: node for node in world.nodes}
    for place in plan(world, NOW).places:
        asked = jobs[place.job_id]
        layout, shares = place.gang.layout, place.gang.shares
        assert layout in asked.layouts
        assert len({share.node_id for share in shares}) == len(shares) == layout.num_nodes
        for share in shares:
            assert len(set(share.gpu_indices)) == layout.gpus_per_node
            assert nodes[share.node_id].blocked_by is None
            models = {one.model for one in nodes[share.node_id].gpus if one.index in share.gpu_indices}
            assert asked.gpu_type is None or models <= {asked.gpu_type}


@EXAMPLES
@given(worlds())
def test_a_job_with_a_checkpoint_is_placed_only_where_it_can_be_read(world: World) -> None:
    jobs, nodes = {one.id: one for one in world.waiting}, {node.id: node for node in world.nodes}
    for place in plan(world, NOW).places:
        asked = jobs[place.job_id].home
        if asked is None:
            continue
        for share in place.gang.shares:
            node = nodes[share.node_id]
            if asked.shared_folder_id is not None:
                assert node.shared_folder_id == asked.shared_folder_id
            else:
                assert node.name in asked.node_names


@EXAMPLES
@given(worlds())
def test_a_model_that_is_split_over_nodes_gets_nodes_that_see_one_folder(world: World) -> None:
    folders = {node.id: node.shared_folder_id for node in world.nodes}
    for place in plan(world, NOW).places:
        if place.gang.layout.needs_shared_folder:
            seen = {folders[share.node_id] for share in place.gang.shares}
            assert len(seen) == 1
            assert seen != {None}


@EXAMPLES
@given(worlds())
def test_no_node_gives_more_cpus_or_memory_than_it_has_free(world: World) -> None:
    jobs = {one.id: one for one in world.waiting}
    cpus: defaultdict[int, float] = defaultdict(float)
    memory: defaultdict[int, int] = defaultdict(int)
    for place in plan(world, NOW).places:
        for share in place.gang.shares:
            cpus[share.node_id] += place.gang.layout.cpus_per_node
            memory[share.node_id] += jobs[place.job_id].memory_bytes_per_node
    for node in world.nodes:
        assert cpus[node.id] <= node.free_cpus
        assert memory[node.id] <= node.free_memory_bytes


@EXAMPLES
@given(worlds())
def test_nothing_is_placed_on_a_blocked_node_and_nothing_that_backs_off(world: World) -> None:
    decided = plan(world, NOW)
    blocked = {node.id for node in world.nodes if node.blocked_by is not None}
    assert not blocked & {share.node_id for place in decided.places for share in place.gang.shares}
    resting = {one.id for one in world.waiting if one.not_before is not None and one.not_before > NOW}
    assert not resting & placed_ids(decided)


@EXAMPLES
@given(worlds(), st.randoms(use_true_random=False))
def test_the_same_world_gives_the_same_plan_in_whatever_order_it_is_listed(world: World, shuffler: object) -> None:
    nodes, waiting = list(world.nodes), list(world.waiting)
    shuffler.shuffle(nodes)  # type: ignore[attr-defined]  # hypothesis types its seeded Random as object
    shuffler.shuffle(waiting)  # type: ignore[attr-defined]
    shuffled = World(nodes=tuple(nodes), waiting=tuple(waiting))
    assert {(place.job_id, frozenset(place.gang.shares)) for place in plan(shuffled, NOW).places} == {
        (place.job_id, frozenset(place.gang.shares)) for place in plan(world, NOW).places
    }
    assert plan(world, NOW) == plan(world, NOW)


@EXAMPLES
@given(worlds(), st.integers(1, 3).flatmap(lambda number: node_views(100 + number)))
def test_another_node_never_keeps_the_first_job_from_starting(world: World, another: NodeView) -> None:
    ready = [one for one in queue_order(world.waiting) if one.not_before is None or one.not_before <= NOW]
    if ready and ready[0].id in placed_ids(plan(world, NOW)):
        larger = replace(world, nodes=(*world.nodes, another))
        assert ready[0].id in placed_ids(plan(larger, NOW))


@EXAMPLES
@given(worlds())
def test_a_job_waits_only_if_it_does_not_fit_into_what_the_others_left(world: World) -> None:
    decided = plan(world, NOW)
    taken = {
        (share.node_id, index) for place in decided.places for share in place.gang.shares for index in share.gpu_indices
    }
    jobs = {one.id: one for one in world.waiting}
    cpus: defaultdict[int, float] = defaultdict(float)
    memory: defaultdict[int, int] = defaultdict(int)
    for place in decided.places:
        for share in place.gang.shares:
            cpus[share.node_id] += place.gang.layout.cpus_per_node
            memory[share.node_id] += jobs[place.job_id].memory_bytes_per_node
    left = tuple(
        replace(
            node,
            gpus=tuple(replace(one, is_free=one.is_free and (node.id, one.index) not in taken) for one in node.gpus),
            free_cpus=node.free_cpus - cpus[node.id],
            free_memory_bytes=node.free_memory_bytes - memory[node.id],
        )
        for node in world.nodes
    )
    waiting = tuple(jobs[wait.job_id] for wait in decided.waits)
    assert not plan(World(nodes=left, waiting=waiting), NOW).places


@EXAMPLES
@given(worlds())
def test_a_job_with_a_range_of_gpus_gets_the_most_that_fit_and_never_more_or_less_than_it_said(world: World) -> None:
    """The first of the queue: whatever it would have got in a larger layout did not fit."""
    ready = [one for one in queue_order(world.waiting) if one.not_before is None or one.not_before <= NOW]
    places = {place.job_id: place for place in plan(world, NOW).places}
    for waiting in world.waiting:
        if waiting.id in places:
            sizes = [layout.num_gpus for layout in waiting.layouts]
            taken = sum(len(share.gpu_indices) for share in places[waiting.id].gang.shares)
            assert min(sizes) <= taken <= max(sizes)
            assert taken == places[waiting.id].gang.layout.num_gpus
    if ready and ready[0].id in places:
        size = places[ready[0].id].gang.layout.num_gpus
        for larger in (layout for layout in ready[0].layouts if layout.num_gpus > size):
            alone = replace(ready[0], layouts=(larger,))
            assert place_gang([FreeNode.of(node) for node in world.nodes], alone) is None
