"""What a user's own ended jobs say of the limit that they ask for now."""

from __future__ import annotations

import pytest

from service.domain.limit_advice import EndedJob, advise_limit, words_of

HOUR = 3600.0


def history(*shares: float, limit: float = 24 * HOUR) -> list[EndedJob]:
    return [EndedJob(limit_seconds=limit, run_seconds=share * limit) for share in shares]


def test_who_uses_a_fifth_of_the_limit_is_told_a_shorter_one_that_would_have_been_enough() -> None:
    advice = advise_limit(history(*[0.22] * 40), 12 * HOUR)

    assert advice is not None
    assert (advice.num_jobs, advice.limit_seconds, advice.num_enough) == (40, 4 * HOUR, 40)
    assert advice.sentence(3 * HOUR) == (
        "Your last 40 jobs of about this size used 22% of their limit; 4 h would have been enough for 40 of them "
        "and would start about 3 h sooner."
    )


def test_the_advice_leaves_room_for_the_longest_of_them_but_one_in_twenty() -> None:
    advice = advise_limit(history(*[0.1] * 37, 0.4, 0.4, 0.9), 24 * HOUR)

    assert advice is not None
    assert (advice.limit_seconds, advice.num_enough) == (12 * HOUR, 39)


@pytest.mark.parametrize(
    ("ended", "limit"),
    [
        ([], 12 * HOUR),
        (history(0.1, 0.1, 0.1, 0.1), 12 * HOUR),
        (history(*[0.9] * 40), 12 * HOUR),
        (history(*[0.1] * 40), None),
        (history(*[0.1] * 40, limit=0.0), 12 * HOUR),
    ],
    ids=["no history", "too little of it", "limits that are used", "no limit", "jobs without limits"],
)
def test_otherwise_nothing_is_said(ended: list[EndedJob], limit: float | None) -> None:
    assert advise_limit(ended, limit) is None


def test_a_gain_of_seconds_is_not_worth_a_word() -> None:
    advice = advise_limit(history(*[0.1] * 9), 24 * HOUR)

    assert advice is not None
    assert "sooner" not in advice.sentence(20.0)
    assert "sooner" not in advice.sentence(None)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [(45.0, "45 s"), (1200.0, "20 min"), (5400.0, "1.5 h"), (4 * HOUR, "4 h"), (60 * HOUR, "2.5 days")],
)
def test_lengths_are_said_in_their_largest_unit(seconds: float, words: str) -> None:
    assert words_of(seconds) == words
