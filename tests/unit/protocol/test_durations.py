"""Lengths of time in words that can be typed again: what job files and `gang extend` read."""

from __future__ import annotations

import pytest

from gangline.cli.words import parse_duration as read_by_cli
from gangline.protocol.durations import exact_duration
from service.schemas.units import parse_duration as read_in_job_files

WORDS = {
    0.0: "0s",
    0.5: "0.5s",
    45.0: "45s",
    60.0: "1m",
    90.5: "90.5s",
    300.0: "5m",
    1_800.0: "30m",
    3_601.0: "1h1s",
    5_400.0: "1h30m",
    86_400.0: "1d",
    93_784.0: "1d2h3m4s",
}


@pytest.mark.parametrize(("seconds", "words"), WORDS.items())
def test_a_length_of_time_is_said_in_units_and_reads_back_as_the_same(seconds: float, words: str) -> None:
    assert exact_duration(seconds) == words
    assert read_by_cli(words) == seconds
    assert read_in_job_files(words) == seconds
