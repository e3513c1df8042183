"""Values with units: durations and sizes."""

from __future__ import annotations

from typing import Any

import pytest

from service.schemas.units import parse_duration, parse_size


@pytest.mark.parametrize(
    ("written", "seconds"),
    [
        ("4h", 14_400),
        ("90m", 5_400),
        ("1h30m", 5_400),
        ("1d12h", 129_600),
        ("45s", 45),
        ("1h 30m 5s", 5_405),
        ("0.5h", 1_800),
        ("250ms", 0.25),
        ("1m500ms", 60.5),
        (" 4h ", 14_400),
        (90, 90),
        (1.5, 1.5),
        (0, 0),
    ],
)
def test_a_duration_is_read(written: Any, seconds: float) -> None:
    assert parse_duration(written) == seconds
    assert isinstance(parse_duration(written), float)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("4 hours", "is not a duration"),
        ("4H", "is not a duration"),
        ("h", "is not a duration"),
        ("", "is not a duration"),
        ("90", "for seconds write 90s"),
        ("30m1h", "is not a duration"),
        ("1h1h", "is not a duration"),
        ("-1h", "is not a duration"),
        ("1:30", "is not a duration"),
        ("٤h", "is not a duration"),
        (-1, "must not be negative"),
        (True, "must be a duration"),
        (None, "must be a duration"),
        ([], "must be a duration"),
        (float("nan"), "finite"),
        (float("inf"), "finite"),
        (10**400, "longer than ten years"),
        ("99999d", "longer than ten years"),
    ],
)
def test_what_is_no_duration_is_refused(written: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_duration(written)


@pytest.mark.parametrize(
    ("written", "num_bytes"),
    [
        ("32GiB", 32 * 2**30),
        ("500MB", 500_000_000),
        ("1.5TiB", 3 * 2**39),
        ("64 KiB", 65_536),
        ("10kB", 10_000),
        ("32gib", 32 * 2**30),
        ("7B", 7),
        (1_024, 1_024),
        (0, 0),
    ],
)
def test_a_size_is_read(written: Any, num_bytes: int) -> None:
    assert parse_size(written) == num_bytes
    assert isinstance(parse_size(written), int)


@pytest.mark.parametrize(
    ("written", "reason"),
    [
        ("32G", r"write 32GiB \(1024\) or 32GB \(1000\)"),
        ("5M", "5MiB"),
        ("32", "for bytes write the number without quotes"),
        ("GiB", "is not a size"),
        ("-1GiB", "is not a size"),
        ("1 GiB GiB", "is not a size"),
        ("1PiB", "is not a size"),
        (1.5, "must be a size"),
        (True, "must be a size"),
        (-1, "must not be negative"),
        (2**61, "larger than any machine"),
        ("9999999TiB", "larger than any machine"),
    ],
)
def test_what_is_no_size_is_refused(written: Any, reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        parse_size(written)
