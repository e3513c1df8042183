"""An answer from the other node, a refusal too, means that it is reached; silence and errors are told in words."""

from __future__ import annotations

import socket

import pytest

from gangline.protocol.launch import Rendezvous
from worker import reachability
from worker.reachability import why_unreachable
from worker.rendezvous import ReservedPort


def test_a_reserved_port_where_nobody_listens_yet_is_reached() -> None:
    port = ReservedPort("127.0.0.1")
    try:
        assert why_unreachable(port.rendezvous) is None
    finally:
        port.close()


def test_a_port_where_rank_0_listens_already_is_reached() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert why_unreachable(Rendezvous(address="127.0.0.1", port=server.getsockname()[1])) is None


@pytest.mark.parametrize(
    ("error", "words"),
    [
        (TimeoutError(), "no answer within 2 s"),
        (OSError(113, "No route to host"), "No route to host"),
        (socket.gaierror(-2, "Name or service not known"), "Name or service not known"),
    ],
)
def test_what_kept_the_answer_away_is_said(monkeypatch: pytest.MonkeyPatch, error: OSError, words: str) -> None:
    def fail(*_: object, **__: object) -> socket.socket:
        raise error

    monkeypatch.setattr(reachability.socket, "create_connection", fail)

    assert why_unreachable(Rendezvous(address="10.0.0.1", port=4711)) == words
