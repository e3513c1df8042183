"""Following a log by server-sent events: every byte once over cuts, resumes and attempts, then an explicit end."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest

from service.api.logs import KEEP_ALIVE_SECONDS
from tests.integration.service.api_server import Api, Supervisor
from tests.support.wait import wait_until

GANG: dict[str, Any] = {"resources": {"nodes": 2, "gpus_per_node": 1}}


@dataclass
class Event:
    """One server-sent event."""

    kind: str
    data: dict[str, Any]
    id: str | None


def events_of(lines: Iterator[str]) -> Iterator[Event]:
    """Events of a stream's lines."""
    fields: dict[str, str] = {}
    for line in lines:
        if line:
            name, _, value = line.partition(": ")
            fields[name] = value
        elif "event" in fields:
            yield Event(fields["event"], json.loads(fields["data"]), fields.get("id"))
            fields = {}


@dataclass
class Follower:
    """Follows in a thread, from its creation on."""

    api: Api
    job_id: int
    query: str = ""
    last_event_id: str | None = None
    events: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _run(self) -> None:
        headers = {"Authorization": f"Bearer {self.api.tokens['ann']}"}
        if self.last_event_id is not None:
            headers["Last-Event-ID"] = self.last_event_id
        url = f"{self.api.url}/api/v1/jobs/{self.job_id}/logs/stream?{self.query}"
        with httpx.stream("GET", url, headers=headers, timeout=30) as response:
            assert response.status_code == 200
            for event in events_of(response.iter_lines()):
                self.events.append(event)

    def text(self, rank: int = 0) -> str:
        """All text of a rank so far."""
        return "".join(
            event.data["text"] for event in list(self.events) if event.kind == "log" and event.data["rank"] == rank
        )

    def kinds(self) -> list[str]:
        """Kinds of the events, runs of log events as one."""
        kinds = [event.kind for event in self.events]
        return [kind for number, kind in enumerate(kinds) if number == 0 or (kind, kinds[number - 1]) != ("log", "log")]

    def finish(self) -> Follower:
        """Wait for the end of the stream."""
        self.thread.join(60)
        assert not self.thread.is_alive(), f"the stream did not end: {self.kinds()}"
        return self


def running(api: Api, **members: Any) -> Supervisor:
    return api.start(api.submit(**members), api.node())[0]


def job_of(part: Supervisor) -> int:
    return int(part.plan["job_id"])


def test_o30_a_follower_gets_every_byte_and_then_an_end(api: Api) -> None:
    part = running(api)
    follower = Follower(api, job_of(part))
    for start, text in ((0, b"hello\n"), (6, b"world\n"), (12, b"last")):
        part.append(text, start)
    wait_until(lambda: follower.text() == "hello\nworld\nlast", 60, lambda: f"only {follower.text()!r} came")
    part.ended(3)

    follower.finish()
    assert follower.kinds() == ["attempt", "log", "end"]
    assert follower.events[0].data == {"attempt": 1, "ranks": [0]}
    assert follower.events[-1].data == {"state": "failed", "outcome": "user_error", "exit_code": 3}


def test_a_finished_log_is_streamed_at_once_and_ends(api: Api) -> None:
    part = running(api)
    part.append(b"all of it", 0)
    part.ended()
    began = time.monotonic()
    follower = Follower(api, job_of(part)).finish()
    assert time.monotonic() - began < KEEP_ALIVE_SECONDS, "it waited for more"
    assert (follower.text(), follower.events[-1].data["state"]) == ("all of it", "succeeded")


def test_o31_a_stream_of_a_waiting_job_opens_at_once_and_ends_with_its_cancel(api: Api) -> None:
    job_id = api.submit()
    follower = Follower(api, job_id)
    api.cancel(job_id)
    follower.finish()
    assert [(event.kind, event.data["state"]) for event in follower.events] == [("end", "cancelled")]


@pytest.mark.parametrize(("who", "status"), [("bob", 403), ("root", 200)])
def test_o31_who_may_not_read_is_refused_at_once(api: Api, who: str, status: int) -> None:
    part = running(api)
    part.ended()
    assert api.request("GET", f"/jobs/{job_of(part)}/logs/stream", who).status_code == status
    assert api.request("GET", "/jobs/999999/logs/stream", who).status_code == 404


DATA = "é漢👩‍💻 ü\n".encode()


@pytest.mark.parametrize("cut", range(1, len(DATA)))
def test_o29_a_character_cut_in_two_comes_once_and_whole(api: Api, cut: int) -> None:
    part = running(api)
    part.append(DATA[:cut], 0)
    follower = Follower(api, job_of(part))
    wait_until(lambda: follower.events, 60, "the stream does not open")
    part.append(DATA[cut:], cut)
    part.ended()
    assert follower.finish().text() == DATA.decode()


def test_a_long_line_without_an_end_is_streamed(api: Api) -> None:
    part = running(api)
    line = b"x" * 60_000
    for number in range(4):
        part.append(line, number * len(line))
    part.ended()
    assert Follower(api, job_of(part)).finish().text() == "x" * 240_000


def test_a_stream_resumes_exactly_where_any_event_left_it(api: Api) -> None:
    part = running(api)
    whole = "".join(f"line {number} é\n" for number in range(20_000)).encode()
    for start in range(0, len(whole), 60_000):
        part.append(whole[start : start + 60_000], start)
    part.ended()
    first = Follower(api, job_of(part)).finish()
    log_events = [event for event in first.events if event.kind == "log"]

    assert first.text() == whole.decode()
    assert len(log_events) > 3
    for number, event in enumerate(log_events):
        resumed = Follower(api, job_of(part), last_event_id=event.id).finish()
        seen = "".join(earlier.data["text"] for earlier in log_events[: number + 1])
        assert seen + resumed.text() == whole.decode()
        assert resumed.kinds() == (["log", "end"] if number + 1 < len(log_events) else ["end"])


def test_ranks_are_told_apart_and_can_be_chosen(api: Api) -> None:
    nodes = [api.node("node-1", slots=1), api.node("node-2", slots=1)]
    parts = api.start(api.submit(**GANG), *nodes)
    for part in parts:
        part.append(f"rank {part.ranks[0]}\n".encode(), 0)
        part.ended()
    everything = Follower(api, job_of(parts[0])).finish()
    only_second = Follower(api, job_of(parts[0]), "ranks=1").finish()

    assert [everything.text(0), everything.text(1)] == ["rank 0\n", "rank 1\n"]
    assert [only_second.text(0), only_second.text(1)] == ["", "rank 1\n"]
    last = [event for event in everything.events if event.kind == "log"][-1]
    assert last.id == "a1,r0:7,r1:7"


def two_attempts(api: Api) -> int:
    """A job that wrote `first` and failed, then wrote `second` and succeeded."""
    node = api.node()
    job_id = api.submit(retry={"max": 1})
    for text, code in ((b"first\n", 1), (b"second\n", 0)):
        part = api.start(job_id, node)[0]
        part.append(text, 0)
        part.ended(code)
    return job_id


def test_a_stream_goes_on_with_the_next_attempt(api: Api) -> None:
    follower = Follower(api, two_attempts(api)).finish()
    assert [(event.kind, event.data.get("attempt"), event.data.get("text")) for event in follower.events] == [
        ("attempt", 1, None),
        ("log", None, "first\n"),
        ("attempt", 2, None),
        ("log", None, "second\n"),
        ("end", None, None),
    ]


def test_a_stream_resumes_over_attempts(api: Api) -> None:
    job_id = two_attempts(api)
    first = Follower(api, job_id).finish()
    resumed = [Follower(api, job_id, last_event_id=event.id).finish() for event in first.events if event.id]
    assert [follower.text() for follower in resumed] == ["first\nsecond\n", "second\n", "second\n", ""]
    assert [follower.events[-1].kind for follower in resumed] == ["end"] * 4


def test_one_attempt_alone_ends_with_it(api: Api) -> None:
    assert Follower(api, two_attempts(api), "attempt=1").finish().text() == "first\n"


def test_tail_starts_with_the_last_lines(api: Api) -> None:
    part = running(api)
    part.append(b"a\nb\nc\n", 0)
    part.ended()
    assert Follower(api, job_of(part), "tail=2").finish().text() == "b\nc\n"


def test_a_stream_from_a_byte_starts_there(api: Api) -> None:
    part = running(api)
    part.append(b"abcdef", 0)
    part.ended()
    assert Follower(api, job_of(part), "from=4").finish().text() == "ef"


@pytest.mark.parametrize("ranks", ["x", "", "0,", "-1", "0;1", "9999999"])
def test_ranks_that_are_none_are_refused(api: Api, ranks: str) -> None:
    part = running(api)
    answer = api.request("GET", f"/jobs/{job_of(part)}/logs/stream?ranks={ranks}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


@pytest.mark.parametrize(
    ("event_id", "status"), [("x", 422), ("a1,r0", 422), ("a1,r0:-1", 422), ("a9,r0:0", 404), ("a0", 404)]
)
def test_an_event_id_that_is_none_is_refused(api: Api, event_id: str, status: int) -> None:
    part = running(api)
    answer = api.request("GET", f"/jobs/{job_of(part)}/logs/stream", headers={"Last-Event-ID": event_id})
    assert answer.status_code == status


def test_a_stream_breaks_off_when_its_token_is_revoked(api: Api) -> None:
    made = api.request("POST", "/tokens", json={"label": "once"}).json()
    part = running(api)
    part.append(b"before\n", 0)
    got: list[Event] = []

    def follow() -> None:
        url = f"{api.url}/api/v1/jobs/{job_of(part)}/logs/stream"
        with httpx.stream("GET", url, headers={"Authorization": f"Bearer {made['token']}"}, timeout=30) as response:
            for event in events_of(response.iter_lines()):
                got.append(event)

    thread = threading.Thread(target=follow, daemon=True)
    thread.start()
    wait_until(lambda: any(event.kind == "log" for event in got), 60, "no first line came")
    assert api.request("DELETE", f"/tokens/{made['id']}").status_code == 200
    part.append(b"after\n", 7)

    thread.join(60)
    assert not thread.is_alive()
    assert "after" not in "".join(event.data.get("text", "") for event in got)
    assert "end" not in [event.kind for event in got]
