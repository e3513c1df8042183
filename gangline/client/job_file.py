"""A job file on its way to the server: read, find what code it means, put the bundle in, locate faults by line.

The text is sent as the user wrote it, so that the server reads what the user sees; only the value of `code` is
replaced, and every other line keeps its number. Not for: judging a spec, which only the server does.
"""

from __future__ import annotations

import copy
import dataclasses
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gangline.client.errors import GanglineError, InvalidSpec, SpecProblem

if TYPE_CHECKING:
    import yaml

YAML_TYPE = "application/yaml"
JSON_TYPE = "application/json"
MAX_FILE_BYTES = 1024 * 1024


@dataclass(frozen=True, kw_only=True)
class JobFile:
    """A spec as it was given: as YAML text with its syntax tree, or as a plain object."""

    label: str
    """The file's name as the user gave it, for messages; empty for text and objects."""
    folder: Path | None
    """Folder that relative paths start from; None when the spec came without a place."""
    text: str | None = None
    root: yaml.Node | None = None
    data: dict[str, Any] | None = None
    overrides: tuple[tuple[str, str], ...] = ()
    """`set` parameters: dotted key and value text."""
    is_code_settled: bool = False
    """The overrides name the code; the file's own `code` is not looked at."""


def read_job_file(
    spec: str | Path | Mapping[str, Any], overrides: tuple[tuple[str, str], ...] = (), *, text_label: str = ""
) -> JobFile:
    """Read a spec: a path, YAML text, or an object. Raises InvalidSpec for text that is not YAML, with its line."""
    settled = any(name.split(".")[0] == "code" for name, _ in overrides)
    if isinstance(spec, Mapping):
        # json round trip: the caller's object stays untouched, and what JSON cannot say is refused here.
        return JobFile(
            label="", folder=None, data=json.loads(json.dumps(spec)), overrides=overrides, is_code_settled=settled
        )
    if isinstance(spec, Path) or _looks_like_a_path(spec):
        path = Path(spec).expanduser()
        return _parsed(_read_text(path), str(spec), path.parent, overrides, settled)
    return _parsed(spec, text_label, None, overrides, settled)


def _looks_like_a_path(spec: str) -> bool:
    return "\n" not in spec and ": " not in spec and not spec.lstrip().startswith("{")


def _read_text(path: Path) -> str:
    try:
        size = path.stat().st_size
        if path.is_dir():
            raise InvalidSpec(f"{path} is a folder", fix="give the job file inside it", code="usage")
        if size > MAX_FILE_BYTES:
            raise InvalidSpec(
                f"{path} has {size} bytes, a job file at most {MAX_FILE_BYTES}", fix="is it the right file?"
            )
        return path.read_text(encoding="utf-8-sig")
    except FileNotFoundError as error:
        raise InvalidSpec(
            f"there is no file {path}", code="usage", fix="check the path, or write a first job file with `gang init`"
        ) from error
    except UnicodeDecodeError as error:
        raise InvalidSpec(f"{path} is not UTF-8 text: {error}", fix="save it as UTF-8") from error
    except OSError as error:
        raise InvalidSpec(f"cannot read {path}: {error.strerror}", code="usage", fix="check its permissions") from error


def _parsed(
    text: str, label: str, folder: Path | None, overrides: tuple[tuple[str, str], ...], settled: bool
) -> JobFile:
    return JobFile(
        label=label, folder=folder, text=text, root=_compose(text), overrides=overrides, is_code_settled=settled
    )


def _compose(text: str) -> yaml.Node | None:
    import yaml

    try:
        return yaml.compose(text, Loader=yaml.SafeLoader)
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        what = getattr(error, "problem", None) or str(error)
        item: dict[str, Any] = {"pointer": "", "message": f"not valid YAML: {what}"}
        if mark is not None:
            item |= {"line": mark.line + 1, "column": mark.column + 1}
        raise InvalidSpec(
            f"the job file is not valid YAML: {what}",
            fix="mind the indentation, and quote values that hold `: ` or begin with a special character",
            problem={"errors": [item]},
        ) from error


def folder_to_pack(job_file: JobFile) -> Path | None:
    """The folder whose code the job brings; None when it names code on the nodes, a bundle, or brings none.

    A relative `code.path` (or one with `~`) is a folder here; no `code` at all means the job file's own folder (but for
    a recipe, which needs no code).
    """
    if job_file.is_code_settled:
        return None
    is_said, path = _code_of(job_file)
    if path is not None:
        expanded = Path(path).expanduser() if path.startswith("~") else Path(path)
        is_here = path.startswith("~") or not expanded.is_absolute()
        return (job_file.folder or Path()) / expanded if is_here else None
    return None if is_said or _is_recipe(job_file) else job_file.folder


def _is_recipe(job_file: JobFile) -> bool:
    if any(name == "run.recipe" for name, _ in job_file.overrides):
        return True
    if job_file.root is not None:
        return _scalar_at(job_file.root, ("run", "recipe")) is not None
    run = (job_file.data or {}).get("run")
    return isinstance(run, dict) and run.get("recipe") is not None


def missing_script(job_file: JobFile, packed_folder: Path) -> InvalidSpec | None:
    """The error for a `run.script` that the packed folder does not have: found here, before anything is sent."""
    if any(name.split(".")[0] == "run" for name, _ in job_file.overrides):
        return None
    if job_file.root is not None:
        script = _scalar_at(job_file.root, ("run", "script"))
    else:
        run = (job_file.data or {}).get("run")
        script = run.get("script") if isinstance(run, dict) else None
    if not isinstance(script, str) or Path(script).is_absolute() or (packed_folder / script).is_file():
        return None
    message = f"there is no file {script} in {packed_folder.resolve()}, the folder that would be packed"
    return InvalidSpec(
        message,
        fix="give the script's path from that folder, or name the code's folder with `code: {path: FOLDER}`",
        problem={"errors": [{"pointer": "run.script", "message": message}]},
    )


def with_bundle(job_file: JobFile, digest: str | None) -> tuple[bytes, str]:
    """The body to send and its content type, with `code` set to the bundle; None leaves `code` as it is."""
    if job_file.data is not None:
        data = copy.deepcopy(job_file.data)
        if digest is not None:
            data["code"] = {"bundle": digest}
        return json.dumps(data).encode("utf-8"), JSON_TYPE
    text = job_file.text or ""
    if digest is not None and job_file.root is not None:
        text = _placed(text, job_file.root, f'{{"bundle": "{digest}"}}')
    return text.encode("utf-8"), YAML_TYPE


def with_profile(job_file: JobFile, profile: Mapping[str, Any]) -> JobFile:
    """The job file with the profile of its model added; all of its own lines keep their numbers. Raises InvalidSpec
    when it has one already."""
    if job_file.data is not None:
        if "profile" in job_file.data:
            raise _has_profile()
        return dataclasses.replace(job_file, data={**job_file.data, "profile": dict(profile)})
    text, root = job_file.text or "", job_file.root
    if root is None or _value_node(root, "profile") is not None:
        raise _has_profile()
    value = json.dumps(profile)
    if getattr(root, "flow_style", False):
        begin = text.index("{", root.start_mark.index) + 1
        added = f'{text[:begin]}"profile": {value}, {text[begin:]}'
    else:
        end = root.end_mark.index
        line_end = "" if text[:end].endswith("\n") or not text[:end] else "\n"
        added = f"{text[:end]}{line_end}{' ' * root.start_mark.column}profile: {value}\n{text[end:]}"
    return dataclasses.replace(job_file, text=added, root=_compose(added))


def _has_profile() -> InvalidSpec:
    return InvalidSpec("the job file has a profile already", fix="remove it, or leave out --profile")


def located(job_file: JobFile, problems: tuple[SpecProblem, ...]) -> tuple[SpecProblem, ...]:
    """The problems with line and column in the user's own file, where they can be known."""
    located_problems = []
    for problem in problems:
        line, column = problem.line, problem.column
        if line is None and job_file.root is not None and problem.pointer:
            mark = _mark_at(job_file.root, problem.pointer)
            line, column = (mark.line + 1, mark.column + 1) if mark else (None, None)
        located_problems.append(
            SpecProblem(
                pointer=problem.pointer,
                message=problem.message,
                suggestion=problem.suggestion,
                line=line,
                column=column,
            )
        )
    return tuple(located_problems)


# --- The YAML tree -------------------------------------------------------------------------------------------------


def _pairs(node: Any) -> Iterator[tuple[yaml.Node, yaml.Node]]:
    import yaml

    if isinstance(node, yaml.MappingNode):
        yield from node.value


def _value_node(node: Any, key: str) -> yaml.Node | None:
    return next((value for name, value in _pairs(node) if name.value == key), None)


def _scalar_at(node: Any, keys: tuple[str, ...]) -> str | None:
    import yaml

    for key in keys:
        node = _value_node(node, key)
    return node.value if isinstance(node, yaml.ScalarNode) and not node.tag.endswith(":null") else None


def _is_null(node: Any) -> bool:
    return node is not None and node.tag.endswith(":null")


def _code_of(job_file: JobFile) -> tuple[bool, str | None]:
    """Whether the spec says anything about `code`, and its `path` when that is plain text."""
    if job_file.data is not None:
        code = job_file.data.get("code")
        path = code.get("path") if isinstance(code, dict) else None
        return code is not None, path if isinstance(path, str) else None
    node = _value_node(job_file.root, "code")
    is_said = (node is not None and not _is_null(node)) or job_file.root is None or not any(_pairs(job_file.root))
    return is_said, _scalar_at(job_file.root, ("code", "path")) or None


def _placed(text: str, root: yaml.Node, code: str) -> str:
    """`text` with the value of `code` replaced, or `code` added; every other line keeps its number."""
    import yaml

    value = _value_node(root, "code")
    if value is not None:
        begin, end = value.start_mark.index, value.end_mark.index
        replaced = text[begin:end]
        # A block value ends where the next key begins: keep its line ends and that key's indentation.
        last_line = replaced.rpartition("\n")[2] if "\n" in replaced else ""
        tail = "\n" * replaced.count("\n") + (last_line if not last_line.strip() else "")
        lead = " " if begin > 0 and text[begin - 1] == ":" else ""
        result = f"{text[:begin]}{lead}{code}{tail}{text[end:]}"
    elif isinstance(root, yaml.MappingNode) and root.flow_style:
        begin = text.index("{", root.start_mark.index) + 1
        result = f'{text[:begin]}"code": {code}, {text[begin:]}'
    else:
        end = root.end_mark.index
        line_end = "" if text[:end].endswith("\n") or not text[:end] else "\n"
        result = f"{text[:end]}{line_end}{' ' * root.start_mark.column}code: {code}\n{text[end:]}"
    placed = _value_node(_compose(result), "code")
    if placed is None or _value_node(placed, "bundle") is None:
        raise GanglineError(
            "cannot put the bundle into this job file",
            code="usage",
            fix="write `code: {path: .}` on a line of its own, without anchors or aliases",
        )
    return result


def _mark_at(root: yaml.Node, pointer: str) -> Any:
    """Where a dotted key is, or the nearest key above it that the file has."""
    import yaml

    node: Any = root
    mark: Any = None
    for part in pointer.replace("[", ".").replace("]", "").split("."):
        if isinstance(node, yaml.MappingNode):
            pair = next((pair for pair in node.value if pair[0].value == part), None)
            if pair is None:
                break
            mark, node = pair[0].start_mark, pair[1]
        elif isinstance(node, yaml.SequenceNode) and part.isdecimal() and int(part) < len(node.value):
            node = node.value[int(part)]
            mark = node.start_mark
        else:
            break
    return mark
