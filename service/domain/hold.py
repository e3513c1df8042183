"""Who holds a job back, since when and why: kept with the job as text. Pure.

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
    since: float | None = None
    """Epoch seconds; of a hold that took another's place, since that one. None: since its submission."""

    def to_json(self) -> str:
        """As stored in `jobs.hold_reason`."""
        return json.dumps(asdict(self), ensure_ascii=False)

    @classmethod
    def from_json(cls, text: str | None) -> Hold | None:
        """What `to_json` wrote; None for no hold."""
        return None if text is None else cls(**json.loads(text))


def wait_after(hold: Hold, *, wait_began_at: float, start_after: float | None, now: float) -> float:
    """Since when a waiting job waits once `hold` is released: later by the time in which the hold kept it waiting.

    What it had waited before the hold stays. Before `start_after` it waits for nothing, so no hold takes of that time.
    """
    began = wait_began_at if start_after is None else max(wait_began_at, start_after)
    held_from = began if hold.since is None else max(began, hold.since)
    return wait_began_at if now <= held_from else began + (now - held_from)
