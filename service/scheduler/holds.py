"""Whether a waiting job is held back by what people said of its turn: held, not before a time, after other jobs. Pure.

These come before any question of room: such a job takes no part in a pass. Not for: quotas and caps, nor the pause
after a failed attempt.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from service.domain.dependencies import Need
from service.domain.hold import Hold
from service.domain.reasons import Reason, ReasonCode
from service.domain.start_time import shown_in_zone

MAX_NEEDS_NAMED = 5


@dataclass(frozen=True, kw_only=True)
class HoldFacts:
    """What is known of a job's turn, as its row and its dependencies say it."""

    job_id: int
    hold_reason: str | None = None
    """`jobs.hold_reason`: a `Hold` as text."""
    start_after: float | None = None
    """Epoch seconds."""
    start_zone: str | None = None
    needs: tuple[Need, ...] = ()
    """All of them; those that are met hold nothing back."""


def hold_of(facts: HoldFacts, now: float) -> tuple[Reason, float | None] | None:
    """Why the job may not start yet, and until when if that is known (epoch seconds); None when nothing holds it.

    Until is None where somebody or something must act first: each of these changes marks the job as changed. One that
    is held says so first, since it stays where it is whatever becomes of the rest.
    """
    if (hold := Hold.from_json(facts.hold_reason)) is not None:
        return _held(hold, facts.job_id), None
    if unmet := [need for need in facts.needs if not need.is_met]:
        return _dependency(unmet), None
    if facts.start_after is not None and now < facts.start_after:
        return _not_yet(facts.start_after, facts.start_zone), facts.start_after
    return None


def _held(hold: Hold, job_id: int) -> Reason:
    why = f": {hold.why}" if hold.why else ""
    who = f"admin {hold.by}" if hold.is_by_admin else hold.by
    release = f"gang release {job_id}."
    fix = f"Ask {hold.by}, or another admin: {release}" if hold.is_by_admin else f"Release it: {release}"
    return Reason(code=ReasonCode.HELD, text=f"It is held by {who}{why}.", fix=fix)


def _dependency(unmet: Sequence[Need]) -> Reason:
    named = [f"{_job(need)} {need.wish} (it is {need.state})" for need in unmet[:MAX_NEEDS_NAMED]]
    if len(unmet) > MAX_NEEDS_NAMED:
        named.append(f"{len(unmet) - MAX_NEEDS_NAMED} more")
    last = named.pop()
    listed = f"{', '.join(named)} and {last}" if named else last
    return Reason(
        code=ReasonCode.DEPENDENCY,
        text=f"It needs {listed}.",
        fix="Nothing to do: it takes its turn then. If that can never be, it is cancelled and says so.",
    )


def _job(need: Need) -> str:
    return "a private job" if need.is_private else f"job {need.job_id}"


def _not_yet(start_after: float, zone: str | None) -> Reason:
    shown = shown_in_zone(start_after, zone or "UTC")
    name = f" ({zone})" if zone and "/" in zone else ""
    return Reason(
        code=ReasonCode.NOT_YET,
        text=f"It must not start before {shown}{name}.",
        fix="Nothing to do: it takes its turn then. To start earlier, submit it with another start_after.",
    )
