"""Patterns of `.ganglineignore`: which paths of a folder stay out of a code bundle. Pure, no I/O.

The rules are those of gitignore: the last matching pattern wins, `!` brings a path back, `dir/` matches folders only, a
slash at the start or in the middle ties a pattern to the top of the folder, `**` crosses folders, and nothing below a
folder that is left out can be brought back. Not for: reading `.gitignore` (what is ignored by version control, data for
one, is often needed by the job).
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

IGNORE_FILE: Final = ".ganglineignore"
DEFAULT_PATTERNS: Final = (
    ".git",
    ".hg",
    ".svn",
    "__pycache__/",
    "*.pyc",
    "*.pyo",
    ".venv/",
    "venv/",
    ".mypy_cache/",
    ".pytest_cache/",
    ".ruff_cache/",
    ".ipynb_checkpoints/",
    ".tox/",
    "node_modules/",
    ".DS_Store",
)
"""Left out unless `.ganglineignore` brings them back with `!`."""


@dataclass(frozen=True, kw_only=True)
class IgnoreRule:
    """One line of an ignore file."""

    expression: re.Pattern[str]
    """Matches a whole path relative to the folder, with `/` between its parts."""
    folders_only: bool
    is_negated: bool


class IgnoreRules:
    """An ordered list of rules. The later rule wins."""

    def __init__(self, lines: Iterable[str]) -> None:
        self._rules = [rule for rule in map(parse_rule, lines) if rule is not None]

    def is_ignored(self, path: str, *, is_folder: bool) -> bool:
        """Whether `path` (relative, `/` between parts) is left out, given that its parent folder is not."""
        for rule in reversed(self._rules):
            if (is_folder or not rule.folders_only) and rule.expression.fullmatch(path):
                return not rule.is_negated
        return False


def rules_of_text(text: str | None) -> IgnoreRules:
    """The default patterns followed by those of an ignore file's text (None: there is no such file)."""
    return IgnoreRules([*DEFAULT_PATTERNS, *(text or "").splitlines()])


def parse_rule(line: str) -> IgnoreRule | None:
    """One line as a rule; None for a blank line or a comment. A pattern that means nothing matches nothing."""
    if line.startswith("#"):
        return None
    # Trailing spaces are dropped unless a backslash keeps them.
    pattern = re.sub(r"(?<!\\)[ \t\r]+$", "", line)
    is_negated = pattern.startswith("!")
    pattern = pattern[1:] if is_negated else pattern
    folders_only = pattern.endswith("/")
    pattern = pattern.rstrip("/")
    if not pattern:
        return None
    is_tied_to_top = "/" in pattern
    prefix = "" if is_tied_to_top else "(?:.*/)?"
    expression = re.compile(prefix + _translate(pattern.lstrip("/")), re.DOTALL)
    return IgnoreRule(expression=expression, folders_only=folders_only, is_negated=is_negated)


def _translate(pattern: str) -> str:
    """A glob as a regular expression, part by part; `**` stands for any number of folders."""
    parts = pattern.split("/")
    pieces: list[str] = []
    for index, part in enumerate(parts):
        is_last = index == len(parts) - 1
        if part == "**":
            pieces.append(".+" if is_last else "(?:.+/)?")
        else:
            pieces.append(_translate_part(part) + ("" if is_last else "/"))
    return "".join(pieces)


def _translate_part(part: str) -> str:
    result: list[str] = []
    index = 0
    while index < len(part):
        character = part[index]
        index += 1
        if character == "*":
            result.append("[^/]*")
        elif character == "?":
            result.append("[^/]")
        elif character == "[" and (end := _end_of_set(part, index)) is not None:
            result.append(_translate_set(part[index:end]))
            index = end + 1
        elif character == "\\" and index < len(part):
            result.append(re.escape(part[index]))
            index += 1
        else:
            result.append(re.escape(character))
    # Two stars side by side mean the same as one, and would make the expression slow.
    return re.sub(r"(?:\[\^/\]\*){2,}", "[^/]*", "".join(result))


def _end_of_set(part: str, start: int) -> int | None:
    """Where the `]` of the set that begins at `start` lies; a `]` in first place belongs to the set."""
    first = start + 1 if part[start : start + 1] in ("!", "^") else start
    end = part.find("]", first + 1)
    return None if end < 0 else end


def _translate_set(body: str) -> str:
    is_negated = body[0] in "!^"
    characters = body[1:] if is_negated else body
    # A range that runs backwards (`[z-a]`) matches nothing in a glob, and would be an error in an expression.
    characters = re.sub(r"(.)-(.)", lambda m: m[0] if m[1] <= m[2] else "", characters, flags=re.DOTALL)
    escaped = re.sub(r"([\\\[\]^&~|])", r"\\\1", characters)
    if not escaped:
        return "[^/]" if is_negated else "(?!)"
    return f"(?!/)[{'^' if is_negated else ''}{escaped}]"
