"""`gang hold`, `release`, `priority`, and what admins set: the requests they send and what they say."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.client.fake_rest_server import Answer, FakeServer, Request, a_job, a_problem
from tests.integration.client.gang_process import gang

HELD = {"by": "priya", "is_by_admin": False, "why": "data moves"}


def answering(server: FakeServer, name: str, body: Any) -> None:
    """Answer one `METHOD /path` with this."""
    server.overrides[name] = lambda request: Answer(body=body)


def sent(server: FakeServer, name: str) -> Any:
    """The body of the only request of one `METHOD /path`."""
    (request,) = server.requests_to(name)
    return json.loads(request.body) if request.body else None


def test_holding_says_by_whom_and_what_goes_on_and_how_to_release(server: FakeServer, tmp_path: Path) -> None:
    answering(server, "POST /jobs/12/hold", a_job(12, state="waiting", held=HELD))
    answering(server, "POST /jobs/13/hold", a_job(13, held=HELD))

    done = gang(server, tmp_path, "hold", "12", "13", "12", "--reason", "data moves")

    assert done.out.splitlines() == ["12 gpt is held by priya", "13 gpt is held by priya; it is running and goes on"]
    assert "gang release 12 13" in done.err
    assert sent(server, "POST /jobs/12/hold") == {"reason": "data moves"}


def test_a_held_job_shows_who_holds_it_and_when_it_may_start(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12, state="waiting", held=HELD, start_after="2099-11-01T02:30:00-05:00"))
    out = gang(server, tmp_path, "show", "12").out
    assert "held       by priya: data moves" in out
    assert "not before 2099-11-01T02:30:00-05:00" in out


def test_releasing_says_how_the_job_is_and_names_an_admin_who_holds_it(server: FakeServer, tmp_path: Path) -> None:
    answering(server, "POST /jobs/12/release", a_job(12, state="waiting"))
    assert gang(server, tmp_path, "release", "12").out == "12 gpt is not held; it is waiting\n"
    held = a_problem(403, "forbidden", "job 12 is held by admin root", fix="Ask root or another admin.")
    server.overrides["POST /jobs/12/release"] = lambda request: held
    refused = gang(server, tmp_path, "release", "12")
    assert (refused.code, "held by admin root" in refused.err, "fix: Ask root" in refused.err) == (4, True, True)


@pytest.mark.parametrize(("word", "value"), [("high", "high"), ("-50", -50), ("7", 7)])
def test_a_priority_is_sent_as_the_word_or_number_that_was_typed(
    server: FakeServer, tmp_path: Path, word: str, value: Any
) -> None:
    answering(server, "POST /jobs/12/priority", a_job(12))
    assert gang(server, tmp_path, "priority", "12", word).out == f"12 gpt has priority {word}\n"
    assert sent(server, "POST /jobs/12/priority") == {"priority": value}


def test_a_quota_sends_what_was_said_and_shows_the_warning(server: FakeServer, tmp_path: Path) -> None:
    warning = "The teams' quotas add up to 24 GPUs, and the pool has 16."
    answer = {"name": "red", "quota_gpus": 16, "quota_nodes": None, "cap_gpus": None, "warnings": [warning]}
    answering(server, "POST /teams/red/quota", answer)

    done = gang(server, tmp_path, "admin", "quota", "red", "--gpus", "16", "--cap", "none")

    assert done.out == "Team red: guaranteed 16 GPUs and no whole nodes, at most any number of GPUs at once.\n"
    assert f"warning: {warning}" in done.err
    assert sent(server, "POST /teams/red/quota") == {"quota_gpus": 16, "cap_gpus": None}
    assert json.loads(gang(server, tmp_path, "admin", "quota", "red", "--gpus", "16", "-o", "json").out) == answer


@pytest.mark.parametrize("words", [("quota", "red"), ("quota", "red", "--gpus", "-1"), ("cap", "ann", "--gpus", "x")])
def test_a_quota_that_says_nothing_or_no_number_is_exit_2(
    server: FakeServer, tmp_path: Path, words: tuple[str, ...]
) -> None:
    result = gang(server, tmp_path, "admin", *words)
    assert (result.code, server.requests) == (2, [])


@pytest.mark.parametrize(
    ("words", "typed"),
    [
        (("admin", "quota", "red", "--gpus", "-1"), "-1"),
        (("admin", "quota", "red", "--gpus", "-3"), "-3"),
        (("admin", "cap", "ann", "--gpus", "~1"), "~1"),
        (("extend", "6", "--", "-5"), "-5"),
        (("extend", "6", "-5"), "-5"),
        (("wait", "6", "--timeout", "-2"), "-2"),
        (("release", "-1000"), "-1"),
    ],
)
def test_what_is_wrong_is_said_with_the_word_that_was_typed(
    server: FakeServer, tmp_path: Path, words: tuple[str, ...], typed: str
) -> None:
    result = gang(server, tmp_path, *words)

    assert result.code == 2
    assert f"'{typed}'" in result.err or f" {typed}" in result.err
    assert "\0" not in result.err
    assert ("~" in result.err) is ("~" in typed)


def test_a_word_below_zero_is_sent_as_it_was_typed(server: FakeServer, tmp_path: Path) -> None:
    answering(server, "POST /jobs/12/hold", a_job(12, state="waiting", held=HELD))
    gang(server, tmp_path, "hold", "12", "--reason", "-5")
    assert sent(server, "POST /jobs/12/hold") == {"reason": "-5"}


def test_caps_and_the_top_priority_of_users(server: FakeServer, tmp_path: Path) -> None:
    answering(server, "POST /users/ann/cap", {"name": "ann", "cap_gpus": 3})
    answering(server, "PUT /users/ann/top-priority", {"name": "ann", "top_priority": True, "jobs_at_top": 0})
    answering(server, "DELETE /users/ann/top-priority", {"name": "ann", "top_priority": False, "jobs_at_top": 1})

    assert gang(server, tmp_path, "admin", "cap", "ann", "--gpus", "3").out == "User ann: at most 3 GPUs at once.\n"
    assert sent(server, "POST /users/ann/cap") == {"cap_gpus": 3}
    assert gang(server, tmp_path, "admin", "grant-priority", "ann").out == "ann may use the priority top.\n"
    revoked = gang(server, tmp_path, "admin", "revoke-priority", "ann").out
    assert revoked == "ann may no longer use the priority top; 1 job still has it.\n"


def test_the_client_does_the_same_from_python(server: FakeServer, client: Any) -> None:
    said: list[Request] = []

    def answer(request: Request) -> Answer:
        said.append(request)
        return Answer(body=a_job(12, state="waiting", held=HELD))

    for verb in ("hold", "release", "priority"):
        server.overrides[f"POST /jobs/12/{verb}"] = answer
    server.add(a_job(12))
    job = client.job(12).hold(reason="x")
    assert (job.held.by, job.held.why, job.start_after) == ("priya", "data moves", None)
    job.release()
    job.set_priority("low")
    assert [json.loads(request.body) for request in said] == [{"reason": "x"}, {}, {"priority": "low"}]


def test_admins_read_who_changed_what(server: FakeServer, tmp_path: Path) -> None:
    event = {"id": 9, "at": "2026-01-05T10:00:00.000Z", "kind": "team_quota", "actor": "root", "node": None,
             "text": "root changed team red: guaranteed GPUs none → 4.", "data": {}}  # fmt: skip
    answering(server, "GET /events", {"items": [event], "next": None})

    done = gang(server, tmp_path, "admin", "log", "--node", "gpu-01", "-n", "5")

    assert (done.code, "root changed team red" in done.out) == (0, True), done.err
    (request,) = server.requests_to("GET /events")
    assert request.params == {"node": ["gpu-01"], "limit": ["5"]}
    assert json.loads(gang(server, tmp_path, "admin", "log", "-o", "json").out) == {"items": [event]}
