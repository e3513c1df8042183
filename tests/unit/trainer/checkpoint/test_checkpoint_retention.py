"""Which checkpoints may be deleted: a few cases by hand, and rules that hold for all."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from trainer.checkpoint.retention import KnownCheckpoint, is_accepted, removable


def known(text: str) -> list[KnownCheckpoint]:
    """`A` accepted, `p` pending, `b` accepted but broken; the oldest first."""
    return [
        KnownCheckpoint(path=f"{letter}{index}", is_accepted=letter != "p", is_broken=letter == "b")
        for index, letter in enumerate(text)
    ]


def test_all_before_the_newest_few_that_are_accepted_goes() -> None:
    for text, keep, gone in (
        ("", 1, ""),
        ("A", 1, ""),
        ("AA", 1, "A"),
        ("AAp", 1, "A"),
        ("App", 1, ""),
        ("AAAA", 3, "A"),
        ("AAA", 3, ""),
        ("Abb", 1, ""),
        ("AbbA", 1, "Abb"),
        ("AbAA", 2, "Ab"),
        ("pA", 1, "p"),
    ):
        assert "".join(one.path[0] for one in removable(known(text), keep)) == gone, (text, keep)


@given(st.text("Apb", max_size=12), st.integers(1, 4))
def test_a_usable_accepted_checkpoint_is_always_left_and_nothing_pending_that_is_newer_goes(
    text: str, keep: int
) -> None:
    everything = known(text)
    gone = removable(everything, keep)
    left = everything[len(gone) :]

    assert gone == everything[: len(gone)]
    good = [one for one in everything if one.is_accepted and not one.is_broken]
    assert [one for one in left if one in good] == good[-keep:] or len(good) < keep
    assert not gone or len([one for one in left if one in good]) == keep


def test_an_event_is_accepted_when_the_api_has_all_of_its_bytes() -> None:
    assert not is_accepted(100, 99)
    assert is_accepted(100, 100)
    assert not is_accepted(None, 100)  # not written yet
    assert is_accepted(None, None)  # no API
