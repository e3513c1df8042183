"""Reads a YAML document into a tree of located values: the plain part of YAML 1.2, nothing that can surprise.

`no`, `on` and `yes` are words, `010` and `1_000` and dates are text, a key is always text: YAML 1.1 would turn
`retry: {on: […]}` into a key `true`. Built from PyYAML's event stream without recursion, so that depth, aliases and
size are bounded while reading. Tags, merge keys and several documents are refused. Not for: what the values mean.
"""

from __future__ import annotations

import re
from typing import Any, Final

import yaml

from service.errors import FieldProblem as Problem
from service.schemas.located import MAX_DEPTH, MAX_VALUES, DocumentError, Located, Path, duplicate_key

MAX_ALIASES: Final = 100
_LOADER: Final[Any] = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
_NULL: Final = frozenset({"", "~", "null", "Null", "NULL"})
_BOOL: Final = {"true": True, "True": True, "TRUE": True, "false": False, "False": False, "FALSE": False}
_INT: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]{0,4000})")
_FLOAT: Final = re.compile(r"[-+]?(?:\.[0-9]+|(?:0|[1-9][0-9]*)\.[0-9]*)(?:[eE][-+]?[0-9]+)?")
_EXPONENT: Final = re.compile(r"[-+]?(?:0|[1-9][0-9]*)[eE][-+]?[0-9]+")
_NOT_FINITE: Final = re.compile(r"[-+]?\.(?:inf|Inf|INF)|\.(?:nan|NaN|NAN)")


def is_setting(path: Path) -> bool:
    """Whether a value at `path` is a setting of a training: no word for a program, so `3e-4` is a number there."""
    is_parameter = path[:2] == ("run", "args") and len(path) > 2 and isinstance(path[2], str)
    return is_parameter or path[:1] in (("train",), ("parallel",), ("checkpoint",))


def resolve_scalar(text: str, path: Path) -> Any:
    """What an unquoted scalar at `path` means: null, true or false, a number, else the text itself.

    `3.0e-4` is a number. `3e-4` is text (it reaches a program exactly as written), but a number where it is a setting.
    """
    if text in _NULL:
        return None
    if text in _BOOL:
        return _BOOL[text]
    if _INT.fullmatch(text):
        return int(text)
    if _FLOAT.fullmatch(text) or (_EXPONENT.fullmatch(text) and is_setting(path)):
        return float(text)
    if _NOT_FINITE.fullmatch(text):
        return float(text.lower().replace(".", "", 1))
    return text


def read_yaml(text: str, at: Path = ()) -> tuple[Located, list[Problem]]:
    """The tree of a YAML text, and its duplicate keys; `at`: its place in a job file. Raises DocumentError."""
    reader = _YamlReader(at)
    loader = None
    try:
        loader = _LOADER(text)
        while loader.check_event():
            reader.take(loader.get_event())
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        place = (None, None) if mark is None else (mark.line + 1, mark.column + 1)
        about = " ".join(part for part in (error.context, error.problem) if part)
        raise DocumentError(f"is not YAML: {about}.", *place) from error
    except (yaml.YAMLError, UnicodeError) as error:
        raise DocumentError(f"is not YAML: {' '.join(str(error).split())[:200]}.", None, None) from error
    finally:
        if loader is not None:
            loader.dispose()
    if reader.root is None:
        raise DocumentError("is empty.", 1, 1, "Describe a job: at least name and run.")
    return reader.root, reader.problems


class _Open:
    """A list or mapping that is being read."""

    def __init__(self, node: Located, path: Path, anchor: str | None) -> None:
        self.node = node
        self.path = path
        self.anchor = anchor
        self.key: str | None = None
        self.is_in_mapping = isinstance(node.value, dict)

    @property
    def expects_key(self) -> bool:
        return self.is_in_mapping and self.key is None


class _YamlReader:
    """Builds the tree from events."""

    def __init__(self, at: Path) -> None:
        self._at = at
        self.root: Located | None = None
        self.problems: list[Problem] = []
        self._open: list[_Open] = []
        self._anchors: dict[str, Located | None] = {}
        """None while the value is still open."""
        self._num_aliases = 0
        self._num_anchors = 0

    def take(self, event: Any) -> None:
        kind = type(event)
        if kind is yaml.ScalarEvent:
            self._scalar(event)
        elif kind in (yaml.MappingStartEvent, yaml.SequenceStartEvent):
            self._start(event, {} if kind is yaml.MappingStartEvent else [])
        elif kind in (yaml.MappingEndEvent, yaml.SequenceEndEvent):
            self._end()
        elif kind is yaml.AliasEvent:
            self._alias(event)
        elif kind is yaml.DocumentStartEvent and self.root is not None:
            raise _error(event, "holds a second document.", "Submit one job per file; remove the line ---.")

    def _scalar(self, event: Any) -> None:
        self._check_properties(event)
        line, column = event.start_mark.line + 1, event.start_mark.column + 1
        if self._open and self._open[-1].expects_key:
            self._key(event.value, line, column, event)
            return
        is_plain = event.implicit[0]
        value = resolve_scalar(event.value, self._path()) if is_plain else event.value
        node = Located(value, line, column, event.value)
        if event.anchor:
            self._anchors[event.anchor] = node
        self._add(node, event)

    def _key(self, key: str, line: int, column: int, event: Any) -> None:
        top = self._open[-1]
        if key == "<<":
            raise _error(event, "uses a YAML merge key (<<).", "Write the keys out.")
        if key in top.node.keys:
            self.problems.append(duplicate_key((*top.path, key), line, column, top.node.keys[key][0]))
        top.node.keys.setdefault(key, (line, column))
        top.key = key

    def _start(self, event: Any, empty: Any) -> None:
        self._check_properties(event)
        if len(self._open) >= MAX_DEPTH:
            raise _error(event, f"is nested deeper than {MAX_DEPTH} levels.")
        if self._open and self._open[-1].expects_key:
            raise _error(event, "has a list or mapping where a key must stand.", "Put the key in quotes.")
        path = self._path()
        node = Located(empty, event.start_mark.line + 1, event.start_mark.column + 1)
        if event.anchor:
            self._anchors[event.anchor] = None
        self._open.append(_Open(node, path, event.anchor))

    def _path(self) -> Path:
        """Where the value that comes next will stand."""
        if not self._open:
            return self._at
        top = self._open[-1]
        return (*top.path, top.key if top.key is not None else len(top.node.value))

    def _end(self) -> None:
        done = self._open.pop()
        if done.anchor:
            self._anchors[done.anchor] = done.node
        done.node.height += 1
        self._add(done.node, None)

    def _alias(self, event: Any) -> None:
        self._num_aliases += 1
        node = self._anchors.get(event.anchor)
        if event.anchor not in self._anchors:
            raise _error(event, f"refers to *{event.anchor}, which is not defined before it.")
        if node is None:
            raise _error(event, f"refers to *{event.anchor} from inside itself.", "Write the value out.")
        if self._num_aliases > MAX_ALIASES:
            raise _error(event, f"uses more than {MAX_ALIASES} aliases.", "Write the values out.")
        if self._open and self._open[-1].expects_key:
            if isinstance(node.value, dict | list):
                raise _error(event, "has an alias where a key must stand.", "Write the key out.")
            self._key(node.text or "", event.start_mark.line + 1, event.start_mark.column + 1, event)
            return
        self._add(node, event)

    def _add(self, node: Located, event: Any) -> None:
        if not self._open:
            self.root = node
            return
        top = self._open[-1]
        if top.key is not None:
            top.node.value[top.key] = node
            top.key = None
        else:
            top.node.value.append(node)
        top.node.weight += node.weight
        top.node.height = max(top.node.height, node.height)
        if top.node.weight > MAX_VALUES:
            raise _error(event, f"holds more than {MAX_VALUES} values.")
        if len(self._open) + node.height > MAX_DEPTH:
            raise _error(event, f"is nested deeper than {MAX_DEPTH} levels.")

    def _check_properties(self, event: Any) -> None:
        if event.tag is not None:
            raise _error(event, f"uses the YAML tag {event.tag[:60]}.", "Remove the tag; plain values are enough.")
        if event.anchor:
            self._num_anchors += 1
            if self._num_anchors > MAX_ALIASES:
                raise _error(event, f"uses more than {MAX_ALIASES} anchors.", "Write the values out.")


def _error(event: Any, message: str, suggestion: str = "") -> DocumentError:
    if event is None:
        return DocumentError(message, None, None, suggestion)
    return DocumentError(message, event.start_mark.line + 1, event.start_mark.column + 1, suggestion)
