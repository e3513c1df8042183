"""What the agent does next, decided as data: state files and processes on this node, set against the service's answer.

Pure: no clock, no files, no processes, no network. `worker.agent` observes, calls `reconcile`, applies the actions.

The rules are one table, `_RULES`: for each attempt with a folder here, by its phase and what became of its supervisor.
Beside it stand two sentences: whatever is fenced is killed and forgotten; a process set without a folder is killed.

Not for: starting or stopping ranks (the supervisor's), nor for what an ending means (the service decides).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Final


class Phase(StrEnum):
    """How far an attempt has come on this node, as its state file says."""

    CLAIMING = "claiming"
    """A token is written; whether the service has accepted the claim is not known."""
    CLAIMED = "claimed"
    """The launch plan is here; no supervisor has taken it over yet."""
    SUPERVISED = "supervised"
    """A supervisor has written its identity."""
    ENDED = "ended"
    """Its supervisor has nothing left to do but to remove the folder."""
    UNREADABLE = "unreadable"
    """There is a folder, but no state file that can be read: nobody holds its token any more."""


class SupervisorState(StrEnum):
    """What became of an attempt's supervisor (or of the process that finishes for it)."""

    NONE = "none"
    """None was ever recorded."""
    STARTING = "starting"
    """Spawned a moment ago; it may not have written its identity yet."""
    ALIVE = "alive"
    DEAD = "dead"
    """Recorded, and gone: pid, start time or boot id no longer match, or it is a zombie."""
    REBOOTED = "rebooted"
    """Recorded under another boot id: the whole machine was restarted."""


@dataclass(frozen=True, kw_only=True)
class ObservedAttempt:
    """One attempt folder of this node."""

    attempt_id: int
    phase: Phase
    supervisor: SupervisorState


@dataclass(frozen=True, kw_only=True)
class Observed:
    """This node, looked at in this order: processes first, then folders. So a process set is never seen without the
    folder that it already had."""

    attempts: tuple[ObservedAttempt, ...] = ()
    process_sets: frozenset[int] = frozenset()
    """Attempts of exactly this pool and node whose marked processes live here."""


@dataclass(frozen=True, kw_only=True)
class Answer:
    """What the last heartbeat answered; empty when the service could not be reached, which changes nothing here."""

    launch: tuple[int, ...] = ()
    """Attempts that wait for this node to claim them."""
    fenced: frozenset[int] = frozenset()
    """Attempts that are no longer this node's."""


@dataclass(frozen=True, kw_only=True)
class Action:
    """Something to do about one attempt. Every action may be repeated without harm."""

    attempt_id: int


@dataclass(frozen=True, kw_only=True)
class KillProcessSet(Action):
    """End every process that carries the attempt's marker, with SIGKILL."""


@dataclass(frozen=True, kw_only=True)
class ForgetAttempt(Action):
    """Remove the attempt's folder. Nothing is reported: nobody waits for it."""


@dataclass(frozen=True, kw_only=True)
class FinishLost(Action):
    """End what is left of the attempt and report `supervisor_lost`, by a detached process."""

    message: str


@dataclass(frozen=True, kw_only=True)
class FinishFenced(Action):
    """End what is left of the attempt and remove its traces, by a detached process. Nothing is reported."""


@dataclass(frozen=True, kw_only=True)
class SpawnSupervisor(Action):
    """Start the supervisor of an attempt whose launch plan is here."""


@dataclass(frozen=True, kw_only=True)
class StartAttempt(Action):
    """Claim the attempt (with the token of its state file, if there is one) and start its supervisor."""


_ORDER: Final = (KillProcessSet, ForgetAttempt, FinishFenced, FinishLost, SpawnSupervisor, StartAttempt)
"""Shares are freed before new work is started."""

SUPERVISOR_GONE: Final = "The process that supervised this attempt on the node died; its ranks were ended."
NODE_RESTARTED: Final = "The node was restarted while this attempt ran on it."
NEVER_SUPERVISED: Final = "Processes of this attempt were found without a supervisor; they were ended."


def _nothing(attempt_id: int) -> tuple[Action, ...]:
    return ()


def _start(attempt_id: int) -> tuple[Action, ...]:
    return (StartAttempt(attempt_id=attempt_id),)


def _spawn(attempt_id: int) -> tuple[Action, ...]:
    return (SpawnSupervisor(attempt_id=attempt_id),)


def _forget(attempt_id: int) -> tuple[Action, ...]:
    return (ForgetAttempt(attempt_id=attempt_id),)


def _kill_and_forget(attempt_id: int) -> tuple[Action, ...]:
    return (KillProcessSet(attempt_id=attempt_id), ForgetAttempt(attempt_id=attempt_id))


def _finish(message: str) -> Callable[[int], tuple[Action, ...]]:
    return lambda attempt_id: (FinishLost(attempt_id=attempt_id, message=message),)


_RULES: Final[dict[tuple[Phase, SupervisorState], Callable[[int], tuple[Action, ...]]]] = {
    # Claim again with the same token: the service answers the same, or says that it is not ours.
    (Phase.CLAIMING, SupervisorState.NONE): _start,
    (Phase.CLAIMING, SupervisorState.STARTING): _nothing,
    (Phase.CLAIMING, SupervisorState.ALIVE): _nothing,
    (Phase.CLAIMING, SupervisorState.DEAD): _finish(SUPERVISOR_GONE),
    (Phase.CLAIMING, SupervisorState.REBOOTED): _finish(NODE_RESTARTED),
    # The agent ended between claim and spawn, or the supervisor before it wrote its identity.
    (Phase.CLAIMED, SupervisorState.NONE): _spawn,
    (Phase.CLAIMED, SupervisorState.STARTING): _nothing,
    (Phase.CLAIMED, SupervisorState.ALIVE): _nothing,
    (Phase.CLAIMED, SupervisorState.DEAD): _finish(SUPERVISOR_GONE),
    (Phase.CLAIMED, SupervisorState.REBOOTED): _finish(NODE_RESTARTED),
    # Adoption is doing nothing: the supervisor speaks to the service by itself.
    (Phase.SUPERVISED, SupervisorState.NONE): _finish(SUPERVISOR_GONE),
    (Phase.SUPERVISED, SupervisorState.STARTING): _nothing,
    (Phase.SUPERVISED, SupervisorState.ALIVE): _nothing,
    (Phase.SUPERVISED, SupervisorState.DEAD): _finish(SUPERVISOR_GONE),
    (Phase.SUPERVISED, SupervisorState.REBOOTED): _finish(NODE_RESTARTED),
    # The service has the report; only the folder is left.
    (Phase.ENDED, SupervisorState.NONE): _forget,
    (Phase.ENDED, SupervisorState.STARTING): _nothing,
    (Phase.ENDED, SupervisorState.ALIVE): _nothing,
    (Phase.ENDED, SupervisorState.DEAD): _forget,
    (Phase.ENDED, SupervisorState.REBOOTED): _forget,
    # Without its token nothing can be reported. The service sees that this node no longer lists the attempt.
    (Phase.UNREADABLE, SupervisorState.NONE): _kill_and_forget,
    (Phase.UNREADABLE, SupervisorState.STARTING): _nothing,
    (Phase.UNREADABLE, SupervisorState.ALIVE): _kill_and_forget,
    (Phase.UNREADABLE, SupervisorState.DEAD): _kill_and_forget,
    (Phase.UNREADABLE, SupervisorState.REBOOTED): _kill_and_forget,
}

_HAS_SUPERVISOR: Final = frozenset({SupervisorState.STARTING, SupervisorState.ALIVE})


def reconcile(observed: Observed, answer: Answer) -> tuple[Action, ...]:
    """What brings this node to what the service wants: kills first, then by attempt id, each action at most once."""
    folders = {attempt.attempt_id for attempt in observed.attempts}
    actions: set[Action] = set()
    for attempt in observed.attempts:
        actions.update(_decide_attempt(attempt, observed, answer))
    for attempt_id in observed.process_sets - folders:
        actions.add(KillProcessSet(attempt_id=attempt_id))
    # What still runs here without a folder must be gone before the attempt could be started anew.
    for attempt_id in frozenset(answer.launch) - folders - observed.process_sets - answer.fenced:
        actions.add(StartAttempt(attempt_id=attempt_id))
    return tuple(sorted(actions, key=lambda action: (_ORDER.index(type(action)), action.attempt_id)))


def _decide_attempt(attempt: ObservedAttempt, observed: Observed, answer: Answer) -> tuple[Action, ...]:
    attempt_id = attempt.attempt_id
    is_supervised = attempt.supervisor in _HAS_SUPERVISOR
    if attempt_id in answer.fenced:
        return _decide_fenced(attempt, observed)
    actions = _RULES[attempt.phase, attempt.supervisor](attempt_id)
    if attempt_id not in observed.process_sets or is_supervised:
        return actions
    if attempt.phase is Phase.CLAIMED and attempt.supervisor is SupervisorState.NONE:
        # A second set of ranks beside this one would be worse than a lost attempt.
        return (FinishLost(attempt_id=attempt_id, message=NEVER_SUPERVISED),)
    if any(isinstance(action, FinishLost) for action in actions):
        return actions  # whoever finishes ends the processes, and says so
    return (KillProcessSet(attempt_id=attempt_id), *(a for a in actions if not isinstance(a, KillProcessSet)))


def _decide_fenced(attempt: ObservedAttempt, observed: Observed) -> tuple[Action, ...]:
    attempt_id = attempt.attempt_id
    if attempt.supervisor in _HAS_SUPERVISOR:
        # It learns of the fence by itself and removes its folder; its ranks are not waited for. One that has just
        # ended its attempt is named here as well, for as long as its folder lasts.
        return (KillProcessSet(attempt_id=attempt_id),) if attempt_id in observed.process_sets else ()
    if attempt.phase is Phase.SUPERVISED:
        return (FinishFenced(attempt_id=attempt_id),)  # it knows of traces outside the folder
    return _kill_and_forget(attempt_id)
