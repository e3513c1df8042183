"""Printing the small records of `gang admin`: a table of the fields the server sent, or one sentence.

Not for: jobs and nodes, which have their own columns.
"""

from __future__ import annotations

from typing import Any

from gangline.cli.sanitise import clean_inline
from gangline.cli.session import Session
from gangline.cli.table import Column, Row
from gangline.cli.words import NOTHING


def print_records(session: Session, items: list[dict[str, Any]], fields: tuple[str, ...], empty: str) -> None:
    """A table of those `fields` that the records have."""
    if session.is_json:
        session.json({"items": items})
        return
    if not items:
        session.note(empty)
        return
    shown = [name for name in fields if any(name in item for item in items)]
    columns = [Column(header=name.upper().removesuffix("_AT"), keep=index < 2) for index, name in enumerate(shown)]
    session.table(columns, [Row(cells=tuple(_text(item.get(name)) for name in shown)) for item in items])


def print_record(session: Session, answer: dict[str, Any], sentence: str) -> None:
    """What was done: the server's object as JSON, or a sentence."""
    if session.is_json:
        session.json(answer)
    else:
        session.out(clean_inline(sentence))


def _text(value: Any) -> str:
    if value is None or value == [] or value == "":
        return NOTHING
    if isinstance(value, bool):
        return "yes" if value else NOTHING
    if isinstance(value, list):
        return " ".join(str(item) for item in value)
    return str(value)
