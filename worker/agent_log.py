"""The agent's log: one line a fact, `verb key=value …`, to stderr. Whoever starts the agent decides where that goes.

Not for: what ranks print (their supervisor keeps that), nor for secrets: tokens and broker URLs are never given.
"""

from __future__ import annotations

import json
import re
import sys
from datetime import UTC, datetime
from typing import Final

_PLAIN: Final = re.compile(r"[A-Za-z0-9_.,:/@%+\[\]-]+")


def format_fact(verb: str, facts: dict[str, object], at: datetime) -> str:
    """One line for a fact. Values that hold spaces, quotes or control characters are JSON strings. Pure."""
    stamp = at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
    return " ".join([verb, f"at={stamp}", *(f"{key}={_value(value)}" for key, value in facts.items())])


def log(verb: str, **facts: object) -> None:
    """Write one fact to stderr. A closed stderr is no reason to stop working, so nothing is raised then."""
    try:
        print(format_fact(verb, facts, datetime.now(UTC)), file=sys.stderr, flush=True)  # noqa: T201  # this is the log
    except (OSError, ValueError):
        return


def _value(value: object) -> str:
    text = str(value)
    return text if _PLAIN.fullmatch(text) else json.dumps(text)
