"""Global names: what a whole model consists of, the same under every wrapper, and whether ranks have all of it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tests.distributed.checkpoint_cases import OPTIMIZERS, small_model, train
from trainer.checkpoint.state import GlobalNames, apply_state, flat_state, group_conflict, model_values, written_state
from trainer.checkpoint.wholeness import Piece, RankPart, check_copies, is_whole_on_each_node
from trainer.failure import ConfigError

# --- Names -----------------------------------------------------------------------------------------------------------


def test_the_names_of_a_model_say_what_each_value_is_and_which_are_one_parameter() -> None:
    names = GlobalNames.of(small_model())

    assert names.descriptions["0.weight"] == "float32[8, 6]"
    assert names.descriptions["1.num_batches_tracked"] == "int64[]"
    assert names.descriptions.keys() == small_model().state_dict().keys()
    assert names.first_name == {"4.weight": "3.weight"}


def test_the_names_are_known_without_values() -> None:
    with torch.device("meta"):
        on_meta = small_model()

    assert GlobalNames.of(on_meta) == GlobalNames.of(small_model())


def test_a_part_of_the_model_that_is_wrapped_keeps_its_names() -> None:
    model = small_model()
    expected = GlobalNames.of(model)
    compiled: Any = torch.compile(model[3])
    model[3] = compiled
    whole: Any = torch.compile(model)

    assert "_orig_mod.3._orig_mod.weight" in whole.state_dict()
    assert GlobalNames.of(whole) == expected


def test_a_module_called_as_a_wrapper_calls_its_inner_one_keeps_its_name() -> None:
    assert list(model_values(nn.ModuleDict({"module": nn.Linear(2, 2)}))) == ["module.weight", "module.bias"]


# --- Parts -----------------------------------------------------------------------------------------------------------


def last_stage() -> tuple[nn.Module, torch.optim.Optimizer, GlobalNames]:
    """A model's last layer, whose weight is the one of a layer that is elsewhere."""
    names = GlobalNames.of(small_model())
    stage = nn.ModuleDict({"4": nn.Linear(8, 8)})
    optimizer = OPTIMIZERS["adamw"](stage)
    stage["4"](torch.ones(2, 8)).sum().backward()
    optimizer.step()
    return stage, optimizer, names


def test_the_state_of_a_shared_parameter_has_its_first_name_where_only_the_second_is_known() -> None:
    state = flat_state(*last_stage())

    assert {"model.4.weight", "optimizer.state.3.weight/exp_avg", "optimizer.group.3.weight"} <= state.keys()
    assert not [key for key in state if key.startswith(("optimizer.state.4.weight", "optimizer.group.4.weight"))]


def test_only_the_rank_that_has_the_first_name_writes_it() -> None:
    assert {key for key in written_state(flat_state(*last_stage())) if key.startswith("optimizer.group")} == {
        "optimizer.group.4.bias"
    }
    model = small_model()
    state = flat_state(model, OPTIMIZERS["adamw"](model), GlobalNames.of(model))
    assert written_state(state) == state


def test_how_an_optimizer_computes_is_not_restored_and_parts_no_group() -> None:
    """A plan that makes tensors of two kinds needs two groups; under another plan they are one."""
    model = small_model()
    parameters = list(model.parameters())
    optimizer = torch.optim.AdamW(
        [{"params": parameters[:2], "foreach": False}, {"params": parameters[2:], "foreach": True}], lr=0.5
    )
    train(model, optimizer, 1)
    state = flat_state(model, optimizer)
    other = small_model(seed=9)
    one_group = torch.optim.AdamW(other.parameters(), lr=0.01, foreach=False)

    assert group_conflict(state, other, one_group) is None
    apply_state(state, other, one_group)

    assert (one_group.param_groups[0]["lr"], one_group.param_groups[0]["foreach"]) == (0.5, False)


# --- Whole or not ----------------------------------------------------------------------------------------------------

NAMES = GlobalNames(descriptions={"a": "float32[5, 2]", "b": "float32[3]"})


def rows(first: int, count: int, *, is_as_held: bool = True) -> Piece:
    return Piece(shape=(5, 2), offsets=(first, 0), sizes=(count, 2), is_as_held=is_as_held)


def part(node: int, **pieces: Piece | None) -> RankPart:
    return RankPart(node_rank=node, pieces=pieces)


@pytest.mark.parametrize(
    ("parts", "is_whole_per_node"),
    [
        ([part(0, a=None, b=None), part(1, a=None, b=None)], True),
        (
            [
                part(0, a=rows(0, 3), b=None),
                part(0, a=rows(3, 2)),
                part(1, a=rows(0, 3), b=None),
                part(1, a=rows(3, 2)),
            ],
            True,
        ),
        ([part(0, a=rows(0, 3), b=None), part(1, a=rows(3, 2), b=None)], False),
        ([part(0, a=None), part(1, b=None)], False),
        # The same rows twice are not all rows
        ([part(0, a=rows(0, 3), b=None), part(0, a=rows(0, 3)), part(1, a=rows(3, 2), b=None)], False),
    ],
)
def test_copies_of_each_node_are_whole_when_its_ranks_have_every_row(
    parts: list[RankPart], is_whole_per_node: bool
) -> None:
    assert is_whole_on_each_node(parts, NAMES) is is_whole_per_node
    check_copies(parts, NAMES, is_shared=True)
    if is_whole_per_node:
        check_copies(parts, NAMES, is_shared=False)
    else:
        with pytest.raises(ConfigError, match=r"splits the model over nodes.*node 0 .*--shared-folder.*hsdp"):
            check_copies(parts, NAMES, is_shared=False)


@pytest.mark.parametrize(
    ("pieces", "text"),
    [
        ([{"a": rows(0, 3), "b": None}, {"a": rows(3, 1)}], "no rank has a, or not all of it"),
        ([{"a": None}, {}], "no rank has b"),
        ([{"a": None, "b": None, "c": None}], "c was not in it"),
        ([{"a": rows(0, 5, is_as_held=False), "b": None}], "splits a by tp and by dp_shard in pieces of uneven sizes"),
    ],
)
def test_ranks_that_do_not_have_the_model_together_never_start(
    pieces: list[Mapping[str, Piece | None]], text: str
) -> None:
    with pytest.raises(ConfigError, match=text):
        check_copies([part(0, **one) for one in pieces], NAMES, is_shared=True)
