"""Who is told that a request is not valid is told what to do: no such error points at fields that it does not name."""

from __future__ import annotations

import ast
from pathlib import Path
from typing import Any

import pytest

from service.errors import FieldProblem, InvalidRequest

SERVICE = Path(__file__).resolve().parents[2] / "service"


def raisers() -> list[tuple[str, ast.Call]]:
    """Each place that makes an `InvalidRequest`."""
    found = []
    for path in sorted(SERVICE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and ast.unparse(node.func) == "InvalidRequest":
                found.append((f"{path.relative_to(SERVICE.parent)}:{node.lineno}", node))
    return found


@pytest.mark.parametrize(("place", "call"), raisers(), ids=[place for place, _ in raisers()])
def test_each_place_gives_a_fix_or_names_the_fields(place: str, call: ast.Call) -> None:
    assert {"fix", "errors"} & {keyword.arg for keyword in call.keywords}, place


def test_one_without_either_cannot_be_made() -> None:
    nothing: dict[str, Any]
    for nothing in ({}, {"fix": ""}, {"errors": []}):
        with pytest.raises(TypeError, match="needs a fix, or the fields at fault: seconds is -5"):
            InvalidRequest("seconds is -5", **nothing)
    named = InvalidRequest("1 problem", errors=[FieldProblem(pointer="seconds", message="is -5")])
    assert named.fix == "Correct the fields named in errors."
    assert InvalidRequest("seconds is -5", fix="Give more than 0.").fix == "Give more than 0."
