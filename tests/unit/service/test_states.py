"""Every pair of states of every machine: allowed exactly where design.md section 2 says so. Terminal states follow."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from itertools import product
from typing import Any

import pytest

from gangline.protocol.outcomes import JobState
from service.domain.states import (
    ATTEMPT_NODE_TRANSITIONS,
    ATTEMPT_TRANSITIONS,
    JOB_TRANSITIONS,
    NODE_TRANSITIONS,
    AttemptNodeState,
    AttemptState,
    NodeState,
    sources_of,
    terminal_states,
)

# Written once more by hand, in the words of the design, so that a change of a table is a decision and not a slip.
ALLOWED: Mapping[str, tuple[type[StrEnum], Mapping[Any, frozenset[Any]], str]] = {
    "job": (
        JobState,
        JOB_TRANSITIONS,
        """
        waiting → starting cancelled failed
        starting → running stopping succeeded failed cancelled waiting
        running → stopping succeeded failed cancelled waiting
        stopping → succeeded failed cancelled waiting
        succeeded →
        failed →
        cancelled →
        """,
    ),
    "attempt": (
        AttemptState,
        ATTEMPT_TRANSITIONS,
        """
        allocated → launching stopping ended
        launching → running stopping ended
        running → stopping ended
        stopping → ended
        ended →
        """,
    ),
    "attempt-node": (
        AttemptNodeState,
        ATTEMPT_NODE_TRANSITIONS,
        """
        allocated → claimed ended
        claimed → started ended
        started → ended
        ended →
        """,
    ),
    "node": (
        NodeState,
        NODE_TRANSITIONS,
        """
        ready → unreachable
        unreachable → ready lost
        lost → ready
        """,
    ),
}
PAIRS = [
    pytest.param(machine, source, target, id=f"{machine}-{source}-{target}")
    for machine, (enum, _, _) in ALLOWED.items()
    for source, target in product(enum, enum)
]


def allowed_moves(machine: str) -> dict[str, set[str]]:
    lines = (line.split("→") for line in ALLOWED[machine][2].strip().splitlines())
    return {source.strip(): set(targets.split()) for source, targets in lines}


@pytest.mark.parametrize(("machine", "source", "target"), PAIRS)
def test_a_pair_of_states_is_a_move_exactly_where_the_design_says_so(
    machine: str, source: StrEnum, target: StrEnum
) -> None:
    transitions = ALLOWED[machine][1]
    expected = target in allowed_moves(machine)[source]
    assert (target in transitions[source]) is expected
    assert (source in sources_of(transitions, target)) is expected


@pytest.mark.parametrize("machine", ALLOWED)
def test_every_state_has_its_row_and_none_leads_to_itself(machine: str) -> None:
    enum, transitions, _ = ALLOWED[machine]
    assert set(transitions) == set(enum)
    assert not [state for state, targets in transitions.items() if state in targets]


@pytest.mark.parametrize(
    ("machine", "terminal"),
    [
        ("job", {"succeeded", "failed", "cancelled"}),
        ("attempt", {"ended"}),
        ("attempt-node", {"ended"}),
        ("node", set()),
    ],
)
def test_terminal_states_are_those_that_nothing_leaves(machine: str, terminal: set[str]) -> None:
    assert terminal_states(ALLOWED[machine][1]) == terminal


def test_the_protocol_calls_the_same_states_of_a_job_terminal() -> None:
    assert {state for state in JobState if state.is_terminal} == terminal_states(JOB_TRANSITIONS)


@pytest.mark.parametrize("machine", ["job", "attempt", "attempt-node"])
def test_an_end_can_be_reached_from_every_state(machine: str) -> None:
    _, transitions, _ = ALLOWED[machine]
    reaching = set(terminal_states(transitions))
    for _ in transitions:
        reaching |= {state for state, targets in transitions.items() if targets & reaching}
    assert reaching == set(transitions)
