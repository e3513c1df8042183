"""What the routes of users and admins read from a JSON body: the members that they know, each with what it may be.

All raise InvalidRequest, which says the value and the fix. Not for: the body itself (`deps.json_body`), job files
(`service.schemas`), nor what nodes report (`agent`).
"""

from __future__ import annotations

from typing import Any, Final

from service.domain.text import problem_with_characters, shown
from service.errors import InvalidRequest

MOST_IN_REASON: Final = 1_000


def only(body: dict[str, Any], *known: str) -> None:
    """Refuse members that the route does not know: a misspelt one would be left out in silence."""
    if unknown := sorted(body.keys() - set(known)):
        raise InvalidRequest(f"unknown members: {', '.join(unknown)}", fix=f"Known: {', '.join(known)}.")


def flag(body: dict[str, Any], key: str) -> bool:
    """A member that is true or false; false where it is left out."""
    value = body.get(key, False)
    if not isinstance(value, bool):
        raise InvalidRequest(f"{key} is {shown(value)}, not true or false", fix=f"Send {key} as true, or leave it out.")
    return value


def text(body: dict[str, Any], key: str) -> str:
    """A member that is a text, and not an empty one."""
    value = body.get(key)
    if not isinstance(value, str) or not value:
        raise InvalidRequest(
            f"{key} is {shown(value) if key in body else 'missing'}, not a text", fix=f"Give {key} a text."
        )
    return value


def reason_given(body: dict[str, Any], *, most: int = MOST_IN_REASON) -> str:
    """Why somebody does something, on one line of at most `most` characters; empty where it is left out."""
    value = body.get("reason", "")
    if not isinstance(value, str) or len(value) > most:
        raise InvalidRequest(
            f"reason {shown(value)} is not a text of at most {most} characters", fix="Say it shorter, on one line."
        )
    if problem := problem_with_characters(value):
        raise InvalidRequest(
            f"reason {shown(value)} {problem}", fix="Write it on one line, without that character: others read it."
        )
    return value.strip()
