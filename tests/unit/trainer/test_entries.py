"""Entries: what a name in the job file leads to, or why it leads nowhere."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from trainer.entries import load_task
from trainer.failure import ConfigError
from trainer.plan.training_plan import RunTarget

SOURCE = """
from torch import nn
from trainer.task import TrainTask

def build(width=4):
    return TrainTask(model=nn.Linear(width, 1), loss=nn.functional.mse_loss, data=[])

def no_task():
    return "nothing"

number = 3
"""


@pytest.fixture
def code(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The working folder of a job, with a module of its own name."""
    name = f"code_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / f"{name}.py").write_text(SOURCE)
    (tmp_path / f"{name}_broken.py").write_text("import a_package_that_is_nowhere\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path / name


def load(code: Path, function: str, module: str = "", **args: Any) -> Any:
    """The task of a function of the job's module."""
    return load_task(RunTarget(entry=f"{code.name}{module}:{function}", args=args))


def test_an_entry_is_called_with_the_arguments_of_the_job_file(code: Path) -> None:
    assert load(code, "build", width=7).model.in_features == 7


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        ("absent", {}, "has no function absent"),
        ("number", {}, "has no function number"),
        ("build", {"colour": "red"}, r"run.args do not fit .*:build\(width=4\)"),
        ("no_task", {}, "returned str; return a trainer.task.TrainTask"),
    ],
)
def test_a_function_that_gives_no_task_is_refused(
    code: Path, function: str, args: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        load(code, function, **args)


def test_a_module_that_is_not_in_the_code_is_the_job_files_fault(code: Path) -> None:
    with pytest.raises(ConfigError, match="which is not in the job's code"):
        load(code, "build", module="_absent")


def test_a_package_that_the_module_misses_is_missing_in_the_environment(code: Path) -> None:
    with pytest.raises(ModuleNotFoundError, match="a_package_that_is_nowhere"):
        load(code, "build", module="_broken")
