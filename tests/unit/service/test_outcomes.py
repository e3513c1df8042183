"""What follows from an outcome is one table; whether another attempt is due follows from it and the job's own wish."""

from __future__ import annotations

import re
from typing import Any

import pytest

from gangline.protocol.outcomes import JobState, Outcome
from service.domain.decide_outcome import Cause
from service.domain.outcomes import (
    OUTCOME_RULES,
    POOL_RETRY_BACKOFF_SECONDS,
    POOL_RETRY_LIMIT,
    Fault,
    RetryVerdict,
    fix_told,
    retry_verdict,
)
from service.domain.spec import RetrySpec
from service.operations.settle_attempt import describe_cause

POOL_FAULTS = [outcome for outcome, rule in OUTCOME_RULES.items() if rule.fault is Fault.POOL]
USER_FAULTS = [outcome for outcome, rule in OUTCOME_RULES.items() if rule.fault is Fault.USER]


def verdict(
    outcome: Outcome, exit_code: int | None = None, charged: int = 0, pool: int = 0, **wish: Any
) -> RetryVerdict:
    retry = RetrySpec(
        max_retries=wish.get("max", 0), outcomes=wish.get("on", ()), exit_codes=wish.get("exit_codes", ())
    )
    same = wish.get("same", 0)
    return retry_verdict(outcome, exit_code, retry, num_charged=charged, num_pool_retries=pool, num_same=same)


@pytest.mark.parametrize("outcome", Outcome)
def test_every_outcome_has_a_rule_with_a_sentence_and_a_fix(outcome: Outcome) -> None:
    rule = OUTCOME_RULES[outcome]

    assert rule.job_state.is_terminal
    assert (rule.job_state is JobState.SUCCEEDED) is (outcome is Outcome.SUCCEEDED)
    assert (rule.job_state is JobState.CANCELLED) is (outcome is Outcome.CANCELLED)
    assert set(re.findall(r"{(\w+)}", rule.sentence)) <= {"detail"}
    assert set(re.findall(r"{(\w+)}", rule.fix)) <= {"job", "rank"}
    assert bool(rule.fix) is (outcome not in (Outcome.SUCCEEDED, Outcome.CANCELLED))
    assert not (rule.is_retried and rule.is_charged), "what is retried unasked is never charged"


@pytest.mark.parametrize("outcome", Outcome)
def test_the_cause_that_is_shown_has_no_hole_in_it(outcome: Outcome) -> None:
    told = describe_cause(Cause(outcome=outcome, detail="{detail} {job} {0}"), 12, ())

    assert told["sentence"][0].isupper() or told["sentence"].startswith("{")
    assert "{rank}" not in told["fix"]
    assert told["outcome"] == outcome


def test_a_job_that_goes_on_after_its_time_limit_is_not_told_to_do_what_it_does() -> None:
    fix = OUTCOME_RULES[Outcome.TIME_LIMIT].fix
    assert fix_told(Outcome.TIME_LIMIT, fix, is_retried=False) == fix
    assert fix_told(Outcome.TIME_LIMIT, fix, is_retried=True) == "Nothing to do: it goes on in another attempt."
    assert fix_told(Outcome.USER_ERROR, "Read it.", is_retried=True) == "Read it."


@pytest.mark.parametrize("outcome", POOL_FAULTS)
def test_what_is_the_pools_fault_is_retried_without_charge_and_not_without_end(outcome: Outcome) -> None:
    first = verdict(outcome)

    assert (first.is_due, first.is_charged, first.is_pool_retry) == (True, False, True)
    assert not verdict(outcome, pool=POOL_RETRY_LIMIT, max=100).is_due


@pytest.mark.parametrize("outcome", Outcome)
@pytest.mark.parametrize("same", range(3))
def test_how_often_an_outcome_is_retried_is_in_the_table(outcome: Outcome, same: int) -> None:
    rule = OUTCOME_RULES[outcome]
    assert verdict(outcome, same=same).is_due is (
        rule.is_retried and (rule.retry_limit is None or same < rule.retry_limit)
    )


def test_a_hang_is_tried_again_once_and_then_never() -> None:
    assert [verdict(Outcome.HANG, same=same, max=100).is_due for same in range(3)] == [True, False, False]
    assert "hang" in verdict(Outcome.HANG, same=1).text


def test_the_fix_of_a_hang_leads_to_the_stacks_of_the_rank_that_stood_still() -> None:
    fix = describe_cause(Cause(outcome=Outcome.HANG, detail="x", rank=3), 12, ())["fix"]
    assert "gang logs 12 --rank 3" in fix


def test_the_wait_before_a_retry_for_the_pools_fault_grows_to_a_bound() -> None:
    delays = [verdict(Outcome.NODE_LOST, pool=number).delay_seconds for number in range(POOL_RETRY_LIMIT)]

    assert delays == sorted(delays)
    assert (delays[0], delays[-1]) == (0.0, POOL_RETRY_BACKOFF_SECONDS[-1])


def test_a_preempted_job_starts_again_at_once_and_uses_no_budget() -> None:
    assert verdict(Outcome.PREEMPTED, pool=POOL_RETRY_LIMIT + 5) == RetryVerdict(
        is_due=True,
        is_charged=False,
        is_pool_retry=False,
        delay_seconds=0.0,
        text="retried after preempted, not charged",
    )


@pytest.mark.parametrize("outcome", [*USER_FAULTS, Outcome.SUCCEEDED, Outcome.CANCELLED])
def test_nothing_else_is_retried_unasked(outcome: Outcome) -> None:
    assert not verdict(outcome).is_due


@pytest.mark.parametrize("outcome", [Outcome.SUCCEEDED, Outcome.CANCELLED])
def test_a_success_and_a_cancel_are_never_retried(outcome: Outcome) -> None:
    assert not verdict(outcome, max=100, on=(str(outcome),)).is_due


def test_o22_two_retries_are_three_attempts() -> None:
    due = [verdict(Outcome.USER_ERROR, 137, charged=charged, max=2).is_due for charged in range(4)]

    assert due == [True, True, False, False]
    assert "all 2 retries are used" in verdict(Outcome.USER_ERROR, 137, charged=2, max=2).text


@pytest.mark.parametrize(("exit_code", "is_due"), [(75, True), (143, True), (137, False), (1, False), (None, False)])
def test_o22_the_filter_of_exit_codes_is_obeyed(exit_code: int | None, is_due: bool) -> None:
    assert verdict(Outcome.USER_ERROR, exit_code, max=2, exit_codes=(75, 143)).is_due is is_due


@pytest.mark.parametrize(
    ("on", "outcome", "is_due"),
    [
        ((), Outcome.USER_ERROR, True),
        ((), Outcome.OUT_OF_MEMORY, True),
        ((), Outcome.CONFIG_ERROR, False),
        ((), Outcome.ENVIRONMENT_ERROR, False),
        ((), Outcome.TIME_LIMIT, False),
        (("time_limit",), Outcome.TIME_LIMIT, True),
        (("time_limit",), Outcome.USER_ERROR, False),
        (("config_error",), Outcome.CONFIG_ERROR, True),
    ],
)
def test_retry_on_names_the_outcomes_that_are_retried(on: tuple[str, ...], outcome: Outcome, is_due: bool) -> None:
    found = verdict(outcome, 1, max=1, on=on)
    assert (found.is_due, found.is_charged) == (is_due, is_due)


def test_making_room_for_nobody_of_ours_is_tried_again_as_often_as_a_fault_of_the_pool() -> None:
    def unasked(num_pool_retries: int) -> RetryVerdict:
        return retry_verdict(
            Outcome.PREEMPTED, 75, RetrySpec(), num_charged=0, num_pool_retries=num_pool_retries, is_unasked=True
        )

    assert unasked(0).is_due and unasked(0).is_pool_retry and not unasked(0).is_charged
    assert not unasked(POOL_RETRY_LIMIT).is_due


def test_who_reaches_the_time_limit_is_told_the_keys_that_let_it_go_on() -> None:
    assert verdict(Outcome.TIME_LIMIT, None, max=1, on=("time_limit",)).is_due
    assert "retry.on: [time_limit]" in OUTCOME_RULES[Outcome.TIME_LIMIT].fix


def test_retries_for_the_pools_fault_leave_the_users_budget_alone() -> None:
    assert verdict(Outcome.USER_ERROR, 1, charged=0, pool=9, max=1).is_due
    assert verdict(Outcome.NODE_LOST, charged=1, pool=0, max=1).is_due
