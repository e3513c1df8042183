"""Rules of the job file for what Gangline trains itself (`run.recipe`, `run.entry`), judged by `trainer.plan`. Pure.

The API and the ranks read the same plan, so what is accepted here is what they run. Parts with a wrong type are passed
over (the model reports those), so that all problems are found in one go. Not for: the number of ranks, known only once
the gang is resolved (`service.operations.submit_job`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from typing import Any, Final

from pydantic import ValidationError

from service.domain.text import UNSTORABLE
from service.schemas.located import Path, pointer_of
from service.schemas.spec_rules import MAX_ARGS_BYTES, Document, Finding, is_trained, part_of
from service.schemas.training_wire import CheckpointWire, ParallelWire, TrainWire, training_of
from service.schemas.wire_types import WireModel
from trainer.plan.model_profile import read_profile
from trainer.plan.problem import PlanError, PlanProblem
from trainer.plan.training_plan import RunTarget, check_training

TRAINER_PARTS: Final[Mapping[str, type[WireModel]]] = {
    "train": TrainWire,
    "parallel": ParallelWire,
    "checkpoint": CheckpointWire,
}
"""Parts of a job file that only a recipe or entry may have."""
PROFILE: Final = "profile"
MAX_ARGS_DEPTH: Final = 20


def training_findings(document: Document) -> Iterator[Finding]:
    """Every broken rule about recipes, entries and the parts that belong to them."""
    if not is_trained(document):
        yield from _foreign_parts(document)
        return
    yield from _code_rule(document)
    args = list(_args_rule(document))
    yield from args
    yield from _profile_rule(document)
    yield from _plan_rule(document, {pointer_of(finding.path) for finding in args})


def _foreign_parts(document: Document) -> Iterator[Finding]:
    for name in (*TRAINER_PARTS, PROFILE):
        if document.get(name) is not None:
            yield Finding(
                (name,),
                f"{name} belongs to run.recipe and run.entry; a script or command brings its own loop.",
                "Remove it, or write the training as a run.entry.",
            )
    if isinstance(part_of(document, "run").get("args"), dict):
        yield Finding(
            ("run", "args"), "must be a list of strings for run.script, not a mapping.", "Put it in brackets: [ … ]."
        )


def _profile_rule(document: Document) -> Iterator[Finding]:
    profile = document.get(PROFILE)
    if not isinstance(profile, dict):
        return
    try:
        read_profile(json.dumps(profile))
    except (PlanError, TypeError, RecursionError) as error:
        yield Finding(
            (PROFILE,),
            f"is no model profile: {error}".rstrip(".") + ".",
            "Write it with python -m trainer profile JOB_FILE -o json, or leave it out.",
        )


def _code_rule(document: Document) -> Iterator[Finding]:
    entry, code = part_of(document, "run").get("entry"), part_of(document, "code")
    if not isinstance(entry, str):
        return
    if code.get("bundle") is None and code.get("path") is None:
        yield Finding(
            ("run", "entry"),
            "there is no code to find the entry in.",
            "Give code.path, or use gang submit, which packs the folder.",
        )


# --- Parameters ----------------------------------------------------------------------------------------------------


def _args_rule(document: Document) -> Iterator[Finding]:
    args = part_of(document, "run").get("args")
    if args is None:
        return
    where: Path = ("run", "args")
    if not isinstance(args, dict):
        yield Finding(where, "must be a mapping of parameters for run.recipe and run.entry.", "Write {name: value}.")
        return
    size = 0
    waiting: list[tuple[Path, Any]] = [(where, args)]
    while waiting:
        path, value = waiting.pop()
        size += _size_of(value)
        if len(path) - len(where) > MAX_ARGS_DEPTH:
            yield Finding(path[: len(where) + 1], f"is nested deeper than {MAX_ARGS_DEPTH} levels.", "Use a file.")
            return
        if isinstance(value, dict):
            for key in value:
                yield from _text_findings((*path, key), key)
            waiting.extend(((*path, key), inner) for key, inner in value.items())
        elif isinstance(value, list):
            waiting.extend(((*path, index), inner) for index, inner in enumerate(value))
        elif isinstance(value, str):
            yield from _text_findings(path, value)
        elif isinstance(value, float) and not math.isfinite(value):
            yield Finding(path, "must be a finite number.", "Leave it out, or write it as a string.")
    if size > MAX_ARGS_BYTES:
        yield Finding(
            where, f"has about {size} bytes; at most {MAX_ARGS_BYTES} are allowed.", "Use a file of the code."
        )


def _size_of(value: Any) -> int:
    if isinstance(value, dict):
        return sum(len(key) for key in value)
    return len(value) if isinstance(value, str) else 8


def _text_findings(path: Path, text: str) -> Iterator[Finding]:
    if UNSTORABLE.search(text):
        yield Finding(path, "holds a NUL character or half of a character (a lone surrogate).", "Remove it.")


# --- The plan ------------------------------------------------------------------------------------------------------


def _plan_rule(document: Document, bad: set[str]) -> Iterator[Finding]:
    """What the plan's own rules say of the settings whatever the ranks.

    `bad`: keys that are refused already.
    """
    run = part_of(document, "run")
    parts: dict[str, Any] = {}
    for name, model in TRAINER_PARTS.items():
        parts[name], wrong = _sound(model, part_of(document, name))
        bad |= {f"{name}.{key}" for key in wrong}
    recipe, entry = ((value if isinstance(value, str) else None) for value in (run.get("recipe"), run.get("entry")))
    if recipe is None and entry is None:
        return
    # Of two ways to run, `spec_rules` refuses the second; the settings are judged all the same.
    target = RunTarget(recipe=recipe, entry=None if recipe is not None else entry, args=dict(part_of(run, "args")))
    spec = training_of(target, parts["train"], parts["parallel"], parts["checkpoint"])
    try:
        check_training(spec)
    except PlanError as error:
        yield from (finding_of_problem(problem) for problem in error.problems if not _is_known(problem, bad))


def _sound(model: type[WireModel], raw: Document) -> tuple[Any, set[str]]:
    """The part without its keys that have a wrong type or name, and those keys."""
    names = {info.alias or name for name, info in model.model_fields.items()}
    known = {key: value for key, value in raw.items() if key in names}
    wrong = raw.keys() - names
    try:
        return model.model_validate(known), wrong
    except ValidationError as error:
        wrong |= {str(one["loc"][0]) for one in error.errors(include_url=False, include_context=False)}
        return model.model_validate({key: value for key, value in known.items() if key not in wrong}), wrong


def _is_known(problem: PlanProblem, bad: set[str]) -> bool:
    """Whether the model has refused the key, or a key of the part, that the problem is about."""
    return problem.key in bad or any(key.startswith(f"{problem.key}.") for key in bad)


def finding_of_problem(problem: PlanProblem) -> Finding:
    """A problem of the plan at its place in the job file."""
    return Finding(tuple(problem.key.split(".")), problem.message, problem.fix)
