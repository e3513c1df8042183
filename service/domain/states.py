"""States of a job, an attempt, an attempt-node and a node, and the moves between them, as data.

`service.db.transitions` is the only writer of a state and obeys these tables; the diagram in the docs and the test over
all pairs are made from them. Terminal states are derived: those that nothing leaves.
"""

from collections.abc import Mapping
from enum import StrEnum
from typing import Final, TypeVar

from gangline.protocol.outcomes import JobState

__all__ = [
    "ATTEMPT_NODE_TRANSITIONS",
    "ATTEMPT_TRANSITIONS",
    "JOB_TRANSITIONS",
    "NODE_TRANSITIONS",
    "AttemptNodeState",
    "AttemptState",
    "JobState",
    "NodeState",
    "sources_of",
    "terminal_states",
]


class AttemptState(StrEnum):
    """State of one try at running a job."""

    ALLOCATED = "allocated"
    """Its nodes and GPUs are held; nobody has claimed it yet."""
    LAUNCHING = "launching"
    """At least one node has claimed its part."""
    RUNNING = "running"
    """Every node reported its ranks started."""
    STOPPING = "stopping"
    """Asked to stop; waits for every node to report its process set empty."""
    ENDED = "ended"


class AttemptNodeState(StrEnum):
    """State of an attempt on one node: the unit of claim, fencing and release."""

    ALLOCATED = "allocated"
    CLAIMED = "claimed"
    STARTED = "started"
    ENDED = "ended"


class NodeState(StrEnum):
    """State of a node. Cordon, drain and quarantine are flags with a reason, not states."""

    READY = "ready"
    UNREACHABLE = "unreachable"
    """Missed three heartbeats: shown, gets no new work, its jobs go on."""
    LOST = "lost"
    """Silent for so long that its attempts are ended and placed again."""


S = TypeVar("S", bound=StrEnum)
Transitions = Mapping[S, frozenset[S]]

JOB_TRANSITIONS: Final[Transitions[JobState]] = {
    JobState.WAITING: frozenset({JobState.STARTING, JobState.CANCELLED, JobState.FAILED}),
    JobState.STARTING: frozenset(
        {
            JobState.RUNNING,
            JobState.STOPPING,
            JobState.SUCCEEDED,
            JobState.FAILED,
            JobState.CANCELLED,
            JobState.WAITING,
        }
    ),
    JobState.RUNNING: frozenset(
        {JobState.STOPPING, JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.WAITING}
    ),
    JobState.STOPPING: frozenset({JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED, JobState.WAITING}),
    JobState.SUCCEEDED: frozenset(),
    JobState.FAILED: frozenset(),
    JobState.CANCELLED: frozenset(),
}

ATTEMPT_TRANSITIONS: Final[Transitions[AttemptState]] = {
    AttemptState.ALLOCATED: frozenset({AttemptState.LAUNCHING, AttemptState.STOPPING, AttemptState.ENDED}),
    AttemptState.LAUNCHING: frozenset({AttemptState.RUNNING, AttemptState.STOPPING, AttemptState.ENDED}),
    AttemptState.RUNNING: frozenset({AttemptState.STOPPING, AttemptState.ENDED}),
    AttemptState.STOPPING: frozenset({AttemptState.ENDED}),
    AttemptState.ENDED: frozenset(),
}

ATTEMPT_NODE_TRANSITIONS: Final[Transitions[AttemptNodeState]] = {
    AttemptNodeState.ALLOCATED: frozenset({AttemptNodeState.CLAIMED, AttemptNodeState.ENDED}),
    AttemptNodeState.CLAIMED: frozenset({AttemptNodeState.STARTED, AttemptNodeState.ENDED}),
    AttemptNodeState.STARTED: frozenset({AttemptNodeState.ENDED}),
    AttemptNodeState.ENDED: frozenset(),
}

NODE_TRANSITIONS: Final[Transitions[NodeState]] = {
    NodeState.READY: frozenset({NodeState.UNREACHABLE}),
    NodeState.UNREACHABLE: frozenset({NodeState.READY, NodeState.LOST}),
    NodeState.LOST: frozenset({NodeState.READY}),
}


def sources_of(transitions: Transitions[S], target: S) -> frozenset[S]:
    """The states from which `target` may be entered."""
    return frozenset(source for source, targets in transitions.items() if target in targets)


def terminal_states(transitions: Transitions[S]) -> frozenset[S]:
    """The states that nothing leaves."""
    return frozenset(state for state, targets in transitions.items() if not targets)
