"""`auto` chooses as an expert would: the first way that fits, told with numbers, refused only when nothing can fit."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

import pytest

from tests.unit.trainer.plan.models_of_many_sizes import model
from trainer.plan.auto_plan import USABLE_PART, AutoChoice, choose_plan
from trainer.plan.axes import ParallelRequest, RankLayout
from trainer.plan.choice_text import choice_as_dict, choice_lines
from trainer.plan.estimate import OptimizerKind
from trainer.plan.model_profile import ParameterProfile
from trainer.plan.problem import PlanError

GB = 10**9
REFUSED = "refused"


@dataclass(frozen=True)
class Case:
    """A model on GPUs, and what an expert would do."""

    reason: str
    model: str
    nodes: int
    ranks: int
    memory: int | None
    """GB of a GPU."""
    batch: int
    strategy: str
    axes: dict[str, int] = field(default_factory=dict)
    """Of the plan; others are 1."""
    checkpointing: str = "none"
    is_cut: bool = False
    """Whether gradients are accumulated over several parts of the batch."""
    precision: str = "bf16"
    optimizer: str = "adamw"
    warns: str = ""
    """Part of a warning; empty: none about memory."""


CASES = (
    # --- Fits one GPU: data parallelism
    Case("2.6 GB of states and 38 GB of the rest: one GPU, nothing to split", "0.1B", 1, 1, 80, 32, "single"),
    Case(
        "a batch of 2048 does not fit at once, but its parts do: accumulating costs nothing, checkpointing would",
        "0.1B", 1, 1, 80, 2048, "single", is_cut=True,
    ),
    Case("2.6 GB of states leave a 16 GB card room for a sample", "0.1B", 1, 1, 16, 1, "single", precision="fp32"),
    Case(
        "each GPU holds a copy; parts of the batch are smaller on a small card",
        "0.1B", 1, 8, 24, 256, "ddp", {"dp_replicate": 8}, is_cut=True,
    ),
    Case("17 GB of states on one 80 GB card", "1B", 1, 1, 80, 8, "single"),
    Case("fits one GPU, so every GPU gets a copy and other samples", "1B", 1, 8, 80, 64, "ddp", {"dp_replicate": 8}),
    Case(
        "several machines and it fits: DDP over them, which sends least between them",
        "1B", 2, 4, 80, 64, "ddp", {"dp_replicate": 8},
    ),
    Case("50 GB of states still fit one card with one sample at a time", "3B", 1, 1, 80, 8, "single", is_cut=True),
    Case("a card of 192 GB holds 107 GB of states", "7B", 1, 1, 192, 8, "single", is_cut=True),
    Case(
        "SGD keeps one moment less than AdamW: 12.5 GB, and with full checkpointing the rest fits 16 GB",
        "1B", 1, 1, 16, 4, "single", checkpointing="full", is_cut=True, precision="fp32", optimizer="sgd",
    ),
    Case(
        "long context: the states fit one GPU many times, a sample's activations do not; shards would not help",
        "1B, 32k tokens", 1, 8, 80, 8, "ddp", {"dp_replicate": 8}, checkpointing="selective",
    ),
    Case(
        "no list of layers is needed for whole copies",
        "3B that lists no layers", 1, 8, 80, 64, "ddp", {"dp_replicate": 8}, is_cut=True,
    ),
    Case("BatchNorm sees whole batches, and they fit", "resnet", 1, 8, 80, 2048, "ddp", {"dp_replicate": 8}),
    # --- States fit only as shards
    Case(
        "16.6 GB of states on 24 GB cards leave no room, a quarter of them does",
        "1B", 1, 4, 24, 32, "fsdp", {"dp_shard": 4}, is_cut=True,
    ),
    Case(
        "107 GB of states: no copy fits a GPU, an eighth does",
        "7B", 1, 8, 80, 64, "fsdp", {"dp_shard": 8}, is_cut=True,
    ),
    Case(
        "in fp32 as well, with larger activations",
        "7B", 1, 8, 80, 64, "fsdp", {"dp_shard": 8}, is_cut=True, precision="fp32",
    ),
    Case("half of the states on each of two", "7B", 1, 2, 80, 16, "fsdp", {"dp_shard": 2}, is_cut=True),
    Case(
        "small cards: shards of 13 GB and only the inputs of layers",
        "7B", 1, 8, 24, 64, "fsdp", {"dp_shard": 8}, checkpointing="full", is_cut=True,
    ),
    Case(
        "a shard for each GPU of a node, a copy for each node: gathering stays inside the nodes",
        "3B", 2, 4, 40, 64, "hsdp", {"dp_replicate": 2, "dp_shard": 4}, is_cut=True,
    ),
    Case(
        "the same with nodes of eight",
        "13B", 2, 8, 80, 128, "hsdp", {"dp_replicate": 2, "dp_shard": 8}, is_cut=True,
    ),
    Case(
        "nodes of one GPU have nothing to shard inside, so shards go over nodes",
        "7B", 4, 1, 80, 16, "fsdp", {"dp_shard": 4}, is_cut=True,
    ),
    Case(
        "1.04 TB of states: a node's 640 GB are too few, so sharded over all 64",
        "70B", 8, 8, 80, 512, "fsdp", {"dp_shard": 64}, checkpointing="selective", is_cut=True,
    ),
    Case(
        "a head for a million words is gathered whole, but in bf16 it fits",
        "1M words", 1, 8, 80, 64, "fsdp", {"dp_shard": 8}, checkpointing="selective", is_cut=True,
    ),
    # --- Too large a layer, or too few samples: tensor parallelism inside the node
    Case(
        "FSDP gathers layers of 26 GB, with gradients of 52: split over 4 of a node they fit, shards take the rest",
        "layers of 13B", 8, 8, 80, 64, "tensor", {"tp": 4, "dp_shard": 16},
    ),
    Case(
        "32 samples for 64 GPUs: pairs of neighbours share a sample",
        "70B", 8, 8, 80, 32, "tensor", {"tp": 2, "dp_shard": 32},
    ),
    Case("one sample: all four GPUs of the node work at each layer of it", "7B", 1, 4, 80, 1, "tensor", {"tp": 4}),
    # --- Deeper than that: pipelines, or layers one after another
    Case(
        "4 samples for 8 GPUs, and nothing says how layers split: two stages of 4 copies wait least",
        "7B without a tensor plan", 1, 8, 80, 4, "pipeline", {"pp": 2, "dp_replicate": 4},
    ),
    Case(
        "16 samples for 64 GPUs, states too large for few stages: 16 stages, sharded over 4",
        "70B without a tensor plan", 8, 8, 80, 16, "pipeline", {"pp": 16, "dp_shard": 4},
    ),
    Case(
        "a batch of one cannot be cut: the layers one after another",
        "7B without a tensor plan", 1, 4, 80, 1, "model", {"pp": 4},
    ),
    Case(
        "a batch of one on many nodes: layers split inside nodes, and the nodes one after another",
        "70B", 8, 8, 80, 1, "model", {"pp": 8, "tp": 8},
    ),
    # --- Refused, because states alone do not fit; else only warned of
    Case("107 GB of states on 24 GB, whatever the batch", "7B", 1, 1, 24, 8, REFUSED),
    Case("16.6 GB of states on 16 GB", "1B", 1, 1, 16, 4, REFUSED),
    Case("1.04 TB of states on 8 GPUs of 80 GB", "70B", 1, 8, 80, 16, REFUSED),
    Case(
        "65 GB of states on each of 16 do fit 80 GB; the rest is only estimated, so it is tried, with a warning",
        "70B", 2, 8, 80, 32, "tensor", {"tp": 2, "dp_shard": 8}, checkpointing="full", is_cut=True,
        warns="may run out of memory",
    ),
    Case(
        "one unit of all layers is gathered whole: FSDP needs more than there is, but not for its states",
        "3B that lists no layers", 1, 4, 24, 64, "fsdp", {"dp_shard": 4}, is_cut=True, warns="may run out of memory",
    ),
    Case(
        "BatchNorm's batch may not be cut, and full checkpointing is not enough",
        "resnet", 1, 1, 24, 2048, "single", checkpointing="full", warns="may run out of memory",
    ),
    # --- Unknown memory
    Case("CPU slots: nobody knows their memory, so copies", "mlp", 1, 4, None, 128, "ddp", {"dp_replicate": 4}),
    Case("CPU slots and two samples for four", "mlp", 1, 4, None, 2, "pipeline", {"pp": 2, "dp_replicate": 2}),
)  # fmt: skip


def choice_of(case: Case, **request: Any) -> AutoChoice:
    return choose_plan(
        model(case.model),
        ParallelRequest(**{"strategy": "auto", "precision": case.precision, **request}),
        RankLayout(num_nodes=case.nodes, ranks_per_node=case.ranks),
        gpu_memory_bytes=None if case.memory is None else case.memory * GB,
        batch_size=case.batch,
        optimizer=OptimizerKind(name=case.optimizer),
    )


@pytest.mark.parametrize(
    "case",
    CASES,
    ids=lambda one: f"{one.model} on {one.nodes}x{one.ranks}x{one.memory}GB batch {one.batch} {one.strategy}",
)
def test_the_choice_is_an_experts(case: Case) -> None:
    if case.strategy == REFUSED:
        with pytest.raises(PlanError, match=r"take .*, the way that needs least, has .* whatever the batch") as refused:
            choice_of(case)
        assert [one.key for one in refused.value.problems] == ["resources.gpus"]
        return
    choice = choice_of(case)
    plan = choice.plan
    used = {axis: getattr(plan, axis) for axis in ("pp", "dp_replicate", "dp_shard", "tp") if getattr(plan, axis) > 1}
    assert (plan.strategy, used) == (case.strategy, case.axes), case.reason
    assert plan.activation_checkpointing == case.checkpointing, case.reason
    assert (plan.grad_accum_steps > 1) == case.is_cut, case.reason
    about_memory = [one for one in choice.warnings if "memory" in one]
    assert [case.warns in one for one in about_memory] == ([True] if case.warns else [])
    if case.memory is not None:
        assert (choice.memory.worst.total <= USABLE_PART * case.memory * GB) == (not case.warns)


def test_there_are_thirty_cases_and_more() -> None:
    assert len(CASES) >= 30
    assert len({case.reason for case in CASES}) == len(CASES)


SHARDED = next(case for case in CASES if case.model == "7B" and case.strategy == "fsdp" and case.ranks == 8)


def test_why_has_the_numbers_of_what_was_taken_and_of_what_was_not() -> None:
    why = choice_of(SHARDED).why
    assert "6.71 billion parameters" in why
    assert "AdamW take 107 GB" in why
    assert "72 GB of 80 GB" in why
    assert "Chosen is fsdp" in why
    assert "ddp" in why.split("Not taken")[1]
    assert "\n" not in why


def test_alternatives_have_their_price_in_gpus_memory_and_time() -> None:
    choice = choice_of(SHARDED)
    by_gpus = {one.layout.world_size: one for one in choice.alternatives}
    assert by_gpus[2].relative_step_time == pytest.approx(4.0)
    assert by_gpus[16].relative_step_time == pytest.approx(0.5)
    on_the_same = [one for one in choice.alternatives if one.layout.world_size == 8]
    assert {one.plan.strategy for one in on_the_same} == {"tensor", "pipeline"}
    for one in choice.alternatives:
        assert one.memory_bytes <= USABLE_PART * 80 * GB
        assert one.plan.world_size == one.layout.world_size
        assert f"{one.layout.world_size} GPU" in one.text


def test_a_strategy_that_is_named_is_taken_with_a_warning_even_if_it_cannot_fit() -> None:
    choice = choice_of(SHARDED, strategy="ddp")
    assert choice.plan.strategy == "ddp"
    assert "cannot fit: parameters, gradients and optimizer state take 107 GB" in choice.warnings[0]
    assert any(one.plan.strategy == "fsdp" for one in choice.alternatives)


def test_a_strategy_that_is_named_and_fits_is_not_warned_of() -> None:
    choice = choice_of(SHARDED, strategy="fsdp", activation_checkpointing="full", grad_accum_steps=8)
    assert (choice.plan.activation_checkpointing, choice.plan.grad_accum_steps) == ("full", 8)
    assert choice.warnings == ()


def test_what_was_asked_for_beside_auto_is_kept() -> None:
    choice = choice_of(SHARDED, pp=2, activation_checkpointing="selective")
    assert choice.plan.pp == 2
    assert choice.plan.activation_checkpointing in ("selective", "full")
    assert choice_of(SHARDED, grad_accum_steps=2).plan.grad_accum_steps == 2


def test_ranks_that_no_plan_can_use_are_refused_with_what_to_change() -> None:
    case = Case("", "3B that lists no layers", 1, 4, 80, 1, REFUSED)
    with pytest.raises(PlanError, match="no sample for each of 4 ranks; the model does not list its layers") as refused:
        choice_of(case)
    assert "4 or more" in refused.value.problems[0].fix


def test_a_model_with_a_parameter_without_dimension_is_not_sharded() -> None:
    profile = model("7B")
    scale = ParameterProfile(name="head.scale", shape=())
    last = replace(profile.layers[-1], parameters=(*profile.layers[-1].parameters, scale))
    choice = choose_plan(
        replace(profile, layers=(*profile.layers[:-1], last)),
        ParallelRequest(strategy="auto", precision="bf16"),
        RankLayout(ranks_per_node=8),
        gpu_memory_bytes=80 * GB,
        batch_size=64,
    )
    assert choice.plan.dp_shard == 1


def test_unknown_memory_is_said() -> None:
    case = next(one for one in CASES if one.memory is None)
    assert "is not known here" in choice_of(case).why


def test_the_choice_can_be_printed_and_sent() -> None:
    choice = choice_of(SHARDED)
    layout = RankLayout(ranks_per_node=8)
    text = "\n".join(choice_lines(model("7B"), choice, layout, batch_size=64, gpu_memory_bytes=80 * GB))
    for word in ("optimizer", "all-gather", "why: ", "or: 16 GPUs", "of 80 GB (55%)"):
        assert word in text
    sent = choice_as_dict(choice)
    assert sent["plan"]["dp_shard"] == 8
    assert sent["memory"]["by_pp_rank"][0]["total"] == choice.memory.worst.total
