"""Labels of a node: what they may look like, and how a change is applied."""

from __future__ import annotations

from typing import Any

import pytest

from service.domain.node_labels import MAX_LABELS, changed_labels, problems_of


@pytest.mark.parametrize("name", ["switch", "topology.gpu/rack", "a", "A-1", "x" * 63])
@pytest.mark.parametrize("value", ["leaf-3", "10.0.0.1:9400", "b/12", "0", None])
def test_what_a_label_may_be(name: str, value: str | None) -> None:
    assert problems_of({name: value}) == []


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *((name, "x") for name in ("", "a b", "-a", "a-", "x" * 64, "a=b", "ä", "a\n")),
        *(("a", value) for value in ("", "b c", 3, "x" * 64, "x\n")),
    ],
)
def test_what_it_may_not_be(name: str, value: Any) -> None:
    assert len(problems_of({name: value})) == 1


def test_a_change_sets_and_takes_away_and_leaves_the_rest() -> None:
    assert changed_labels({"a": "1", "b": "2"}, {"b": None, "c": "3", "never": None}) == {"a": "1", "c": "3"}


def test_a_node_has_only_so_many() -> None:
    full = {f"l{number}": "x" for number in range(MAX_LABELS)}
    assert len(changed_labels(full, {"l1": "y"})) == MAX_LABELS
    with pytest.raises(ValueError, match="51 labels"):
        changed_labels(full, {"one": "more"})
