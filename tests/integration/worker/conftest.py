"""Fixtures of the worker's tests: a server that is not one, and the process that forks supervisors."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.integration.worker.fake_api import FakeApi
from worker.nursery import Nursery


@pytest.fixture(scope="module")
def nursery() -> Iterator[Nursery]:
    with Nursery() as nursery:
        yield nursery


@pytest.fixture
def api() -> Iterator[FakeApi]:
    with FakeApi() as api:
        yield api
