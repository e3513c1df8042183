"""A job that is held, that needs others or that must not start yet says so, in that order, and takes no part until."""

from __future__ import annotations

from datetime import datetime
from typing import Any

import pytest

from gangline.protocol.outcomes import JobState, Outcome
from service.domain.decide_outcome import Cause
from service.domain.dependencies import MET_BY, Need, hopeless_cause
from service.domain.hold import Hold, wait_after
from service.domain.reasons import REASON_MEANINGS, ReasonCode
from service.domain.spec import Condition
from service.operations.settle_attempt import describe_cause
from service.scheduler.holds import HoldFacts, hold_of

START = datetime.fromisoformat("2026-11-01T01:30:00-05:00").timestamp()
ENDED = (JobState.SUCCEEDED, JobState.FAILED, JobState.CANCELLED)


def need(job_id: int = 12, condition: str = "ok", state: str = "running", **more: Any) -> Need:
    return Need(job_id=job_id, condition=Condition(condition), state=JobState(state), **more)


def told(facts: HoldFacts, now: float = 0.0) -> tuple[str, str, float | None]:
    """Code, sentence, and until when."""
    held = hold_of(facts, now)
    assert held is not None
    assert held[0].fix
    return held[0].code, held[0].text, held[1]


def test_a_job_of_which_nothing_was_said_is_free() -> None:
    assert hold_of(HoldFacts(job_id=7), 0.0) is None
    assert hold_of(HoldFacts(job_id=7, needs=(need(state="succeeded"),), start_after=START), START) is None


def test_a_held_job_says_by_whom_and_why_and_who_may_release_it() -> None:
    own, admins = Hold(by="ann", why="data moves"), Hold(by="root", is_by_admin=True)
    assert told(HoldFacts(job_id=7, hold_reason=own.to_json())) == ("held", "It is held by ann: data moves.", None)
    assert told(HoldFacts(job_id=7, hold_reason=admins.to_json()))[1] == "It is held by admin root."
    assert Hold.from_json(own.to_json()) == own


def test_o57_a_job_starts_at_its_instant_and_not_an_hour_early() -> None:
    facts = HoldFacts(job_id=7, start_after=START, start_zone="America/New_York")
    text = "It must not start before 2026-11-01T01:30:00-05:00 (America/New_York)."
    assert told(facts, START - 3_600) == ("not_yet", text, START), "the first 01:30 of that night is not the second"
    assert told(facts, START - 0.001)[2] == START
    assert hold_of(facts, START) is None


def test_a_job_names_what_it_needs_and_how_that_stands() -> None:
    facts = HoldFacts(
        job_id=7, needs=(need(12), need(13, "any", "waiting"), need(14, "not_ok", "failed")), start_after=START
    )
    assert told(facts) == (
        "dependency", "It needs job 12 to succeed (it is running) and job 13 to end (it is waiting).", None,
    )  # fmt: skip


def test_a_private_job_is_not_named_where_everybody_reads() -> None:
    assert (
        told(HoldFacts(job_id=7, needs=(need(is_private=True),)))[1]
        == "It needs a private job to succeed (it is running)."
    )


def test_of_many_needed_jobs_the_first_few_are_named() -> None:
    _, text, _ = told(HoldFacts(job_id=7, needs=tuple(need(number) for number in range(1, 101))))
    assert text.endswith("job 5 to succeed (it is running) and 95 more.")


def test_the_hold_is_told_before_all_else() -> None:
    facts = HoldFacts(job_id=7, hold_reason=Hold(by="ann").to_json(), needs=(need(),), start_after=START)
    assert told(facts)[0] == "held"


@pytest.mark.parametrize("state", JobState)
@pytest.mark.parametrize("condition", Condition)
def test_a_condition_is_open_until_the_needed_job_has_ended_and_then_decided_for_good(
    condition: Condition, state: JobState
) -> None:
    one = need(condition=condition, state=state)
    assert one.is_met == (state in MET_BY[condition])
    assert (one.is_met or one.is_hopeless) == (state in ENDED)
    assert not (one.is_met and one.is_hopeless)


def test_the_end_of_a_hopeless_job_says_what_was_needed_and_has_what_every_cause_has() -> None:
    cause = hopeless_cause(need(state="failed"))
    assert cause["sentence"] == "The job was cancelled: it needs job 12 to succeed, and job 12 failed."
    assert "gang show 12" in cause["fix"]
    assert set(cause) == set(describe_cause(Cause(outcome=Outcome.CANCELLED, detail=""), 1, ()))


def test_every_reason_says_what_it_means() -> None:
    assert set(REASON_MEANINGS) == set(ReasonCode)
    assert all(meaning.endswith(".") for meaning in REASON_MEANINGS.values())


@pytest.mark.parametrize(
    ("since", "start_after", "now", "began"),
    [
        (100.0, None, 130.0, 30.0),  # it waited 100 s, and has waited as long after the hold
        (None, None, 130.0, 130.0),  # held since its submission: it has not waited
        (-50.0, None, 130.0, 130.0),  # held while it ran
        (100.0, 500.0, 130.0, 0.0),  # it may not start before 500 anyway: the hold cost nothing
        (100.0, 500.0, 620.0, 620.0),  # held over its start time: it has not waited
        (550.0, 500.0, 620.0, 570.0),  # it waited from 500 to 550
        (100.0, None, 100.0, 0.0),
    ],
)
def test_a_hold_takes_of_the_wait_what_it_lasted_and_no_more(
    since: float | None, start_after: float | None, now: float, began: float
) -> None:
    hold = Hold(by="ann", since=since)
    assert wait_after(hold, wait_began_at=0.0, start_after=start_after, now=now) == began
