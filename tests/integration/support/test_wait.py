"""`wait_until` returns what it waited for and says what did not come."""

from __future__ import annotations

import pytest

from tests.support.wait import wait_until


def test_it_returns_the_value_that_was_awaited() -> None:
    answers = iter([0, None, "", "here"])

    assert wait_until(lambda: next(answers), 5, "an answer") == "here"


def test_it_says_what_did_not_come_and_what_was_seen_last() -> None:
    with pytest.raises(TimeoutError, match=r"three workers: seen 2: not within 0\.05 s \(last value False\)"):
        wait_until(lambda: False, 0.05, lambda: "three workers: seen 2")


def test_an_error_of_the_condition_is_not_hidden() -> None:
    with pytest.raises(ZeroDivisionError):
        wait_until(lambda: 1 / 0, 5, "never")
