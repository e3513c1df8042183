"""From what a plan names to a `TrainTask`: a built-in recipe, or a function of the user's.

Not for: what a recipe is (`trainer.recipes`).
"""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from typing import Any

from trainer.failure import ConfigError
from trainer.plan.training_plan import RunTarget
from trainer.recipes.registry import build_recipe
from trainer.task import TrainTask


def load_task(target: RunTarget) -> TrainTask:
    """The task. Runs user code for an entry: what it raises passes through. Raises ConfigError when there is none."""
    if target.recipe is not None:
        return build_recipe(target.recipe, target.args)
    assert target.entry is not None, "a checked plan names a recipe or an entry"
    function = _find(target.entry)
    _check_arguments(target.entry, function, target.args)
    task = function(**target.args)
    if not isinstance(task, TrainTask):
        raise ConfigError(f"{target.entry} returned {type(task).__name__}; return a trainer.task.TrainTask.")
    return task


def _find(entry: str) -> Any:
    module_name, _, function_name = entry.partition(":")
    folder = os.getcwd()  # noqa: PTH109  # the code folder, as sys.path holds it: a string
    if folder not in sys.path:
        sys.path.insert(0, folder)
    try:
        module = importlib.import_module(module_name)
    except ModuleNotFoundError as error:
        # Only the module that was named; what that module itself misses is missing in the environment.
        if error.name is not None and (module_name == error.name or module_name.startswith(f"{error.name}.")):
            raise ConfigError(
                f"run.entry names the module {module_name}, which is not in the job's code ({folder})."
            ) from error
        raise
    function = getattr(module, function_name, None)
    if not callable(function):
        raise ConfigError(f"run.entry names {entry}, but {module_name} has no function {function_name}.")
    return function


def _check_arguments(entry: str, function: Any, args: dict[str, Any]) -> None:
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError):
        return  # a callable without one (built in, say): calling it will tell
    try:
        signature.bind(**args)
    except TypeError as error:
        raise ConfigError(f"run.args do not fit {entry}{signature}: {error}.") from error
