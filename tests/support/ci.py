"""What a test does when the machine lacks a server or a right it needs: skip for a developer, fail in CI.

A skip in CI would turn "never ran" into "passed". Not for: choosing what to run (that is pytest's `-m`).
"""

from __future__ import annotations

import os
from typing import NoReturn

import pytest


def in_ci() -> bool:
    """Whether this run is CI's (`CI=true`)."""
    return os.environ.get("CI", "").lower() in ("1", "true", "yes")


def cannot_run(what: str, fix: str) -> NoReturn:
    """End the test because `what` is missing: skipped with the fix for a developer, failed in CI."""
    if in_ci():
        pytest.fail(f"{what}: CI must have it. {fix}", pytrace=False)
    pytest.skip(f"{what}. {fix}")
