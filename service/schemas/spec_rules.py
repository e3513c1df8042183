"""Rules of a job file beyond types: names and texts, variables, and keys that contradict each other. Pure.

They look at the raw document and pass over what has a wrong type (the model reports that), so that all problems are
found in one go. Not for: recipes and entries (`training_rules`), nor what depends on the pool, the caller or the
server's settings (`service.operations`).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from typing import Any, Final, NamedTuple

from gangline.protocol.names import RESERVED_ENV_PREFIX
from service.domain.text import problem_with_name
from service.schemas.located import Path

MAX_WORD_BYTES: Final = 131_071
"""Linux refuses to start a program with a longer argument or `NAME=value`."""
MAX_ARGS_BYTES: Final = 2**20
MAX_ENV_BYTES: Final = 2**19
_VARIABLE: Final = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_WAYS_TO_RUN: Final = ("script", "command", "recipe", "entry")


class Finding(NamedTuple):
    """A broken rule: where, what, and what to do about it."""

    path: Path
    message: str
    suggestion: str = ""


Document = dict[str, Any]


def findings_of(document: Document) -> Iterator[Finding]:
    """Every broken rule of a raw job file."""
    for rule in _RULES:
        yield from rule(document)


def part_of(document: Document, key: str) -> Document:
    """The mapping at `key`; empty when there is none or the model refuses what is there."""
    part = document.get(key)
    return part if isinstance(part, dict) else {}


def is_trained(document: Document) -> bool:
    """Whether the job names a recipe or entry."""
    run = part_of(document, "run")
    return run.get("recipe") is not None or run.get("entry") is not None


def _whole(part: Document, key: str) -> int | None:
    """A whole number, None when there is none or the model refuses what is there."""
    value = part.get(key)
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None


def _name_rule(document: Document) -> Iterator[Finding]:
    for key in ("name", "team"):
        value = document.get(key)
        if isinstance(value, str) and (problem := problem_with_name(value)):
            yield Finding((key,), f"{problem}.", "Use 1 to 200 printable characters without spaces at the ends.")


def _tag_rule(document: Document) -> Iterator[Finding]:
    for key, value in part_of(document, "tags").items():
        if problem := problem_with_name(key):
            yield Finding(("tags", key), f"the tag's key {problem}.", "Use printable characters.")
        if isinstance(value, str) and value and (problem := problem_with_name(value)):
            yield Finding(("tags", key), f"{problem}.", "Use at most 200 printable characters.")


def _env_rule(document: Document) -> Iterator[Finding]:
    total = 0
    for key, value in part_of(document, "env").items():
        if not _VARIABLE.fullmatch(key):
            yield Finding(
                ("env", key), "is not a name for a variable.", "Use letters, digits and _, no digit at the start."
            )
        elif key.startswith(RESERVED_ENV_PREFIX):
            yield Finding(
                ("env", key), f"names beginning with {RESERVED_ENV_PREFIX} are set by Gangline.", "Use another name."
            )
        if isinstance(value, str):
            yield from _word_findings(("env", key), value, extra_bytes=len(key) + 1)
            total += len(key) + len(value) + 2
    if total > MAX_ENV_BYTES:
        yield Finding(("env",), f"has {total} bytes; at most {MAX_ENV_BYTES} are allowed.", "Put data into a file.")


def _word_findings(path: Path, word: str, *, extra_bytes: int = 0) -> Iterator[Finding]:
    """What an operating system cannot hand to a program."""
    if word.isascii():
        if "\0" in word:
            yield Finding(path, f"holds a NUL byte (character {word.index(chr(0)) + 1}).", "Remove it.")
        size = len(word)
    else:
        if "\0" in word:
            yield Finding(path, f"holds a NUL byte (character {word.index(chr(0)) + 1}).", "Remove it.")
        size = len(word.encode("utf-8", "surrogatepass"))
        if re.search("[\ud800-\udfff]", word):
            yield Finding(path, "holds half of a character (a lone surrogate).", "Write it as valid Unicode.")
    if size + extra_bytes > MAX_WORD_BYTES:
        yield Finding(
            path,
            f"has {size} bytes; Linux hands at most {MAX_WORD_BYTES} to a program in one piece.",
            "Put it into a file of the code folder.",
        )


def _run_rule(document: Document) -> Iterator[Finding]:
    run = document.get("run")
    if not isinstance(run, dict):
        return
    given = [way for way in _WAYS_TO_RUN if run.get(way) is not None]
    if not given:
        yield Finding(("run",), "does not say what to run.", "Give script, command, recipe or entry.")
    if len(given) > 1:
        ways = " and ".join(f"run.{way}" for way in given)
        yield Finding(("run", given[1]), f"{ways} exclude each other.", "Keep one of them.")
    if "command" in given and run.get("args"):
        yield Finding(("run", "args"), "args belongs to run.script.", "Put the arguments into the command.")


def _words_rule(document: Document) -> Iterator[Finding]:
    run = part_of(document, "run")
    for key in ("command",) if is_trained(document) else ("args", "command"):
        value = run.get(key)
        if isinstance(value, str):
            yield from _word_findings(("run", key), value)
            if not value.strip():
                yield Finding(("run", key), "is empty.", "Write the program to run.")
        elif isinstance(value, list):
            total = 0
            for index, word in enumerate(value):
                if isinstance(word, str):
                    yield from _word_findings(("run", key, index), word)
                    total += len(word) + 1
            if total > MAX_ARGS_BYTES:
                yield Finding(
                    ("run", key), f"has {total} bytes; at most {MAX_ARGS_BYTES} are allowed.", "Put them into a file."
                )
    command = run.get("command")
    if isinstance(command, list) and (not command or command[0] == ""):
        yield Finding(("run", "command"), "names no program.", "Put the program first.")


def _code_rule(document: Document) -> Iterator[Finding]:
    code = part_of(document, "code")
    bundle, path = code.get("bundle"), code.get("path")
    if bundle is not None and path is not None:
        yield Finding(("code", "path"), "code.bundle and code.path exclude each other.", "Keep one of them.")
    if isinstance(path, str):
        yield from _word_findings(("code", "path"), path)
        if not path.startswith("/"):
            yield Finding(
                ("code", "path"),
                "must be an absolute folder on the nodes.",
                "Write it from the root (/shared/…), or let gang submit pack the folder.",
            )
    python = document.get("python")
    if isinstance(python, str):
        yield from _word_findings(("python",), python)


def _script_rule(document: Document) -> Iterator[Finding]:
    run, code = part_of(document, "run"), part_of(document, "code")
    script = run.get("script")
    if not isinstance(script, str):
        return
    where: Path = ("run", "script")
    yield from _word_findings(where, script)
    if not script.strip() or script.startswith("-"):
        yield Finding(where, "is not a path of a script.", "Write it relative to the code, such as train.py.")
    if code.get("path") is not None:
        return  # Whoever names a folder of the nodes may name any other.
    if code.get("bundle") is None:
        yield Finding(
            where,
            "there is no code to find the script in.",
            "Give code.path, or use gang submit, which packs the folder.",
        )
    if script.startswith("/"):
        yield Finding(where, "must be relative to the code.", "Write it as it lies in the packed folder.")
    if ".." in script.split("/"):
        yield Finding(where, "leads out of the code folder with '..'.", "Put the script into the packed folder.")


def _gpu_rule(document: Document) -> Iterator[Finding]:
    gpu = part_of(document, "resources").get("gpu")
    if isinstance(gpu, str) and gpu and (problem := problem_with_name(gpu)):
        yield Finding(("resources", "gpu"), f"{problem}.", "Write a type as gang node ls shows it, such as H100.")


def _resources_rule(document: Document) -> Iterator[Finding]:
    resources = part_of(document, "resources")
    total, nodes, each = (_whole(resources, key) for key in ("gpus", "nodes", "gpus_per_node"))
    where: Path = ("resources", "gpus")
    if total is None:
        return
    if nodes is not None and each is not None:
        if nodes * each != total:
            yield Finding(where, f"{nodes} nodes × {each} GPUs are {nodes * each}, not {total}.", "Leave gpus out.")
    elif nodes:
        if total % nodes:
            yield Finding(where, f"{total} GPUs cannot be split evenly over {nodes} nodes.", "Give gpus_per_node.")
    elif each is not None and (total % each if each else total):
        yield Finding(where, f"{total} GPUs cannot be split into nodes of {each}.", "Give nodes instead of gpus.")


def _range_rule(document: Document) -> Iterator[Finding]:
    resources = part_of(document, "resources")
    gpus = resources.get("gpus")
    if not isinstance(gpus, dict):
        return
    least, most = _whole(gpus, "min"), _whole(gpus, "max")
    if least is not None and most is not None and least > most:
        yield Finding(
            ("resources", "gpus", "min"), f"is {least}, more than max, which is {most}.", f"Write at most {most}."
        )
    for key in ("nodes", "gpus_per_node"):
        if resources.get(key) is not None:
            yield Finding(
                ("resources", key),
                "does not go with a range of GPUs: nodes and shares are chosen at each start.",
                "Remove it, or give resources.gpus as one number.",
            )


def _processes_rule(document: Document) -> Iterator[Finding]:
    if document.get("processes_per_node") is not None and part_of(document, "run").get("command") is not None:
        yield Finding(
            ("processes_per_node",),
            "is for run.script; a command runs once per node.",
            "Remove it, and let the command start its processes.",
        )


_RULES: Final[tuple[Callable[[Document], Iterator[Finding]], ...]] = (
    _name_rule,
    _run_rule,
    _words_rule,
    _code_rule,
    _script_rule,
    _gpu_rule,
    _resources_rule,
    _range_rule,
    _processes_rule,
    _env_rule,
    _tag_rule,
)
