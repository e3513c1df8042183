"""`--set key.path=value`: changes of a job document before it is checked. Pure.

The value is a YAML scalar, or a list or mapping in `[ ]` or `{ }`. Where the schema wants text the value is taken as it
stands, so that `--set env.STEPS=10` and `--set name=7` do what they say. Not for: checking the result.
"""

from __future__ import annotations

from typing import Any, Final

from service.errors import FieldProblem as Problem
from service.schemas.located import MAX_DEPTH, DocumentError, Path
from service.schemas.yaml_tree import read_yaml, resolve_scalar

_TEXT_MAPS: Final = frozenset({("env",), ("tags",), ("resources", "labels")})
_COMMAND: Final = ("run", "command")
_TEXT_KEYS: Final = frozenset(
    {
        ("name",),
        ("start_after",),
        ("zone",),
        ("on_time_limit",),
        ("team",),
        ("python",),
        ("on_disconnect",),
        ("code", "bundle"),
        ("code", "path"),
        ("run", "script"),
        _COMMAND,
        ("run", "recipe"),
        ("run", "entry"),
        ("resources", "gpu"),
        ("parallel", "strategy"),
        ("parallel", "precision"),
        ("train", "optimizer"),
        ("train", "schedule"),
    }
)
_QUOTES: Final = ('"', "'")
_BRACKETS: Final = ("[", "{")
_MAX_SHOWN: Final = 60


def apply_overrides(document: dict[str, Any], overrides: tuple[str, ...]) -> tuple[set[Path], list[Problem]]:
    """Change `document` in place. Returns the paths that were set, and what is wrong with the overrides themselves."""
    changed: set[Path] = set()
    problems: list[Problem] = []
    for override in overrides:
        name, equals, text = override.partition("=")
        path = _path_of(name)
        if not equals or not path or len(path) > MAX_DEPTH or not all(path):
            problems.append(
                _problem(override, "is not of the form key.path=value.", "Write, for example, --set resources.gpus=2.")
            )
            continue
        try:
            value = _value_of(path, text)
        except DocumentError as error:
            problems.append(_problem(name, error.problem.message, "Put the value in quotes."))
            continue
        if (obstacle := _set(document, path, value)) is not None:
            problems.append(_problem(name, obstacle, "Set a key of the job file."))
            continue
        changed.add(path)
    return changed, problems


def _problem(name: str, message: str, suggestion: str) -> Problem:
    name = name if len(name) <= _MAX_SHOWN else f"{name[:_MAX_SHOWN]}…"
    return Problem(pointer=f"--set {name}", message=message, suggestion=suggestion)


def _path_of(name: str) -> tuple[str, ...]:
    steps = tuple(name.strip().split("."))
    for length in (1, 2):
        if steps[:length] in _TEXT_MAPS and len(steps) > length:
            return (*steps[:length], ".".join(steps[length:]))  # Names of tags and labels may hold dots.
    return steps


def _value_of(path: tuple[str, ...], text: str) -> Any:
    is_map_value = path[:-1] in _TEXT_MAPS
    is_text = is_map_value or path in _TEXT_KEYS
    if text[:1] in _QUOTES or (text[:1] in _BRACKETS and (not is_text or path == _COMMAND)):
        tree, problems = read_yaml(text, path)
        if problems:
            raise DocumentError(f"{problems[0].pointer} {problems[0].message}", None, None)
        return tree.plain()
    value = resolve_scalar(text, path)
    if is_map_value:
        return text
    return text if is_text and value is not None else value


def _set(document: dict[str, Any], path: tuple[str, ...], value: Any) -> str | None:
    """Set the value, making mappings on the way. Returns what stands in the way, if anything."""
    here: Any = document
    for depth, step in enumerate(path):
        if isinstance(here, list):
            if not step.isdecimal() or len(step) > 9 or int(step) >= len(here):
                return f"{'.'.join(path[:depth])} is a list of {len(here)} and has no place {step[:_MAX_SHOWN]}."
            key: Any = int(step)
        elif isinstance(here, dict):
            key = step
        else:
            return f"{'.'.join(path[:depth])} is a single value and has no keys."
        if depth == len(path) - 1:
            here[key] = value
            return None
        below = here[key] if isinstance(key, int) else here.get(key)
        if below is None:
            below = here[key] = {}
        here = below
    return None
