"""`gangline.protocol` and `gangline.report` are imported by interpreters that jobs name: standard library only.

Found by walking the syntax tree, so that imports inside functions and under conditions count too.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[3]
FILES = sorted([*(REPOSITORY / "gangline" / "protocol").rglob("*.py"), REPOSITORY / "gangline" / "report.py"])


def foreign_imports(source: str) -> list[str]:
    """Imported modules that are neither the standard library nor `gangline.protocol`."""
    names: list[str] = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.level:
            names.append("." * node.level + (node.module or ""))
        elif isinstance(node, ast.ImportFrom):
            # `from gangline import protocol` names a module, not what is in one.
            module = node.module or ""
            names += [f"{module}.{alias.name}" for alias in node.names] if module == "gangline" else [module]
    return [name for name in names if not _is_allowed(name)]


def _is_allowed(name: str) -> bool:
    is_ours = name == "gangline.protocol" or name.startswith("gangline.protocol.")
    return is_ours or name.partition(".")[0] in sys.stdlib_module_names


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(REPOSITORY)))
def test_it_imports_the_standard_library_and_the_protocol_alone(path: Path) -> None:
    assert foreign_imports(path.read_text()) == []


@pytest.mark.parametrize(
    ("planted", "name"),
    [
        ("import yaml", "yaml"),
        ("import json, httpx", "httpx"),
        ("from pydantic import BaseModel", "pydantic"),
        ("def send():\n    import requests.sessions", "requests.sessions"),
        ("if TYPE_CHECKING:\n    from torch import Tensor", "torch"),
        ("from gangline import client", "gangline.client"),
        ("from gangline.client import Client", "gangline.client"),
        ("from gangline.protocolx import names", "gangline.protocolx"),
        ("from . import names", "."),
        ("from service.domain.spec import JobSpec", "service.domain.spec"),
    ],
)
def test_a_planted_wrong_import_is_seen(planted: str, name: str) -> None:
    source = (REPOSITORY / "gangline" / "protocol" / "names.py").read_text()

    assert foreign_imports(f"{source}\n{planted}\n") == [name]


@pytest.mark.parametrize("right", ["import os.path", "from gangline.protocol.names import API_PREFIX", "import zlib"])
def test_a_right_import_is_passed_over(right: str) -> None:
    assert foreign_imports(right) == []


def test_every_file_of_the_protocol_is_looked_at() -> None:
    names = {path.name for path in FILES}

    assert {"names.py", "launch.py", "outcomes.py", "bundles.py", "bundle_reader.py", "report.py"} <= names
