"""Each bug case that this version claims to be safe from has a test named after it (`test_o29_…`)."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

TESTS = Path(__file__).parents[1]
CLAIMED = (
    *range(1, 24),
    *range(24, 32),
    *range(33, 54),
    *(55, 57),
)


def cases_with_a_test() -> set[int]:
    """Numbers of the cases that a test function is named after."""
    sources = (path.read_text() for path in TESTS.rglob("test_*.py"))
    return {int(number) for source in sources for number in re.findall(r"def test_o(\d\d)[a-z]?_", source)}


@pytest.mark.parametrize("case", CLAIMED)
def test_the_case_has_a_test_named_after_it(case: int) -> None:
    assert case in cases_with_a_test(), f"no test is named test_o{case:02d}_…"
