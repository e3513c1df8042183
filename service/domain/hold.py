"""Who holds a job back, and why: kept with the job as text. Pure.

A hold is a reason of waiting, not a state: a running job may be held too, and then does not start again once it stops.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass


@dataclass(frozen=True, kw_only=True)
class Hold:
    """One hold. The latest counts, but an owner cannot take away an admin's."""

    by: str
    is_by_admin: bool = False
    """By an admin on somebody else's job: only an admin releases it."""
    why: str = ""

    def to_json(self) -> str:
        """As stored in `jobs.hold_reason`."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | None) -> Hold | None:
        """What `to_json` wrote; None for no hold."""
        return None if text is None else cls(**json.loads(text))
