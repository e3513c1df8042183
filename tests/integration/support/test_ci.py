"""A missing server is a skip for a developer and a failure in CI."""

from __future__ import annotations

import pytest

from tests.support.ci import cannot_run


def test_in_ci_a_missing_server_fails_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CI", "true")

    with pytest.raises(pytest.fail.Exception, match=r"Redis is missing: CI must have it\. Install it"):
        cannot_run("Redis is missing", "Install it")


def test_elsewhere_it_skips_and_says_the_fix(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CI", raising=False)

    with pytest.raises(pytest.skip.Exception, match=r"Redis is missing\. Install it"):
        cannot_run("Redis is missing", "Install it")
