"""The Redis of the tests: a unix socket only; it crashes, loses its data and freezes when told to."""

from __future__ import annotations

import pytest

from tests.support.processes import is_alive, listeners
from tests.support.redis import RedisServer


def test_it_listens_on_its_short_socket_and_on_no_port(redis_server: RedisServer) -> None:
    assert [item.address for item in listeners([redis_server.pid])] == [str(redis_server.socket_path)]
    assert redis_server.command("PING") == "+PONG"
    assert len(str(redis_server.socket_path)) < 60


def test_a_restart_keeps_the_data_or_loses_it_as_told(redis_server: RedisServer) -> None:
    redis_server.command("SET", "attempt", "17")

    redis_server.kill9()
    redis_server.restart()
    assert redis_server.command("GET", "attempt") == "$2\r\n17"

    redis_server.restart(keep_data=False)
    assert redis_server.command("GET", "attempt") == "$-1"


def test_a_killed_server_refuses_and_a_frozen_one_is_silent(redis_server: RedisServer) -> None:
    redis_server.freeze()
    with pytest.raises(TimeoutError):
        redis_server.command("PING", timeout=0.2)
    redis_server.thaw()
    assert redis_server.command("PING") == "+PONG"

    redis_server.kill9()
    with pytest.raises(ConnectionRefusedError):
        redis_server.command("PING")


def test_a_frozen_server_can_be_stopped_and_leaves_nothing() -> None:
    server = RedisServer()
    try:
        server.start()
        pid = server.pid
        server.freeze()
    finally:
        server.stop()

    assert not is_alive(pid)
    assert not server.folder.exists()


def test_celery_sends_through_its_url(redis_server: RedisServer) -> None:
    celery = pytest.importorskip("celery")
    app = celery.Celery(broker=redis_server.url)

    app.send_task("gangline.launch", (17,), queue="node.node-1", retry=False)

    assert redis_server.command("LLEN", "node.node-1") == ":1"
