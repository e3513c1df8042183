"""Labels of a node, such as `switch=leaf-3`: what they may look like, and how a change is applied. Pure.

Not for: which nodes a job may run on (`service.scheduler`).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any, Final

MAX_LABELS: Final = 50
_NAME: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9._/-]{0,61}[a-zA-Z0-9])?")
_VALUE: Final = re.compile(r"[a-zA-Z0-9](?:[a-zA-Z0-9._/:-]{0,61}[a-zA-Z0-9])?")
RULE: Final = (
    "1 to 63 letters, digits, '.', '_', '/' or '-' (a value: ':' too), beginning and ending with a letter or digit"
)


def problems_of(changes: Mapping[str, Any]) -> list[str]:
    """What is wrong with label changes ({name: value, or None to take the label away}), all at once."""
    problems = [f"the label name {name[:70]!r} is not valid" for name in changes if not _NAME.fullmatch(name)]
    problems += [
        f"the value {value!r:.70} of label {name[:70]!r} is not valid"
        for name, value in changes.items()
        if value is not None and not (isinstance(value, str) and _VALUE.fullmatch(value))
    ]
    return problems


def changed_labels(labels: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """The labels after a change, by name. Raises ValueError when they become more than a node may have."""
    merged: dict[str, str | None] = {**labels, **changes}
    kept = {name: value for name, value in sorted(merged.items()) if value is not None}
    if len(kept) > MAX_LABELS:
        raise ValueError(f"the node would have {len(kept)} labels, at most {MAX_LABELS} are kept")
    return kept
