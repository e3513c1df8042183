"""Reading logs: a page at once whatever the job does, characters whole at every cut, a range of the raw bytes."""

from __future__ import annotations

import time
from typing import Any

import pytest

from service.api.logs import KEEP_ALIVE_SECONDS
from tests.integration.service.api_server import Api, Supervisor

TEXT = "a" * 5 + "é漢👩‍💻\n" + "bc\r\nlast ü"
DATA = TEXT.encode()


def running(api: Api, data: bytes = b"", **members: Any) -> Supervisor:
    """A running part that has written `data`."""
    part = api.start(api.submit(**members), api.node())[0]
    for start in range(0, len(data), 60_000):
        part.append(data[start : start + 60_000], start)
    return part


def page(api: Api, part: Supervisor, query: str = "", who: str = "ann") -> dict[str, Any]:
    found: dict[str, Any] = api.get(f"/jobs/{part.plan['job_id']}/logs?{query}", who)
    return found


def read_on(api: Api, part: Supervisor, limit: int, start: int = 0) -> list[str]:
    """Pages of at most `limit` bytes, read on to where the log ends now."""
    pieces: list[str] = []
    while True:
        found = page(api, part, f"from={start}&limit={limit}")
        if found["next_offset"] == start:
            return pieces
        pieces.append(found["text"])
        start = found["next_offset"]


# --- answers at once -----------------------------------------------------------------------------------------------


def test_o31_a_page_comes_at_once_whatever_the_job_does(api: Api) -> None:
    waiting = api.submit()
    began = time.monotonic()
    empty = {"attempt": None, "rank": 0, "offset": 0, "next_offset": 0, "size": 0, "text": "", "end": False}
    assert api.get(f"/jobs/{waiting}/logs") == {**empty, "state": "waiting"}
    api.node()
    api.place()
    assert api.get(f"/jobs/{waiting}/logs") == {**empty, "attempt": 1, "state": "starting"}
    silent = running(api)
    assert page(api, silent) == {**empty, "attempt": 1, "state": "running"}
    assert api.request("GET", "/jobs/999999/logs").status_code == 404
    assert api.request("GET", f"/jobs/{waiting}/logs", "bob").status_code == 403
    hidden = api.submit(private=True)
    assert api.request("GET", f"/jobs/{hidden}/logs", "bob").status_code == 404
    assert time.monotonic() - began < KEEP_ALIVE_SECONDS, "one of them waited, as a stream would"


@pytest.mark.parametrize("path", ["logs?attempt=2", "logs/raw?attempt=2", "logs/stream?attempt=2", "metrics?attempt=2"])
def test_o31_an_attempt_that_is_not_there_is_not_found_at_once(api: Api, path: str) -> None:
    part = running(api)
    answer = api.request("GET", f"/jobs/{part.plan['job_id']}/{path}")
    assert (answer.status_code, answer.json()["code"]) == (404, "not_found")


@pytest.mark.parametrize(
    "query",
    [
        "from=-1", f"from={10**30}", "from=x", "rank=-1", "limit=0", f"limit={2**20 + 1}", "tail=0", "attempt=0",
        f"attempt={10**30}",
    ],
)  # fmt: skip
def test_a_place_that_is_none_is_refused(api: Api, query: str) -> None:
    part = running(api, DATA)
    answer = api.request("GET", f"/jobs/{part.plan['job_id']}/logs?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


@pytest.mark.parametrize("query", ["from=1000000", f"from={2**62}", "rank=99", f"rank={10**30}"])
def test_a_place_beyond_what_is_there_is_empty(api: Api, query: str) -> None:
    assert page(api, running(api, DATA), query)["text"] == ""


# --- characters and lines ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", range(1, len(DATA) + 2))
def test_o29_each_character_comes_once_wherever_a_page_is_cut(api: Api, limit: int) -> None:
    part = running(api, DATA)
    part.ended()
    if limit >= 4:
        assert "".join(read_on(api, part, limit)) == TEXT
    else:  # a page that is smaller than a character cannot hold it, but moves on
        assert len("".join(read_on(api, part, limit)).encode()) >= len(DATA)


def test_o29_a_character_that_is_not_whole_yet_is_left_for_the_next_read(api: Api) -> None:
    part = running(api)
    seen, offset = "", 0
    for number, byte in enumerate(DATA):
        part.append(bytes([byte]), number)
        found = page(api, part, f"from={offset}")
        seen, offset = seen + found["text"], found["next_offset"]
        assert TEXT.startswith(seen)
    assert seen == TEXT


def test_o29_bytes_that_are_no_text_become_replacement_characters(api: Api) -> None:
    part = running(api, b"ok\n\xff\xfe\x00x\n\xc3")
    part.ended()
    found = page(api, part)
    assert (found["text"], found["end"]) == ("ok\n\ufffd\ufffd\x00x\n\ufffd", True)


def test_a_page_ends_where_a_line_ends(api: Api) -> None:
    part = running(api, b"one\ntwo\nthree\n")
    assert read_on(api, part, 10) == ["one\ntwo\n", "three\n"]


def test_a_line_without_an_end_is_cut_by_force_and_never_hangs(api: Api) -> None:
    line = "漢" * 50_000
    part = running(api, line.encode())
    pieces = read_on(api, part, 65_536)
    assert "".join(pieces) == line
    assert len(pieces) == 3


def test_the_end_is_told_when_the_attempt_is_over_and_all_was_read(api: Api) -> None:
    part = running(api, DATA)
    assert page(api, part)["end"] is False
    part.ended()
    assert page(api, part)["end"] is True
    assert page(api, part, "limit=6")["end"] is False


@pytest.mark.parametrize(
    ("data", "num_lines", "expected"),
    [
        (b"a\nb\nc\n", 1, "c\n"),
        (b"a\nb\nc\n", 2, "b\nc\n"),
        (b"a\nb\nc", 1, "c"),
        (b"a\nb\nc", 2, "b\nc"),
        (b"a\nb\n", 9, "a\nb\n"),
        (b"\n\n\n", 2, "\n\n"),
        (b"", 3, ""),
        (b"x" * 70_000 + b"\nlast\n", 1, "last\n"),
        (b"first\n" + b"x" * 70_000, 1, "x" * 65_536),
    ],
)
def test_tail_begins_where_the_last_lines_begin(api: Api, data: bytes, num_lines: int, expected: str) -> None:
    assert page(api, running(api, data), f"tail={num_lines}")["text"] == expected


# --- raw -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("header", "status", "start", "end"),
    [
        (None, 200, 0, None),
        ("bytes=0-", 206, 0, None),
        ("bytes=5-8", 206, 5, 9),
        ("bytes=5-5", 206, 5, 6),
        ("bytes=3-99999", 206, 3, None),
        ("bytes=-4", 206, -4, None),
        ("bytes=-99999", 206, 0, None),
        ("bytes=", 200, 0, None),
        ("bytes=0-1,3-4", 200, 0, None),
        ("lines=1-2", 200, 0, None),
        ("bytes=" + "9" * 5_000 + "-", 200, 0, None),
    ],
)
def test_raw_gives_the_bytes_as_they_were_written(
    api: Api, header: str | None, status: int, start: int, end: int | None
) -> None:
    part = running(api, DATA)
    headers = {"Range": header} if header else {}
    answer = api.request("GET", f"/jobs/{part.plan['job_id']}/logs/raw", headers=headers)

    assert (answer.status_code, answer.content) == (status, DATA[start:end])
    assert answer.headers["content-length"] == str(len(answer.content))
    if status == 206:
        first = start % len(DATA)
        assert answer.headers["content-range"] == f"bytes {first}-{first + len(answer.content) - 1}/{len(DATA)}"


@pytest.mark.parametrize("header", [f"bytes={len(DATA)}-", "bytes=999999-", "bytes=-0", "bytes=7-3"])
def test_a_range_that_is_not_there_is_not_satisfiable(api: Api, header: str) -> None:
    part = running(api, DATA)
    answer = api.request("GET", f"/jobs/{part.plan['job_id']}/logs/raw", headers={"Range": header})
    assert (answer.status_code, answer.headers["content-range"]) == (416, f"bytes */{len(DATA)}")


def test_raw_of_a_waiting_job_is_empty(api: Api) -> None:
    answer = api.request("GET", f"/jobs/{api.submit()}/logs/raw")
    assert (answer.status_code, answer.content) == (200, b"")


def test_each_attempt_keeps_its_own_log(api: Api) -> None:
    node = api.node()
    job_id = api.submit(retry={"max": 1})
    for text in (b"first", b"second"):
        part = api.start(job_id, node)[0]
        part.append(text, 0)
        part.ended(1)
    texts = [api.get(f"/jobs/{job_id}/logs?attempt={number}")["text"] for number in (1, 2)]
    assert (texts, api.get(f"/jobs/{job_id}/logs")["text"]) == (["first", "second"], "second")
