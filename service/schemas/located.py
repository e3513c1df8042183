"""A document as a tree of values that know where they stand: what `line 7, column 3` in an error comes from.

Holds the reader for JSON, used only once something is wrong: a sound body is read by the standard library. Not for:
YAML (`service.schemas.yaml_tree`), nor for what the values mean.
"""

from __future__ import annotations

import bisect
import re
from dataclasses import dataclass, field
from json import decoder as json_decoder
from typing import Any, Final, cast

from service.errors import FieldProblem as Problem

MAX_DEPTH: Final = 30
MAX_VALUES: Final = 100_000
"""Values in a document, aliases of YAML counted in full."""
Path = tuple[str | int, ...]
"""Keys and list positions from the top of the document to a value."""


@dataclass(slots=True)
class Located:
    """A value and where it begins; lines and columns count from 1."""

    value: Any
    """A scalar, a list of Located or a dict of Located."""
    line: int
    column: int
    text: str | None = None
    """Scalars: as written."""
    keys: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Mappings: where each key stands."""
    height: int = 0
    """Levels of lists and mappings in it."""
    weight: int = 1
    """Values in it, each alias counted in full."""

    def plain(self) -> Any:
        """The value without its places, in plain lists and dicts."""
        if isinstance(self.value, dict):
            return {key: child.plain() for key, child in self.value.items()}
        if isinstance(self.value, list):
            return [child.plain() for child in self.value]
        return self.value

    def find(self, path: Path) -> Located | None:
        """The value at `path`; None when there is none."""
        node = self
        for step in path:
            children = node.value
            is_key = isinstance(children, dict) and step in children
            is_position = isinstance(children, list) and isinstance(step, int) and step < len(children)
            if not is_key and not is_position:
                return None
            node = children[step]
        return node


class DocumentError(Exception):
    """The text is no document at all: one problem ends the reading."""

    def __init__(self, message: str, line: int | None, column: int | None, suggestion: str = "") -> None:
        super().__init__(message)
        self.problem = Problem(pointer="", line=line, column=column, message=message, suggestion=suggestion)


def pointer_of(path: Path) -> str:
    """A path as it is shown: `resources.gpus`, `run.args[3]`."""
    result = ""
    for step in path:
        if isinstance(step, int):
            result += f"[{step}]"
        else:
            step = step if len(step) <= 60 else f"{step[:60]}…"
            result += f".{step}" if result else step
    return result


def duplicate_key(path: Path, line: int, column: int, first_line: int) -> Problem:
    """The problem of a key given twice in one mapping."""
    return Problem(
        pointer=pointer_of(path),
        line=line,
        column=column,
        message=f"is given twice (first in line {first_line}).",
        suggestion="Remove one of them.",
    )


# --- JSON ----------------------------------------------------------------------------------------------------------

_SPACE: Final = re.compile(r"[ \t\n\r]*")
_NUMBER: Final = re.compile(r"-?(?:0|[1-9]\d*)(\.\d+)?([eE][-+]?\d+)?")
_WORDS: Final = {"true": True, "false": False, "null": None}
_WORD: Final = re.compile(r"[A-Za-z]+|-Infinity")


def read_json(text: str) -> tuple[Located, list[Problem]]:
    """The tree of a JSON text, and its duplicate keys. Raises DocumentError."""
    reader = _JsonReader(text)
    root = reader.value((), reader.skip(0), 0)
    if reader.end != len(text):
        raise reader.error("there is something after the end of the JSON document", reader.end)
    return root, reader.problems


class _JsonReader:
    """Recursive, but never deeper than MAX_DEPTH. `end` is where the last value and the space after it end."""

    def __init__(self, text: str) -> None:
        self.text = text
        self.end = 0
        self.problems: list[Problem] = []
        self._num_values = 0
        self._line_starts = [0, *(match.end() for match in re.finditer("\n", text))]

    def place(self, offset: int) -> tuple[int, int]:
        line = bisect.bisect_right(self._line_starts, offset)
        return line, offset - self._line_starts[line - 1] + 1

    def error(self, message: str, offset: int, suggestion: str = "") -> DocumentError:
        return DocumentError(f"{message}.", *self.place(min(offset, len(self.text))), suggestion)

    def skip(self, offset: int) -> int:
        match = _SPACE.match(self.text, offset)
        return match.end() if match else offset

    def value(self, path: Path, offset: int, depth: int) -> Located:
        self._num_values += 1
        if self._num_values > MAX_VALUES:
            raise self.error(f"holds more than {MAX_VALUES} values", offset)
        if depth > MAX_DEPTH:
            raise self.error(f"is nested deeper than {MAX_DEPTH} levels", offset)
        first = self.text[offset : offset + 1]
        line, column = self.place(offset)
        if first == "{":
            node = self._object(path, offset, depth, Located({}, line, column))
        elif first == "[":
            node = self._array(path, offset, depth, Located([], line, column))
        elif first == '"':
            text, end = self._string(offset)
            node = Located(text, line, column, text)
            self.end = end
        else:
            node = Located(self._word_or_number(offset), line, column, self.text[offset : self.end])
        self.end = self.skip(self.end)
        return node

    def _string(self, offset: int) -> tuple[str, int]:
        try:
            # The standard library's own scanner of strings; absent in the type stubs.
            return cast(tuple[str, int], vars(json_decoder)["scanstring"](self.text, offset + 1, True))
        except json_decoder.JSONDecodeError as error:
            raise self.error(error.msg[0].lower() + error.msg[1:], error.pos) from error

    def _word_or_number(self, offset: int) -> Any:
        if match := _WORD.match(self.text, offset):
            self.end = match.end()
            if match[0] in _WORDS:
                return _WORDS[match[0]]
            suggestion = f'Write true, false or null, or put "{match[0][:40]}" in double quotes.'
            raise self.error(f"{match[0][:40]} is not a JSON value", offset, suggestion)
        if match := _NUMBER.match(self.text, offset):
            self.end = match.end()
            if match[1] or match[2]:
                return float(match[0])
            if len(match[0]) > 4000:
                raise self.error(f"the number has {len(match[0])} digits", offset)
            return int(match[0])
        raise self.error("a value is missing here", offset)

    def _array(self, path: Path, offset: int, depth: int, node: Located) -> Located:
        offset = self.skip(offset + 1)
        if self.text[offset : offset + 1] == "]":
            self.end = offset + 1
            return node
        while True:
            node.value.append(self.value((*path, len(node.value)), offset, depth + 1))
            closing = self.text[self.end : self.end + 1]
            if closing == "]":
                self.end += 1
                return node
            if closing != ",":
                raise self.error("a comma or ] is missing here", self.end)
            offset = self.skip(self.end + 1)

    def _object(self, path: Path, offset: int, depth: int, node: Located) -> Located:
        offset = self.skip(offset + 1)
        if self.text[offset : offset + 1] == "}":
            self.end = offset + 1
            return node
        while True:
            if self.text[offset : offset + 1] != '"':
                raise self.error("a key in double quotes is missing here", offset)
            key, end = self._string(offset)
            line, column = self.place(offset)
            if key in node.keys:
                self.problems.append(duplicate_key((*path, key), line, column, node.keys[key][0]))
            colon = self.skip(end)
            if self.text[colon : colon + 1] != ":":
                raise self.error("a colon is missing here", colon)
            node.keys.setdefault(key, (line, column))
            node.value[key] = self.value((*path, key), self.skip(colon + 1), depth + 1)
            closing = self.text[self.end : self.end + 1]
            if closing == "}":
                self.end += 1
                return node
            if closing != ",":
                raise self.error("a comma or } is missing here", self.end)
            offset = self.skip(self.end + 1)
