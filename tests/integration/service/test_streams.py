"""Bytes of a rank are stored once and in order: what is there is taken as such, a gap is refused with the place."""

from __future__ import annotations

import random
import threading
from typing import Any

import httpx
import pytest

from tests.integration.service.api_server import Api, Supervisor

GANG: dict[str, Any] = {"resources": {"nodes": 2, "gpus_per_node": 1}}


@pytest.fixture
def part(api: Api) -> Supervisor:
    """A running part with 6 bytes of log, `abcdef`."""
    running = api.start(api.submit(), api.node())[0]
    assert running.append(b"abcdef", 0).json() == {"size": 6}
    return running


def stored(part: Supervisor) -> bytes:
    """The log of rank 0 as a reader gets it."""
    answer = part.api.request("GET", f"/jobs/{part.plan['job_id']}/logs/raw")
    return answer.content


@pytest.mark.parametrize(
    ("offset", "data", "status", "size", "log"),
    [
        pytest.param(6, b"ghi", 200, 9, b"abcdefghi", id="the next bytes"),
        pytest.param(0, b"abcdef", 200, 6, b"abcdef", id="the same again"),
        pytest.param(2, b"cd", 200, 6, b"abcdef", id="a part of it again"),
        pytest.param(0, b"XXXXXX", 200, 6, b"abcdef", id="other bytes at a place that is taken"),
        pytest.param(6, b"", 200, 6, b"abcdef", id="nothing"),
        pytest.param(7, b"h", 409, 6, b"abcdef", id="a gap"),
        pytest.param(2**62, b"h", 409, 6, b"abcdef", id="a huge gap"),
        pytest.param(3, b"defghi", 409, 6, b"abcdef", id="an overlap with new bytes"),
    ],
)
def test_an_offset_says_what_is_new(
    part: Supervisor, offset: int, data: bytes, status: int, size: int, log: bytes
) -> None:
    answer = part.append(data, offset)
    assert (answer.status_code, answer.json()["size"]) == (status, size)
    assert status == 200 or answer.json()["code"] == "offset_mismatch"
    assert stored(part) == log


def test_bytes_on_disk_beyond_the_stored_size_do_not_exist(part: Supervisor) -> None:
    part.api.state.streams.write_at(part.attempt_id, "log", 0, 6, b"of a crash")
    assert stored(part) == b"abcdef"
    part.append(b"gh", 6)
    assert stored(part) == b"abcdefgh"


def test_concurrent_writers_store_every_byte_once(part: Supervisor) -> None:
    """Four senders of one stream, each with pieces of its own length, go on where the server says."""
    whole = b"abcdef" + bytes(random.Random(3).randrange(256) for _ in range(6_000))
    failures: list[str] = []

    def send(piece: int) -> None:
        offset = 0
        while offset < len(whole):
            answer = part.append(whole[offset : offset + piece], offset)
            if answer.status_code not in (200, 409):
                failures.append(answer.text)
                return
            offset = answer.json()["size"]

    senders = [threading.Thread(target=send, args=(piece,)) for piece in (97, 240, 511, 1_000)]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()

    assert failures == []
    assert stored(part) == whole


@pytest.mark.parametrize("lengths", [(2, 5), (5, 2)], ids=["short and long", "long and short"])
def test_of_two_appends_at_one_offset_at_once_one_wins(
    part: Supervisor, lengths: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both have seen the same size before either has written: the size moves once, and never back."""
    files, both_have_read = part.api.state.streams, threading.Barrier(2)
    write_at = files.write_at

    def write_when_both_have_read(*arguments: Any) -> None:
        both_have_read.wait(25)
        write_at(*arguments)

    monkeypatch.setattr(files, "write_at", write_when_both_have_read)
    answers: list[httpx.Response] = []
    senders = [
        threading.Thread(target=lambda size=length: answers.append(part.append(b"ghijk"[:size], 6)))
        for length in lengths
    ]
    for sender in senders:
        sender.start()
    for sender in senders:
        sender.join()

    winner, loser = sorted(answers, key=lambda answer: answer.status_code)
    assert (winner.status_code, loser.status_code) == (200, 409)
    assert winner.json()["size"] == loser.json()["size"]
    assert stored(part) == b"abcdefghijk"[: winner.json()["size"]]


@pytest.mark.parametrize("path", ["log/1", "log/7", "log/-1", "other/0", "LOG/0", "log/x", f"log/{10**30}"])
@pytest.mark.parametrize("kind_of_write", ["first", "again"])
def test_a_stream_that_is_not_of_this_part_is_refused(api: Api, path: str, kind_of_write: str) -> None:
    nodes = [api.node("node-1"), api.node("node-2")]
    first, second = api.start(api.submit(**GANG), *nodes)
    if kind_of_write == "again":
        second.append(b"mine", 0)
    before = api.snapshot()

    answer = first.call("PUT", f"streams/{path}?offset=0", content=b"theirs")

    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert api.snapshot() == before


@pytest.mark.parametrize("offset", ["-1", "x", "1.5", str(10**30), ""])
def test_an_offset_that_is_none_is_refused(part: Supervisor, offset: str) -> None:
    answer = part.call("PUT", f"streams/log/0?offset={offset}", content=b"x")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


def test_o29_any_bytes_are_stored_unchanged(part: Supervisor) -> None:
    data = bytes(range(256)) * 3 + "é漢👩‍💻".encode() + b"\xff\xfe\x00"
    part.append(data, 6)
    assert stored(part) == b"abcdef" + data
