"""From the bytes of a job file to a `JobSpec`, or to all that is wrong with it, each with its line and what to write.

A sound JSON body is read by the standard library and validated once; places are only looked for when something is
wrong. Not for: whether the pool, the caller's rights or the server's settings allow the job (`service.operations`).
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import Any, Final

from pydantic import ValidationError

from service.domain.spec import JobSpec
from service.errors import FieldProblem as Problem
from service.schemas.job_spec import JobWire, to_job_spec
from service.schemas.located import DocumentError, Located, Path, pointer_of, read_json
from service.schemas.overrides import apply_overrides
from service.schemas.spec_messages import finding_of, shown
from service.schemas.spec_rules import Finding, findings_of, is_trained
from service.schemas.training_rules import TRAINER_PARTS, training_findings
from service.schemas.turn_rules import turn_findings
from service.schemas.yaml_tree import read_yaml

__all__ = ["InvalidSpec", "Problem", "parse_spec"]

MAX_PROBLEMS: Final = 100
"""More are only counted."""


class InvalidSpec(Exception):
    """The job file has problems: all of them, in the order of the file."""

    def __init__(self, problems: Iterable[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{one.pointer}: {one.message}" for one in self.problems[:5]))


def parse_spec(body: bytes, content_type: str, overrides: Sequence[str] = ()) -> JobSpec:
    """The spec that a job file in JSON or YAML describes, after `overrides` (`key.path=value`) are applied.

    Raises InvalidSpec and nothing else. The size of `body` is the caller's to bound.
    """
    document, tree, problems = _read(body, content_type)
    changed: set[Path] = set()
    if overrides:
        changed, more = apply_overrides(document, tuple(overrides))
        problems.extend(more)
    wire: JobWire | None = None
    errors: list[Any] = []
    try:
        wire = JobWire.model_validate(document)
    except ValidationError as error:
        errors = _relevant(error.errors(include_url=False), document)
    findings = [*findings_of(document), *turn_findings(document), *training_findings(document)]
    if wire is not None and not problems and not findings:
        return to_job_spec(wire)
    if tree is None:
        tree, _ = _located(read_json, body.decode("utf-8-sig"))
    hidden = len(errors) + len(findings) + len(problems) - MAX_PROBLEMS
    findings += [finding_of(error, _written(tree, changed, tuple(error["loc"]))) for error in errors[:MAX_PROBLEMS]]
    problems += [_problem_of(finding, tree, changed) for finding in dict.fromkeys(findings[:MAX_PROBLEMS])]
    problems.sort(key=_order)
    if hidden > 0:
        problems = problems[:MAX_PROBLEMS]
        problems.append(
            Problem(pointer="", message=f"has {hidden} further problems.", suggestion="Correct these first.")
        )
    raise InvalidSpec(problems)


# --- Reading -------------------------------------------------------------------------------------------------------


def _read(body: bytes, content_type: str) -> tuple[dict[str, Any], Located | None, list[Problem]]:
    """The document, its tree unless it was read without one, and its duplicate keys."""
    try:
        text = body.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise InvalidSpec([_whole(f"is not UTF-8 (byte {error.start + 1}).", "Save the file as UTF-8.")]) from error
    kind = content_type.partition(";")[0].strip().casefold()
    tree: Located | None = None
    problems: list[Problem] = []
    if kind == "application/json":
        document = _read_sound_json(text)
        if document is None:
            tree, problems = _located(read_json, text)
    elif "yaml" in kind:
        tree, problems = _located(read_yaml, text)
        document = None
    else:
        shown_type = shown(content_type)
        raise InvalidSpec([_whole(f"has the content type {shown_type}.", "Send application/json or application/yaml.")])
    if tree is not None:
        document = tree.plain()
    if not isinstance(document, dict):
        raise InvalidSpec([_whole(f"must be a mapping, not {shown(document)}.", "Begin with name: and run:.", 1, 1)])
    return document, tree, problems


def _located(read: Any, text: str) -> tuple[Located, list[Problem]]:
    try:
        tree, problems = read(text)
    except DocumentError as error:
        raise InvalidSpec([error.problem]) from error
    return tree, problems


class _NotSound(ValueError):
    """The fast reading met what needs a place."""


def _read_sound_json(text: str) -> Any:
    """The value of a JSON text; None when it must be read again with places."""
    try:
        return _SOUND_JSON.decode(text)
    except (ValueError, RecursionError):
        return None


def _without_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) != len(pairs):
        raise _NotSound("duplicate key")
    return mapping


def _refuse_constant(name: str) -> Any:
    raise _NotSound(name)


_SOUND_JSON: Final = json.JSONDecoder(object_pairs_hook=_without_duplicates, parse_constant=_refuse_constant)


# --- Problems ------------------------------------------------------------------------------------------------------


def _whole(message: str, suggestion: str, line: int | None = None, column: int | None = None) -> Problem:
    return Problem(pointer="", message=message, suggestion=suggestion, line=line, column=column)


def _relevant(errors: list[Any], document: dict[str, Any]) -> list[Any]:
    """The model's errors without details of a part that a rule refuses as a whole."""
    if not is_trained(document):
        return [error for error in errors if not any(part in TRAINER_PARTS for part in error["loc"][:1])]
    if isinstance(document["run"].get("args"), dict):
        return errors
    return [error for error in errors if error["loc"][:2] != ("run", "args")]


def _is_set(path: Path, changed: set[Path]) -> bool:
    """Whether an override made the value at `path`."""
    names = tuple(str(step) for step in path)
    return any(names[:length] in changed for length in range(1, len(names) + 1))


def _written(tree: Located, changed: set[Path], path: Path) -> str | None:
    node = None if _is_set(path, changed) else tree.find(path)
    return None if node is None else node.text


def _problem_of(finding: Finding, tree: Located, changed: set[Path]) -> Problem:
    pointer = pointer_of(finding.path)
    if _is_set(finding.path, changed):
        return Problem(pointer=f"--set {pointer}", message=finding.message, suggestion=finding.suggestion)
    line, column = _place(finding, tree)
    return Problem(pointer=pointer, message=finding.message, suggestion=finding.suggestion, line=line, column=column)


def _place(finding: Finding, tree: Located) -> tuple[int, int]:
    """Where a finding stands: the key of an unknown key, the value of another, else the nearest part above."""
    *above, key = finding.path or ("",)
    parent, node = tree.find(tuple(above)), tree.find(finding.path)
    is_about_key = node is not None and (finding.message == "unknown key." or isinstance(node.value, dict))
    if is_about_key and parent is not None and isinstance(key, str) and key in parent.keys:
        return parent.keys[key]
    for length in range(len(finding.path), 0, -1):
        if (node := tree.find(finding.path[:length])) is not None:
            return node.line, node.column
    return tree.line, tree.column


def _order(problem: Problem) -> tuple[bool, int, int, str]:
    return problem.line is None, problem.line or 0, problem.column or 0, problem.pointer
