"""What was asked becomes a gang that the pool could hold, or the reason why it never can and what to change."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from service.domain.misfit import DoesNotFit
from service.domain.node_shapes import NodeShape, gpu_type_matches, least_gpu_memory
from service.domain.spec import JobSpec, ResolvedGang, ResourceSpec, RunSpec, resolve_gang

GIB = 2**30
A100 = frozenset({"NVIDIA A100-SXM4-80GB"})
H100 = frozenset({"NVIDIA H100 80GB HBM3"})


def node(num_gpus: int, *, cpus: float = 16, memory: int = 64 * GIB, types: frozenset[str] = A100) -> NodeShape:
    return NodeShape(name="n", num_gpus=num_gpus, gpu_types=types, cpus=cpus, memory_bytes=memory)


def job(kind: str = "script", processes_per_node: int | None = None, **resources: Any) -> JobSpec:
    return JobSpec(
        name="x",
        run=RunSpec(kind=kind),
        resources=ResourceSpec(**resources),
        processes_per_node=processes_per_node,
    )


def layout(spec: JobSpec, nodes: list[NodeShape]) -> tuple[int, int] | None:
    gang = resolve_gang(spec, nodes)
    return (gang.num_nodes, gang.gpus_per_node) if isinstance(gang, ResolvedGang) else None


POOL = [node(4), node(4, cpus=8), node(1, cpus=2, memory=8 * GIB, types=H100)]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (1, 1)),
        ({"num_nodes": 2}, (2, 1)),
        ({"gpus_per_node": 3}, (1, 3)),
        ({"num_nodes": 2, "gpus_per_node": 4}, (2, 4)),
        ({"total_gpus": 1}, (1, 1)),
        ({"total_gpus": 4}, (1, 4)),
        ({"total_gpus": 6}, (2, 3)),
        ({"total_gpus": 8}, (2, 4)),
        ({"total_gpus": 3, "num_nodes": 3}, (3, 1)),
        ({"total_gpus": 4, "gpus_per_node": 2}, (2, 2)),
        ({"total_gpus": 0}, (1, 0)),
        ({"total_gpus": 0, "num_nodes": 3}, (3, 0)),
        ({"gpus_per_node": 0}, (1, 0)),
        ({"total_gpus": 5}, None),
        ({"total_gpus": 12}, None),
        ({"num_nodes": 4}, None),
        ({"num_nodes": 3, "gpus_per_node": 2}, None),
    ],
)
def test_numbers_become_a_layout(asked: dict[str, Any], expected: tuple[int, int] | None) -> None:
    assert layout(job(**asked), POOL) == expected


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({}, (1, 1)),
        ({"total_gpus": 8}, (1, 8)),
        ({"num_nodes": 3, "gpus_per_node": 5, "gpu_type": "B200"}, (3, 5)),
        ({"total_gpus": 8, "gpus_per_node": 2}, (4, 2)),
        ({"total_gpus": 8, "num_nodes": 2}, (2, 4)),
        ({"cpus_per_node": 500.0}, (1, 1)),
    ],
)
def test_a_pool_without_any_node_takes_the_numbers_as_they_are(asked: dict[str, Any], expected: Any) -> None:
    assert layout(job(**asked), []) == expected


def test_o37_a_job_without_gpus_has_one_process_and_one_cpu() -> None:
    assert resolve_gang(job(gpus_per_node=0), POOL) == ResolvedGang(
        num_nodes=1, gpus_per_node=0, processes_per_node=1, cpus_per_node=1.0, memory_bytes_per_node=0
    )


@pytest.mark.parametrize(
    ("spec", "processes"),
    [
        (job(gpus_per_node=4), 4),
        (job(gpus_per_node=4, processes_per_node=2), 2),
        (job(gpus_per_node=0, processes_per_node=6), 6),
        (job("command", gpus_per_node=4), 1),
    ],
)
def test_a_script_has_a_process_per_gpu_unless_it_says_otherwise_and_a_command_one(
    spec: JobSpec, processes: int
) -> None:
    gang = resolve_gang(spec, POOL)

    assert isinstance(gang, ResolvedGang)
    assert gang.processes_per_node == processes


@pytest.mark.parametrize(
    ("spec", "nodes", "cpus"),
    [
        (job(gpus_per_node=4), [node(4, cpus=16)], 4.0),
        (job(gpus_per_node=8), [node(8, cpus=2)], 2.0),
        (job(gpus_per_node=4, num_nodes=2), [node(4, cpus=16), node(4, cpus=3), node(4, cpus=2)], 3.0),
        (job(gpus_per_node=4, cpus_per_node=0.5), [node(4, cpus=16)], 0.5),
        (job(gpus_per_node=4), [], 4.0),
    ],
)
def test_cpus_default_to_one_per_gpu_and_never_more_than_the_nodes_have(
    spec: JobSpec, nodes: list[NodeShape], cpus: float
) -> None:
    gang = resolve_gang(spec, nodes)

    assert isinstance(gang, ResolvedGang)
    assert gang.cpus_per_node == cpus


@pytest.mark.parametrize(
    ("asked", "types", "matches"),
    [
        (None, frozenset(), True),
        ("H100", H100, True),
        ("h100", H100, True),
        ("A100-SXM4", A100, True),
        ("a100 sxm4 80gb", A100, True),
        ("A10", A100, False),
        ("100", A100, False),
        ("80GB A100", A100, False),
        ("H100", frozenset(), False),
        ("H100", A100 | H100, True),
    ],
)
def test_a_type_is_matched_by_whole_words(asked: str | None, types: frozenset[str], matches: bool) -> None:
    assert gpu_type_matches(asked, types) is matches


def test_the_type_of_gpu_does_not_matter_where_no_gpu_is_asked_for() -> None:
    assert layout(job(gpus_per_node=0, gpu_type="B200"), POOL) == (1, 0)


@pytest.mark.parametrize(
    ("asked", "message", "fix"),
    [
        ({"gpus_per_node": 5}, "1 node with 5 GPUs. Of resources.gpus_per_node, 1 node of the pool can", "at most 4."),
        (
            {"num_nodes": 3, "gpus_per_node": 2},
            "3 nodes of the pool can give at most 1",
            "resources.nodes to at most 2",
        ),
        ({"num_nodes": 4}, "The pool has 3 nodes.", "Set resources.nodes to at most 3."),
        ({"total_gpus": 12}, "asks for 12 GPUs. The most that nodes can give", "Set resources.gpus to 8"),
        ({"total_gpus": 5}, "8 GPUs (2 nodes × 4), and 5 cannot be split evenly", "Set resources.gpus to 8"),
        ({"total_gpus": 10, "num_nodes": 2}, "2 nodes with 5 GPUs each", "Set resources.gpus to at most 8."),
        (
            {"gpu_type": "B200"},
            "No node has a GPU of type B200; the pool has NVIDIA A100-SXM4-80GB, NVIDIA H100",
            "type",
        ),
        ({"gpu_type": "A100", "num_nodes": 3}, "The pool has 2 such nodes.", "Set resources.nodes to at most 2."),
        ({"gpu_type": "H100", "gpus_per_node": 2}, "2 GPUs of type H100", "Set resources.gpus_per_node to at most 1."),
        ({"cpus_per_node": 17.0}, "17 CPUs on each node", "Set resources.cpus to at most 16."),
        ({"cpus_per_node": 10.0, "num_nodes": 2}, "at most 8 each", "resources.cpus to at most 8, or resources.nodes"),
        ({"memory_bytes_per_node": 65 * GIB}, "65GiB of memory", "Set resources.memory to at most 64GiB."),
        ({"total_gpus": 2, "memory_bytes_per_node": 65 * GIB}, "largest memory is 64GiB", "at most 64GiB"),
        ({"gpus_per_node": 10**9}, "1000000000 GPUs", "at most 4."),
    ],
)
def test_o20_what_can_never_run_is_refused_with_the_largest_fit_and_the_change(
    asked: dict[str, Any], message: str, fix: str
) -> None:
    answer = resolve_gang(job(**asked), POOL)

    assert isinstance(answer, DoesNotFit)
    assert message in answer.message
    assert fix in answer.fix


def test_a_pool_without_gpus_says_so() -> None:
    answer = resolve_gang(job(gpu_type="H100"), [node(0, types=frozenset())])

    assert isinstance(answer, DoesNotFit)
    assert "the pool has no GPU at all" in answer.message


# --- A range of GPUs -----------------------------------------------------------------------------------------------


def layouts(spec: JobSpec, nodes: list[NodeShape]) -> list[tuple[int, int]]:
    gang = resolve_gang(spec, nodes)
    assert isinstance(gang, ResolvedGang), gang
    return [(one.num_nodes, one.gpus_per_node) for one in gang.layouts]


@pytest.mark.parametrize(
    ("least", "most", "nodes", "expected"),
    [
        (1, 4, [node(4)], [(1, 4), (1, 3), (1, 2), (1, 1)]),
        (2, 4, [node(4), node(2)], [(1, 4), (2, 2), (1, 3), (1, 2), (2, 1)]),
        (2, 100, [node(2), node(2)], [(2, 2), (1, 2), (2, 1)]),
        (5, 8, [node(4), node(4), node(1)], [(2, 4), (2, 3)]),
        (4, 4, [node(4), node(4)], [(1, 4), (2, 2)]),
        (2, 4, [], [(1, 4), (2, 2), (4, 1), (1, 3), (3, 1), (1, 2), (2, 1)]),
    ],
)
def test_a_range_becomes_every_layout_of_equal_shares_that_the_pool_could_hold(
    least: int, most: int, nodes: list[NodeShape], expected: list[tuple[int, int]]
) -> None:
    assert layouts(job(min_gpus=least, total_gpus=most), nodes) == expected
    assert layout(job(min_gpus=least, total_gpus=most), nodes) == expected[0], "what is shown is the largest"


def test_each_layout_has_its_own_processes_and_cpus() -> None:
    gang = resolve_gang(job(min_gpus=2, total_gpus=4), [node(4, cpus=3), node(2, cpus=1)])

    assert isinstance(gang, ResolvedGang)
    assert [(one.num_nodes, one.processes_per_node, one.cpus_per_node) for one in gang.layouts] == [
        (1, 4, 3.0), (2, 2, 1.0), (1, 3, 3.0), (1, 2, 2.0), (2, 1, 1.0),
    ]  # fmt: skip


@pytest.mark.parametrize(("kind", "processes_per_node"), [("command", None), ("script", 1)])
def test_one_process_per_node_stays_one_whatever_the_size(kind: str, processes_per_node: int | None) -> None:
    gang = resolve_gang(job(kind, processes_per_node, min_gpus=1, total_gpus=4), [node(4), node(4)])
    assert isinstance(gang, ResolvedGang)
    assert {one.processes_per_node for one in gang.layouts} == {1}


def test_of_a_wide_range_every_number_keeps_its_layout_on_the_fewest_nodes() -> None:
    gang = resolve_gang(job(min_gpus=1, total_gpus=1024), [])
    assert isinstance(gang, ResolvedGang)
    assert [(one.num_nodes, one.num_gpus) for one in gang.layouts] == [(1, size) for size in range(1024, 0, -1)]
    gang = resolve_gang(job(min_gpus=1, total_gpus=256), [node(8)] * 32)
    assert isinstance(gang, ResolvedGang)
    assert (1, 8) in [(one.num_nodes, one.gpus_per_node) for one in gang.layouts]
    assert (8, 1) in [(one.num_nodes, one.gpus_per_node) for one in gang.layouts], "there is room for all"


def test_a_job_of_one_number_has_no_choice_of_layouts() -> None:
    assert layouts(job(total_gpus=4), [node(4), node(4)]) == []


@pytest.mark.parametrize(
    ("asked", "message", "fix"),
    [
        (
            {"min_gpus": 9, "total_gpus": 12},
            "asks for 9 to 12 GPUs. The most that nodes can give",
            "gpus.min to at most 8",
        ),
        ({"min_gpus": 5, "total_gpus": 5}, "asks for 5 GPUs. The most", "resources.gpus.max to at least 8."),
        ({"min_gpus": 1, "total_gpus": 2, "gpu_type": "B200"}, "1 to 2 GPUs of type B200. No node has", "type"),
        (
            {"min_gpus": 1, "total_gpus": 2, "memory_bytes_per_node": 65 * GIB},
            "largest memory is 64GiB",
            "at most 64GiB",
        ),
    ],
)
def test_a_range_of_which_nothing_fits_is_refused_with_what_would(
    asked: dict[str, Any], message: str, fix: str
) -> None:
    answer = resolve_gang(job(**asked), POOL)

    assert isinstance(answer, DoesNotFit)
    assert message in answer.message
    assert fix in answer.fix


SHAPES = st.builds(
    NodeShape,
    name=st.just("n"),
    num_gpus=st.integers(0, 8),
    gpu_types=st.sampled_from([frozenset(), A100, H100, A100 | H100]),
    cpus=st.sampled_from([0.5, 2.0, 8.0, 64.0]),
    memory_bytes=st.sampled_from([GIB, 64 * GIB]),
)
ASKED = st.builds(
    ResourceSpec,
    num_nodes=st.none() | st.integers(1, 5),
    gpus_per_node=st.none() | st.integers(0, 9),
    gpu_type=st.sampled_from([None, "A100", "H100", "B200"]),
    cpus_per_node=st.sampled_from([None, 1.0, 9.0, 65.0]),
    memory_bytes_per_node=st.sampled_from([None, 2 * GIB, 65 * GIB]),
)
ASKED |= st.builds(ResourceSpec, total_gpus=st.integers(0, 40), cpus_per_node=st.sampled_from([None, 9.0, 65.0]))
RANGES = st.tuples(st.integers(1, 12), st.integers(0, 30)).flatmap(
    lambda ends: st.builds(
        ResourceSpec,
        min_gpus=st.just(ends[0]),
        total_gpus=st.just(sum(ends)),
        gpu_type=st.sampled_from([None, "A100"]),
        cpus_per_node=st.sampled_from([None, 9.0]),
    )
)


@settings(max_examples=300)
@given(asked=ASKED, shapes=st.lists(SHAPES, max_size=6))
def test_a_resolved_gang_fits_the_idle_pool_and_a_refusal_says_what_to_do(
    asked: ResourceSpec, shapes: list[NodeShape]
) -> None:
    answer = resolve_gang(JobSpec(name="x", run=RunSpec(kind="script"), resources=asked), shapes)
    if isinstance(answer, DoesNotFit):
        assert shapes, "a pool without nodes refuses nothing"
        assert answer.message.startswith("The job asks for ")
        assert answer.fix.startswith("Set ")
        return
    able = [
        shape
        for shape in shapes
        if shape.num_gpus >= answer.gpus_per_node
        and shape.cpus >= answer.cpus_per_node
        and shape.memory_bytes >= answer.memory_bytes_per_node
        and (answer.gpus_per_node == 0 or gpu_type_matches(asked.gpu_type, shape.gpu_types))
    ]
    assert len(able) >= answer.num_nodes or not shapes
    assert asked.total_gpus in (None, answer.num_nodes * answer.gpus_per_node)
    assert asked.num_nodes in (None, answer.num_nodes)
    assert asked.gpus_per_node in (None, answer.gpus_per_node)


@settings(max_examples=200)
@given(asked=RANGES, shapes=st.lists(SHAPES, max_size=6))
def test_a_range_has_just_the_layouts_that_would_each_be_taken_alone(
    asked: ResourceSpec, shapes: list[NodeShape]
) -> None:
    spec = JobSpec(name="x", run=RunSpec(kind="script"), resources=asked)
    answer = resolve_gang(spec, shapes)
    found = answer.layouts if isinstance(answer, ResolvedGang) else ()
    least, most = asked.min_gpus or 0, asked.total_gpus or 0
    sizes = [one.num_gpus for one in found]
    assert sizes == sorted(sizes, reverse=True)
    assert all(least <= size <= most for size in sizes)
    for num_nodes in range(1, len(shapes) + 1):
        for share in range(1, 9):
            only = replace(asked, min_gpus=None, total_gpus=None, num_nodes=num_nodes, gpus_per_node=share)
            alone = resolve_gang(replace(spec, resources=only), shapes)
            same = [one for one in found if (one.num_nodes, one.gpus_per_node) == (num_nodes, share)]
            if isinstance(alone, DoesNotFit) or not least <= num_nodes * share <= most:
                assert same == []
            else:
                assert [one.cpus_per_node for one in same] == [alone.cpus_per_node]


# --- GPU memory, labels, exclusive nodes ---------------------------------------------------------------------------


def labelled(num_gpus: int, gib: int = 80, **labels: str) -> NodeShape:
    """A node of GPUs with so much memory, in binary gigabytes, and these labels."""
    return replace(node(num_gpus), gpu_memories=(gib * GIB,) * num_gpus, labels=labels)


CHOICE = [labelled(4, 80, rack="a"), labelled(4, 24, rack="a", disk="nvme"), labelled(2, 80, rack="b")]


@pytest.mark.parametrize(
    ("asked", "expected"),
    [
        ({"total_gpus": 4, "gpu_memory_bytes": 40 * GIB}, (1, 4)),
        ({"total_gpus": 6, "gpu_memory_bytes": 24 * GIB}, (2, 3)),
        ({"num_nodes": 2, "gpus_per_node": 2, "gpu_memory_bytes": 80 * GIB}, (2, 2)),
        ({"gpus_per_node": 4, "labels": {"rack": "a"}}, (1, 4)),
        ({"gpus_per_node": 4, "labels": {"rack": "a", "disk": "nvme"}}, (1, 4)),
        ({"total_gpus": 2, "labels": {"rack": "b"}, "exclusive": True}, (1, 2)),
    ],
)
def test_only_nodes_with_the_labels_and_gpus_with_the_memory_count(
    asked: dict[str, Any], expected: tuple[int, int]
) -> None:
    assert layout(job(**asked), CHOICE) == expected


@pytest.mark.parametrize(
    ("asked", "message", "fix"),
    [
        ({"gpu_memory_bytes": 81 * GIB}, "The largest such GPU of the pool has 80GiB.", "gpu_memory to at most 80GiB"),
        (
            {"num_nodes": 3, "gpu_memory_bytes": 40 * GIB},
            "asks for 3 nodes with 1 GPU of at least 40GiB each. The pool has 2 such nodes.",
            "Set resources.nodes to at most 2.",
        ),
        ({"total_gpus": 8, "gpu_memory_bytes": 40 * GIB}, "equal shares is 4 GPUs (1 node × 4)", "resources.gpus to 4"),
        ({"labels": {"rack": "c"}}, "No node has the label rack=c: its values here are a, b.", "resources.labels.rack"),
        ({"labels": {"ib": "yes"}}, "No node has the label ib=yes: no node has that label.", "leave it out"),
        ({"labels": {"rack": "b", "disk": "nvme"}}, "no node has all of them", "fewer resources.labels"),
        ({"num_nodes": 2, "labels": {"rack": "b"}}, "The pool has 1 such node.", "Set resources.nodes to at most 1."),
        ({"min_gpus": 3, "total_gpus": 4, "labels": {"rack": "b"}}, "equal shares is 2 GPUs", "min to at most 2"),
        ({"min_gpus": 1, "total_gpus": 4, "labels": {"rack": "c"}}, "No node has the label rack=c", "labels.rack"),
        ({"gpu_type": "B200", "gpu_memory_bytes": GIB}, "No node has a GPU of type B200", "resources.gpu"),
    ],
)
def test_o20_labels_and_memory_that_no_node_has_are_refused_with_what_there_is(
    asked: dict[str, Any], message: str, fix: str
) -> None:
    answer = resolve_gang(job(**asked), CHOICE)

    assert isinstance(answer, DoesNotFit)
    assert message in answer.message
    assert fix in answer.fix


def test_cpu_slots_have_no_memory_of_their_own() -> None:
    answer = resolve_gang(job(gpu_memory_bytes=GIB), [node(4)])
    assert isinstance(answer, DoesNotFit)
    assert "CPU slots have none" in answer.message


def test_a_pool_without_any_node_takes_labels_and_memory_as_they_are_said() -> None:
    assert layout(job(total_gpus=4, gpu_memory_bytes=GIB, labels={"a": "b"}), []) == (1, 4)


def test_the_smallest_gpu_that_a_job_may_get_has_the_memory_that_it_asks_for() -> None:
    shapes = [replace(shape, gpu_memory_bytes=min(shape.gpu_memories)) for shape in CHOICE]
    assert least_gpu_memory(None, shapes) == 24 * GIB
    assert least_gpu_memory(None, shapes, at_least=30 * GIB) == 80 * GIB
    assert least_gpu_memory(None, [], at_least=30 * GIB) == 30 * GIB


def test_the_smallest_gpu_that_a_job_may_get_lies_on_a_node_with_its_labels_and_as_many_gpus_as_it_takes() -> None:
    """`auto` would otherwise refuse a model for GPUs that the job never gets."""
    small = replace(node(2), gpu_memory_bytes=24 * GIB, gpu_memories=(24 * GIB,) * 2, labels={"rack": "a"})
    large = replace(node(8), gpu_memory_bytes=80 * GIB, gpu_memories=(80 * GIB,) * 8, labels={"rack": "b"})
    assert least_gpu_memory(None, [small, large]) == 24 * GIB
    assert least_gpu_memory(None, [small, large], labels={"rack": "b"}) == 80 * GIB
    assert least_gpu_memory(None, [small, large], share=4) == 80 * GIB
    assert least_gpu_memory(None, [small, large], share=2) == 24 * GIB


@settings(max_examples=200, deadline=None)
@given(
    st.lists(
        st.builds(
            labelled,
            st.integers(0, 4),
            st.sampled_from([24, 80]),
            rack=st.sampled_from(["a", "b"]),
        ),
        max_size=4,
    ),
    st.integers(1, 3),
    st.integers(1, 8),
    st.sampled_from([None, 24 * GIB, 60 * GIB, 90 * GIB]),
    st.sampled_from([{}, {"rack": "a"}, {"rack": "c"}]),
    st.booleans(),
)
def test_every_job_gets_a_gang_or_an_explanation(
    shapes: list[NodeShape], least: int, most: int, memory: int | None, labels: dict[str, str], is_range: bool
) -> None:
    asked: dict[str, Any] = {"total_gpus": most, "gpu_memory_bytes": memory, "labels": labels}
    if is_range:
        asked["min_gpus"] = min(least, most)
    elif least > 1:
        asked = {**asked, "total_gpus": None, "num_nodes": least, "gpus_per_node": most}
    answer = resolve_gang(job(**asked), shapes)
    if isinstance(answer, DoesNotFit):
        assert answer.message and answer.fix
    elif shapes:
        able = [
            shape
            for shape in shapes
            if labels.items() <= shape.labels.items()
            and sum(size >= (memory or 0) for size in shape.gpu_memories) >= answer.gpus_per_node
        ]
        assert len(able) >= answer.num_nodes
