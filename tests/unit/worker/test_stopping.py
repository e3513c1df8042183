"""Which stop a situation asks for, and how stops combine. Times are invented."""

from __future__ import annotations

from typing import Any

import pytest

from gangline.protocol.launch import StopOrder
from tests.unit.worker.test_launcher import a_plan
from worker.stopping import Situation, StopDecision, Stopping, advance, decide_stop, next_deadline

CANCEL = StopOrder(intent="cancel", grace_seconds=7.0)
PLAN = a_plan(time_limit_seconds=100.0, disconnect_stop_seconds=50.0, stop_grace_seconds=30.0)

CASES: dict[str, tuple[dict[str, Any], tuple[str | None, float] | None]] = {
    "nothing happened": ({}, None),
    "an order": ({"order": CANCEL}, ("cancel", 7.0)),
    "the ranks hang": ({"has_failed": True, "is_hung": True}, ("peer_failure", 2.0)),
    "an order, and they hang": ({"order": CANCEL, "has_failed": True, "is_hung": True}, ("cancel", 2.0)),
    "a rank failed": ({"has_failed": True}, ("peer_failure", 30.0)),
    "an order and a failure": ({"order": CANCEL, "has_failed": True}, ("cancel", 7.0)),
    "the limit": ({"running_seconds": 100.0}, ("time_limit", 30.0)),
    "just before the limit": ({"running_seconds": 99.9}, None),
    "cut off": ({"silent_seconds": 50.0}, ("disconnected", 30.0)),
    "every rank has ended": ({"is_over": True}, (None, 5.0)),
    "every rank has ended, one failed": ({"is_over": True, "has_failed": True}, (None, 5.0)),
    "fenced beats all": ({"is_fenced": True, "order": CANCEL, "is_over": True}, ("fenced", 0.0)),
}


@pytest.mark.parametrize("name", CASES)
def test_the_strongest_reason_decides(name: str) -> None:
    facts, expected = CASES[name]
    decision = decide_stop(Situation(**facts), PLAN)

    assert (None if decision is None else (decision.intent, decision.grace_seconds)) == expected


def test_without_limits_a_job_runs_for_ever() -> None:
    plan = a_plan()

    assert decide_stop(Situation(running_seconds=1e9, silent_seconds=1e9), plan) is None
    assert next_deadline(plan, Situation(), None, 5.0) is None


def test_a_stop_under_way_heeds_only_orders_and_fences() -> None:
    current = Stopping(intent="peer_failure", kill_at=30.0)

    assert decide_stop(Situation(is_over=True, running_seconds=1e9), PLAN, current) is None
    assert decide_stop(Situation(is_over=True, order=CANCEL), PLAN, current) is not None
    assert decide_stop(Situation(is_fenced=True), PLAN, current) is not None


def test_a_later_decision_brings_the_kill_forward_and_never_puts_it_off() -> None:
    current = Stopping(intent="peer_failure", kill_at=30.0)

    sooner = advance(current, StopDecision(intent="cancel", grace_seconds=5.0), now=10.0)
    later = advance(current, StopDecision(intent="cancel", grace_seconds=500.0), now=10.0)

    assert (sooner.intent, sooner.kill_at) == ("peer_failure", 15.0)
    assert later == current


def test_an_order_that_is_read_again_does_not_move_the_kill() -> None:
    first = advance(None, StopDecision(intent="cancel", grace_seconds=7.0), now=1.0)

    assert advance(first, StopDecision(intent="cancel", grace_seconds=7.0), now=4.0) == first


def test_fencing_takes_over_a_stop_under_way() -> None:
    fenced = advance(Stopping(intent="cancel", kill_at=30.0), StopDecision(intent="fenced", grace_seconds=0.0), now=2.0)

    assert fenced == Stopping(intent="fenced", kill_at=2.0)
    assert fenced.is_kill_due(2.0)


def test_the_next_look_is_due_at_the_nearest_limit() -> None:
    situation = Situation(running_seconds=90.0, silent_seconds=10.0)

    assert next_deadline(PLAN, situation, None, 1000.0) == 1010.0
    assert next_deadline(PLAN, situation, Stopping(intent="cancel", kill_at=1003.0), 1000.0) == 1003.0
