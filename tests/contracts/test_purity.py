"""Decisions are pure: `service.domain` and `service.scheduler` call no clock, file or dice (but for the shell there).

The import contracts keep out modules; this looks at calls that a harmless module also offers: `datetime.now()`,
`random.random()`, `open()`. Time and a seeded generator come in as arguments.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.contracts import test_imports

REPOSITORY = Path(__file__).resolve().parents[2]
SHELLS = {f"{name.replace('.', '/')}.py" for name in test_imports.SHELLS if name.startswith("service.scheduler.")}
CLOCKS = {"now", "utcnow", "today"}
BUILTINS = {"open", "input", "print", "exec", "eval", "__import__"}


def impurities(source: str) -> list[str]:
    """Each impure call of a module, as `line: call`."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = ast.unparse(node.func)
        owner, _, attribute = name.rpartition(".")
        is_clock = attribute in CLOCKS and owner.rpartition(".")[2] in ("datetime", "date")
        is_dice = owner == "random" and attribute != "Random"
        is_unseeded = name in ("random.Random", "Random") and not node.args
        if is_clock or is_dice or is_unseeded or name in BUILTINS:
            found.append(f"{node.lineno}: {name}")
    return found


def pure_files() -> list[str]:
    files = [path for package in ("domain", "scheduler") for path in (REPOSITORY / "service" / package).rglob("*.py")]
    return sorted(str(path.relative_to(REPOSITORY)) for path in files if "__pycache__" not in path.parts)


@pytest.mark.parametrize("name", [name for name in pure_files() if name not in SHELLS])
def test_decisions_call_no_clock_no_file_and_no_dice(name: str) -> None:
    assert impurities((REPOSITORY / name).read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "datetime.now()",
        "datetime.datetime.now(tz=UTC)",
        "date.today()",
        "random.random()",
        "random.shuffle(nodes)",
        "random.Random()",
        "open('plan.json')",
        "print('placed')",
    ],
)
def test_an_impure_call_is_seen(source: str) -> None:
    assert len(impurities(f"def decide():\n    return {source}")) == 1


@pytest.mark.parametrize("source", ["random.Random(seed)", "now + timedelta(seconds=5)", "world.now()", "nodes.open()"])
def test_a_pure_call_is_not(source: str) -> None:
    assert impurities(f"def decide():\n    return {source}") == []
