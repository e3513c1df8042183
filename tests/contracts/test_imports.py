"""The import contracts of pyproject.toml hold, and each one goes red on a planted wrong import.

A contract that matches nothing (a renamed folder, a wildcard too narrow) would stay green for ever; so each is shown
an import that it must refuse, in a copy of the package folders. What a contract cannot say, "the standard library and
nothing else", is checked here on the import graph.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
import tomllib
from contextlib import redirect_stdout
from pathlib import Path

import grimp
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = ("gangline", "service", "worker", "trainer")

PLANTS: dict[str, list[tuple[str, str]]] = {
    "gangline-stands-alone": [
        ("gangline/planted.py", "import service"),
        ("gangline/protocol/planted.py", "def late():\n    from worker import agent"),
        ("gangline/planted.py", "import trainer"),
    ],
    "gangline-base-install": [("gangline/cli/planted.py", "import fastapi"), ("gangline/planted.py", "import torch")],
    "trainer-stands-alone": [
        ("trainer/planted.py", "import service.domain"),
        ("trainer/planted.py", "import worker"),
        ("trainer/planted.py", "import celery"),
        ("trainer/planted.py", "import sqlite3"),
    ],
    "worker-and-service-apart": [
        ("worker/planted.py", "from service.domain import states"),
        ("service/operations/planted.py", "import worker"),
    ],
    "torch-only-in-trainer": [
        ("service/domain/planted.py", "import torch"),
        ("worker/planted.py", "import torch.distributed"),
        ("trainer/plan/planted.py", "def late():\n    import torch"),
    ],
    "plan-is-all-of-trainer": [
        ("service/operations/planted.py", "import trainer.loop"),
        ("worker/planted.py", "import trainer"),
    ],
    "protocol-is-all-of-gangline": [
        ("service/operations/planted.py", "import gangline.planted"),
        ("worker/planted.py", "from gangline import report"),
        ("trainer/planted.py", "import gangline.planted"),
    ],
    "decisions-are-pure": [
        ("service/domain/planted.py", "import time"),
        ("service/domain/planted.py", "import os"),
        ("service/scheduler/planted.py", "import sqlalchemy"),
        ("service/scheduler/planted.py", "import service.db"),
    ],
    "only-service-touches-the-database": [
        ("worker/planted.py", "import sqlite3"),
        ("gangline/planted.py", "import sqlalchemy"),
        ("trainer/planted.py", "import migrations"),
    ],
    "worker-is-standard-library": [("worker/planted.py", "import celery"), ("worker/planted.py", "import httpx")],
    "service-layers": [
        ("service/domain/planted.py", "import service.schemas"),
        ("service/db/planted.py", "import service.operations"),
        ("service/events/planted.py", "import service.api"),
        ("service/operations/planted.py", "import service.api"),
        ("service/oddments.py", "'A module that has no layer.'"),
    ],
    "scheduler-shell-on-top": [
        ("service/scheduler/plan.py", "import service.scheduler.cycle"),
        ("service/scheduler/placement.py", "import service.scheduler.load_world"),
    ],
    "gangline-layers": [
        ("gangline/protocol/planted.py", "import gangline.report"),
        ("gangline/protocol/planted.py", "import gangline.cli"),
    ],
    "trainer-layers": [
        ("trainer/plan/planted.py", "import trainer.loop"),
        ("trainer/oddments.py", "'A module that has no layer.'"),
    ],
}
"""Contract to wrong imports, each in a file that is added to the copy for one run of the linter."""

ADDED = (
    "gangline/planted.py",
    "gangline/cli/__init__.py",
    "trainer/plan/__init__.py",
    "trainer/loop.py",
    "service/scheduler/cycle.py",
    "service/scheduler/load_world.py",
)
"""Modules that plants need and that may not be written yet: made empty in the copy where they are missing."""

CASES = [(contract, path, source) for contract, plants in PLANTS.items() for path, source in plants]


def contracts() -> dict[str, str]:
    """Id to name of each contract in pyproject.toml."""
    settings = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())
    return {item["id"]: item["name"] for item in settings["tool"]["importlinter"]["contracts"]}


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """What the linter says of each of CASES, in order: one process, one copy, one plant at a time."""
    copy = tmp_path_factory.mktemp("copy")
    for package in PACKAGES:
        shutil.copytree(REPOSITORY / package, copy / package, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(REPOSITORY / "pyproject.toml", copy)
    for name in ADDED:
        (copy / name).parent.mkdir(exist_ok=True)
        (copy / name).touch()
    done = subprocess.run(
        [sys.executable, str(Path(__file__)), json.dumps(CASES)],
        cwd=copy, env={**os.environ, "PYTHONPATH": str(copy)}, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    answers: list[str] = json.loads(done.stdout)
    return answers


def lint(contract: str) -> str:
    """`KEPT`, `BROKEN`, or the linter's complaint, for one contract of the working folder."""
    from importlinter.cli import lint_imports

    with redirect_stdout(io.StringIO()) as output:
        lint_imports(limit_to_contracts=(contract,), no_cache=True, no_logo=True)
    text = output.getvalue()
    for verdict, sign in (("BROKEN", "0 kept, 1 broken"), ("KEPT", "1 kept, 0 broken")):
        if sign in text:
            return verdict
    return text


def lint_plants(cases: list[tuple[str, str, str]]) -> list[str]:
    """Runs in the copy: plant, lint, unplant."""
    answers = []
    for contract, name, source in cases:
        path = Path(name)
        kept = path.read_text() if path.exists() else None
        path.write_text(source + "\n")
        answers.append(lint(contract))
        if kept is None:
            path.unlink()
        else:
            path.write_text(kept)
    return [*answers, *(lint(contract) for contract in contracts())]


def test_every_contract_is_kept() -> None:
    done = subprocess.run(
        [str(Path(sys.executable).with_name("lint-imports")), "--no-logo", "--no-cache"],
        cwd=REPOSITORY, capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip

    assert done.returncode == 0, done.stdout + done.stderr
    assert f"Contracts: {len(contracts())} kept, 0 broken." in done.stdout


@pytest.mark.parametrize("number", range(len(CASES)), ids=[f"{contract}: {name}" for contract, name, _ in CASES])
def test_a_planted_import_breaks_its_contract(number: int, verdicts: list[str]) -> None:
    assert verdicts[number] == "BROKEN"


def test_without_a_plant_the_copy_keeps_every_contract(verdicts: list[str]) -> None:
    assert dict(zip(contracts(), verdicts[len(CASES) :], strict=True)) == dict.fromkeys(contracts(), "KEPT")


def test_every_contract_has_a_plant() -> None:
    assert set(PLANTS) == set(contracts())


PURE_INTERNAL = ("service.domain", "service.scheduler", "gangline.protocol", "trainer.plan")
STANDARD_LIBRARY_ONLY = {
    "gangline.protocol": ("gangline.protocol",),
    "gangline.report": ("gangline.protocol", "gangline.report"),
    "trainer.plan": ("trainer.plan", "gangline.protocol"),
    "worker": ("worker", "gangline.protocol", "trainer.plan"),
    "service.domain": PURE_INTERNAL,
    "service.scheduler": PURE_INTERNAL,
}
"""Package to what it may import beside the standard library."""
SHELLS = {
    "worker.celery_app",
    "worker.tasks",
    *(
        f"service.scheduler.{name}"
        for name in (
            "cycle",
            "apply_plan",
            "world_mirror",
            "load_world",
            "load_nodes",
            "load_nominations",
            "held_world",
            "experience",
        )
    ),
}
"""Modules in there that may reach further; the contracts above bound them."""


@pytest.fixture(scope="module")
def graph() -> grimp.ImportGraph:
    return grimp.build_graph(*PACKAGES, include_external_packages=True, cache_dir=None)


@pytest.mark.parametrize("package", STANDARD_LIBRARY_ONLY)
def test_it_imports_the_standard_library_and_nothing_else(package: str, graph: grimp.ImportGraph) -> None:
    allowed = STANDARD_LIBRARY_ONLY[package]
    modules = {name for name in graph.modules if is_in(name, (package,))} - SHELLS

    foreign = [
        f"{importer} imports {imported}"
        for importer in sorted(modules)
        for imported in sorted(graph.find_modules_directly_imported_by(importer))
        if imported.partition(".")[0] not in sys.stdlib_module_names and not is_in(imported, allowed)
    ]

    assert foreign == []


def is_in(name: str, packages: tuple[str, ...]) -> bool:
    """Whether `name` is one of `packages` or below one."""
    return any(name == package or name.startswith(f"{package}.") for package in packages)


if __name__ == "__main__":
    print(json.dumps(lint_plants(json.loads(sys.argv[1]))))
