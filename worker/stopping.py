"""When the ranks of an attempt have to stop, and how far a stop has come. Pure: times are monotonic seconds, given.

`decide_stop` looks at everything that may end an attempt and names the one that counts; `Stopping` is a stop under way.
Not for: sending signals (`worker.supervisor` applies what is decided here).
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final

from gangline.protocol.launch import LaunchPlan, StopOrder
from gangline.protocol.outcomes import StopIntent

LEFTOVER_GRACE_SECONDS: Final = 5.0
"""What ranks left running when they ended by themselves gets at most this long, and never more than the job's grace."""

HUNG_GRACE_SECONDS: Final = 2.0
"""Ranks that hang save nothing any more."""


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What the supervisor knows when it asks whether to stop."""

    is_fenced: bool = False
    order: StopOrder | None = None
    """The server's."""
    has_failed: bool = False
    """A rank ended by itself with anything but 0, or the node itself failed."""
    is_hung: bool = False
    """None of this node's ranks moves on."""
    is_over: bool = False
    """Every rank has ended (or its training has, and it hangs): what lives of the process set are leftovers."""
    running_seconds: float = 0.0
    """Since the first rank started; 0 before."""
    silent_seconds: float = 0.0
    """Since the API last answered."""


@dataclass(frozen=True, kw_only=True)
class StopDecision:
    """Stop now. `intent` is a `StopIntent` (or a word that a newer server knows); None: only leftovers of ranks that
    ended by themselves are in the way."""

    intent: str | None
    grace_seconds: float


@dataclass(frozen=True, kw_only=True)
class Stopping:
    """A stop under way: SIGTERM was sent, SIGKILL follows at `kill_at` to whatever lives then."""

    intent: str | None
    kill_at: float

    def is_kill_due(self, now: float) -> bool:
        """Whether the grace is over."""
        return now >= self.kill_at


def decide_stop(situation: Situation, plan: LaunchPlan, current: Stopping | None = None) -> StopDecision | None:
    """The stop that the situation asks for, the strongest first; None: go on as you are."""
    longest = HUNG_GRACE_SECONDS if situation.is_hung else math.inf
    grace = min(plan.stop_grace_seconds, longest)
    order = situation.order
    if situation.is_fenced:
        # Somebody else may run the job already: no grace.
        return StopDecision(intent=StopIntent.FENCED, grace_seconds=0.0)
    if current is not None:
        return None if order is None else StopDecision(intent=order.intent, grace_seconds=order.grace_seconds)
    if situation.is_over:
        return StopDecision(intent=None, grace_seconds=min(grace, LEFTOVER_GRACE_SECONDS))
    if order is not None:
        return StopDecision(intent=order.intent, grace_seconds=min(order.grace_seconds, longest))
    if situation.has_failed:
        return StopDecision(intent=StopIntent.PEER_FAILURE, grace_seconds=grace)
    if plan.time_limit_seconds is not None and situation.running_seconds >= plan.time_limit_seconds:
        return StopDecision(intent=StopIntent.TIME_LIMIT, grace_seconds=grace)
    if plan.disconnect_stop_seconds is not None and situation.silent_seconds >= plan.disconnect_stop_seconds:
        return StopDecision(intent=StopIntent.DISCONNECTED, grace_seconds=grace)
    return None


def advance(current: Stopping | None, decision: StopDecision, now: float) -> Stopping:
    """The stop after a decision. The first reason stays, except that fencing overrides it; a later decision can bring
    the kill forward, never put it off."""
    kill_at = now + decision.grace_seconds
    if current is None:
        return Stopping(intent=decision.intent, kill_at=kill_at)
    intent = decision.intent if decision.intent == StopIntent.FENCED else current.intent
    return replace(current, intent=intent, kill_at=min(current.kill_at, kill_at))


def next_deadline(plan: LaunchPlan, situation: Situation, stopping: Stopping | None, now: float) -> float | None:
    """Monotonic time at which the situation has to be looked at again although nothing happened; None: never."""
    if stopping is not None:
        return stopping.kill_at
    candidates: list[float] = []
    if plan.time_limit_seconds is not None:
        candidates.append(now + plan.time_limit_seconds - situation.running_seconds)
    if plan.disconnect_stop_seconds is not None:
        candidates.append(now + plan.disconnect_stop_seconds - situation.silent_seconds)
    return min(candidates, default=None)
