"""Which texts may be shown as a name: of a job, a user, a team, a tag. Pure.

Names are only ever shown: paths, host names and shell words are made of ids. So nearly everything printable is taken,
unchanged. Refused is what would make a line of a table or a log read as something else than it is.
"""

from __future__ import annotations

import json
import re
import unicodedata
from typing import Any, Final

MAX_NAME_LENGTH: Final = 200
MAX_SHOWN_LENGTH: Final = 60
"""Of a value that a message quotes."""
BIDI_CONTROLS: Final = frozenset("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
"""Invisible marks that reorder the text around them."""
_REFUSED_CATEGORIES: Final = {
    "Cc": "a control character",
    "Cs": "half of a character (a lone surrogate)",
    "Zl": "a line separator",
    "Zp": "a paragraph separator",
}
_INVISIBLE_CATEGORIES: Final = frozenset({"Cf", "Zs", "Mn", "Me"})


UNSTORABLE: Final = re.compile(r"[\x00\ud800-\udfff]")
"""NUL and halves of characters: neither database stores them as text."""


def problem_with_name(text: str, *, max_length: int = MAX_NAME_LENGTH) -> str | None:
    """Why `text` cannot be a name, as the end of a sentence ("holds a newline"); None when it can."""
    if not text:
        return "is empty"
    if len(text) > max_length:
        return f"has {len(text)} characters; at most {max_length} are allowed"
    if text.isascii() and text.isprintable():
        return None if text == text.strip() else "begins or ends with a space"
    if (unshowable := problem_with_characters(text)) is not None:
        return unshowable
    if text != text.strip():
        return "begins or ends with a space"
    if all(unicodedata.category(character) in _INVISIBLE_CATEGORIES for character in text):
        return "holds nothing that can be seen"
    return None


def shown(value: Any) -> str:
    """A value of a request as a message quotes it: as JSON, the beginning of a long one."""
    if isinstance(value, dict | list):  # may be nested without end
        return "an object" if isinstance(value, dict) else "a list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return text if len(text) <= MAX_SHOWN_LENGTH else text[:MAX_SHOWN_LENGTH] + "…"


def problem_with_characters(text: str) -> str | None:
    """Why `text` cannot be shown on one line, as the end of a sentence; None when it can."""
    for position, character in enumerate(text, start=1):
        if character in BIDI_CONTROLS:
            what: str | None = "a mark that changes the direction of text"
        elif character == "\n":
            what = "a newline"
        else:
            what = _REFUSED_CATEGORIES.get(unicodedata.category(character))
        if what is not None:
            return f"holds {what} (U+{ord(character):04X}, character {position})"
    return None
