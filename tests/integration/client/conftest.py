"""Fixtures of the client's tests: a fake server, and a client whose retries do not sleep."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from gangline.client import Client
from tests.integration.client.fake_rest_server import TOKEN, FakeServer


@pytest.fixture
def server() -> Iterator[FakeServer]:
    with FakeServer() as running:
        yield running


@pytest.fixture
def client(server: FakeServer, tmp_path: Path) -> Iterator[Client]:
    with Client(server.url, TOKEN, environ={"GANGLINE_CONFIG_FOLDER": str(tmp_path)}) as connected:
        connected.transport._sleep = lambda seconds: None
        yield connected
