"""Commands that take several jobs: what was done for each is said, then each failure, whose code is the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.client.fake_rest_server import Answer, Cut, FakeServer, Request, a_job, a_problem
from tests.integration.client.gang_process import gang

COMMANDS = ("cancel", "requeue", "hold", "release")


def answering(job: dict[str, Any]) -> Callable[[Request], Answer]:
    return lambda request: Answer(body=job)


@pytest.fixture
def two_jobs(server: FakeServer) -> FakeServer:
    """Jobs 50 and 51, which do as they are told."""
    for job_id in (50, 51):
        server.add(a_job(job_id))
        for verb in COMMANDS:
            server.overrides[f"POST /jobs/{job_id}/{verb}"] = answering(a_job(job_id))
    for verb in COMMANDS:
        server.overrides[f"POST /jobs/999/{verb}"] = lambda request: a_problem(
            404, "not_found", "there is no job 999", fix="Look it up: gang ls."
        )
    return server


def words_of(verb: str, *jobs: str) -> tuple[str, ...]:
    return (verb, *jobs, *(("-y",) if verb in ("cancel", "requeue") else ()))


@pytest.mark.parametrize("verb", COMMANDS)
@pytest.mark.parametrize("jobs", [("50", "999", "51"), ("999", "50", "51"), ("50", "51", "999")], ids=" ".join)
def test_one_job_that_fails_keeps_none_of_the_others(
    two_jobs: FakeServer, tmp_path: Path, verb: str, jobs: tuple[str, ...]
) -> None:
    done = gang(two_jobs, tmp_path, *words_of(verb, *jobs))

    assert [line.split()[0] for line in done.out.splitlines()] == ["50", "51"]
    assert "error: there is no job 999\nfix: Look it up: gang ls.\n" in done.err
    assert done.code == 3
    assert [len(two_jobs.requests_to(f"POST /jobs/{job_id}/{verb}")) for job_id in (50, 51)] == [1, 1]


@pytest.mark.parametrize("verb", COMMANDS)
def test_as_json_those_that_it_worked_for_are_on_stdout(two_jobs: FakeServer, tmp_path: Path, verb: str) -> None:
    done = gang(two_jobs, tmp_path, *words_of(verb, "50", "999"), "-o", "json")

    assert [item["id"] for item in json.loads(done.out)["items"]] == [50]
    assert ("there is no job 999" in done.err, done.code) == (True, 3)


@pytest.mark.parametrize("verb", COMMANDS)
def test_with_nothing_done_only_the_failures_are_said(two_jobs: FakeServer, tmp_path: Path, verb: str) -> None:
    done = gang(two_jobs, tmp_path, *words_of(verb, "999", "nobody"))

    assert (done.out, done.code) == ("", 3)
    assert "there is no job 999" in done.err
    assert "no job of yours has the name 'nobody'" in done.err
    assert "gang release" not in done.err, "nothing is held"


def test_the_exit_code_is_that_of_the_first_failure(two_jobs: FakeServer, tmp_path: Path) -> None:
    held = a_problem(403, "forbidden", "job 50 is held by admin root", fix="Ask root or another admin.")
    two_jobs.overrides["POST /jobs/50/release"] = lambda request: held

    done = gang(two_jobs, tmp_path, "release", "50", "999", "51")

    assert (done.code, done.out) == (4, "51 gpt is not held; it is running\n")
    assert done.err.index("held by admin root") < done.err.index("there is no job 999")


def test_a_server_that_is_gone_is_not_asked_for_the_rest(two_jobs: FakeServer, tmp_path: Path) -> None:
    def gone(request: Request) -> Answer:
        raise Cut

    two_jobs.overrides["POST /jobs/51/requeue"] = gone
    two_jobs.add(a_job(52))

    done = gang(two_jobs, tmp_path, "requeue", "50", "51", "52", "-y")

    assert (done.code, done.out.split()[0]) == (6, "50")
    assert "not tried: 52" in done.err
    assert two_jobs.requests_to("POST /jobs/52/requeue") == []


def test_curves_of_the_jobs_that_are_there_are_drawn(two_jobs: FakeServer, tmp_path: Path) -> None:
    curve = {"attempt": 1, "keys": {"loss": {"step": [1, 2], "last": [2.0, 1.0]}}}
    two_jobs.overrides["GET /jobs/50/metrics"] = lambda request: Answer(body=curve)

    done = gang(two_jobs, tmp_path, "plot", "999", "50")

    assert ("loss" in done.out, "there is no job 999" in done.err, done.code) == (True, True, 3)


def test_members_of_a_team_are_added_one_by_one(server: FakeServer, tmp_path: Path) -> None:
    missing = a_problem(404, "not_found", "there is no user bob", fix="Create it.")
    server.overrides["PUT /teams/red/members/bob"] = lambda request: missing
    for user in ("ann", "carl"):
        server.overrides[f"PUT /teams/red/members/{user}"] = lambda request: Answer(status=204)

    done = gang(server, tmp_path, "admin", "team", "add", "red", "ann", "bob", "carl")

    assert (done.out, done.code) == ("ann, carl now in team red.\n", 3)
    assert "there is no user bob" in done.err
