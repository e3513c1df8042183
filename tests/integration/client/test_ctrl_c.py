"""Ctrl-C detaches: it never stops a job, and says so, with the command that goes on. A real process, a real SIGINT."""

from __future__ import annotations

import re
import signal
import threading
from pathlib import Path

import pytest

from tests.integration.client.fake_rest_server import Answer, FakeServer, Request, a_job
from tests.integration.client.gang_process import RunningGang, gang
from tests.support.wait import BUSY_SECONDS, wait_until


@pytest.fixture
def running(server: FakeServer) -> FakeServer:
    server.add(a_job(12))
    server.log_is_complete = False
    server.logs = {0: b"one\ntwo\nthr", 1: b"uno\n"}
    return server


def asked_to_stop(server: FakeServer) -> list[Request]:
    return server.requests_to("POST /jobs/12/cancel")


def test_following_logs_stops_and_says_how_to_go_on(running: FakeServer, tmp_path: Path) -> None:
    with RunningGang(running, tmp_path, "logs", "-f", "12") as process:
        assert process.process.stdout is not None
        first = process.process.stdout.readline()
        result = process.interrupt()

    assert result.code == 130
    assert "Job 12 is still running." in result.err
    assert "Stop it: gang cancel 12" in result.err
    assert asked_to_stop(running) == []
    seen = first.decode() + result.out

    command = re.search(r"Again: (gang logs -f 12.*?)   ", result.err)
    assert command is not None, result.err
    running.logs = {0: b"one\ntwo\nthree\nend", 1: b"uno\ndue\n"}
    running.log_is_complete = True
    running.finish(12, "succeeded", "succeeded")
    rest = gang(running, tmp_path, *command.group(1).split()[1:])
    whole = seen + rest.out
    # What was on the screen before and after is all there is, each byte once ("thr" and "ee" are two lines of it).
    assert "".join(line[3:] for line in whole.splitlines() if line.startswith("r0 ")) == "onetwothreeend"
    assert "".join(line[3:] for line in whole.splitlines() if line.startswith("r1 ")) == "unodue"


@pytest.mark.parametrize("words", [("wait", "12"), ("submit", "job.yaml", "--wait")], ids=["wait", "submit"])
def test_waiting_stops_and_the_job_goes_on(running: FakeServer, tmp_path: Path, words: tuple[str, ...]) -> None:
    (tmp_path / "job.yaml").write_text("name: gpt\ncode: {path: /x}\n")
    with RunningGang(running, tmp_path, *words) as process:
        wait_until(lambda: any("wait" in request.params for request in running.requests), BUSY_SECONDS, "a long poll")
        result = process.interrupt()

    assert result.code == 130
    assert re.search(r"Job 1[23] is still (running|waiting)\.  Again: gang wait 1[23]", result.err)
    assert not [request for request in running.requests if request.path.endswith("/cancel")]


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_cancel_on_interrupt_is_the_opt_in_that_cancels(running: FakeServer, tmp_path: Path, number: int) -> None:
    (tmp_path / "job.yaml").write_text("name: gpt\ncode: {path: /x}\n")
    with RunningGang(running, tmp_path, "submit", "job.yaml", "--wait", "--cancel-on-interrupt") as process:
        wait_until(lambda: any("wait" in request.params for request in running.requests), BUSY_SECONDS, "a long poll")
        result = process.interrupt(number)

    assert result.code == 130
    assert len(running.requests_to("POST /jobs/13/cancel")) == 1
    assert "cancelled" in result.err


def test_a_submit_in_flight_says_whether_the_job_exists(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: gpt\ncode: {path: /x}\n")
    arrived, released = threading.Event(), threading.Event()

    def slow(request: Request) -> Answer | None:
        if not arrived.is_set():
            arrived.set()
            released.wait(2 * BUSY_SECONDS)
        return None

    server.overrides["POST /jobs"] = slow
    with RunningGang(server, tmp_path, "submit", "job.yaml") as process:
        assert arrived.wait(BUSY_SECONDS)
        result = process.interrupt()
        released.set()

    assert result.code == 130
    assert "Job 12 is still waiting." in result.err
    assert len({post.headers["idempotency-key"] for post in server.requests_to("POST /jobs")}) == 1
    wait_until(lambda: len(server.keys) == 1, 10, "the first request has ended too")
    assert list(server.jobs) == [12]


def test_a_submit_in_flight_to_a_server_that_falls_silent_tells_the_key(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: gpt\ncode: {path: /x}\n")
    arrived, released = threading.Event(), threading.Event()

    def silent(request: Request) -> Answer | None:
        if not arrived.is_set():
            arrived.set()
            released.wait(2 * BUSY_SECONDS)
        server.cut_after_acting["POST /jobs"] = 100
        return None

    server.overrides["POST /jobs"] = silent
    with RunningGang(server, tmp_path, "submit", "job.yaml") as process:
        assert arrived.wait(BUSY_SECONDS)
        result = process.interrupt()
        released.set()

    key = server.requests_to("POST /jobs")[0].headers["idempotency-key"]
    assert result.code == 130
    assert "not known whether the job was submitted" in result.err
    assert f"--key {key}" in result.err
