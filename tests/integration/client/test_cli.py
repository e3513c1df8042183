"""`gang` as a process: stdout, exit codes, errors with their fix; no text of others acts on the terminal."""

from __future__ import annotations

import json
import stat
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.integration.client.fake_rest_server import TOKEN, Answer, FakeServer, Request, a_job, a_problem
from tests.integration.client.gang_process import RunningGang, gang, gang_on_terminal
from tests.support.wait import BUSY_SECONDS

HOSTILE = "\x1b]0;owned\x07\x1b[2J\x9b31mred\x1b]8;;http://evil\x1b\\link\x1b]8;;\x1b\\\u202egnp\x00\x08end"
"""Title, clear screen, C1 colour, hyperlink, right-to-left override, NUL and backspace."""
SHOWN = "redlinkgnpend"


def assert_harmless(text: str, *, may_have_colours: bool = False) -> None:
    """Nothing in `text` acts on a terminal, but colours where allowed."""
    assert not set(text) & set("\x00\x08\x07\x9b\u202e\r"), repr(text)
    assert "\x1b]" not in text
    if not may_have_colours:
        assert "\x1b" not in text, repr(text)


# --- Exit codes and errors -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        (a_problem(401, "unauthorized", "the token is not valid", fix="Log in: gang login."), 4),
        (a_problem(403, "forbidden", "not yours", fix="Ask the owner."), 4),
        (a_problem(404, "not_found", "there is no job 12", fix="gang ls"), 3),
        (a_problem(409, "conflict", "not now", fix="Look again."), 5),
        (a_problem(422, "does_not_fit", "needs 16 GPUs, the pool has 8", fix="Ask for 8."), 5),
        (a_problem(422, "invalid_request", "limit must be a number", fix="Correct it."), 2),
        (a_problem(500, "error", "an unexpected error", fix="Tell an admin.", request_id="r-1"), 1),
    ],
)
def test_an_error_says_what_and_fix_on_stderr_alone(
    server: FakeServer, tmp_path: Path, answer: Answer, code: int
) -> None:
    server.overrides["GET /jobs/12"] = lambda request: answer

    for options in ((), ("-o", "json")):
        result = gang(server, tmp_path, "show", "12", *options)
        assert result.code == code
        assert result.out == ""
        assert result.err.startswith(f"error: {answer.body['detail']}\nfix: {answer.body['fix']}\n")


def test_a_server_that_is_not_there_is_exit_6(server: FakeServer, tmp_path: Path) -> None:
    result = gang(None, tmp_path, "ls", "--server", "http://127.0.0.1:9")

    assert result.code == 6
    assert "http://127.0.0.1:9" in result.err
    assert "fix:" in result.err


@pytest.mark.parametrize(
    "words",
    [
        ("sumbit", "x.yaml"),
        ("ls", "--limt", "3"),
        ("show",),
        ("logs", "12", "--rank", "one"),
        ("logs", "12", "--from", "a1;r0"),
        ("logs", "12", "--exit-status"),
        ("logs", "12", "--tail", "3", "--from", "5"),
        ("wait", "12", "--timeout", "soon"),
        ("submit", "gone.yaml"),
        ("submit", ".", "--set", "novalue"),
        ("submit", "gone.yaml", "--cancel-on-interrupt"),
        ("show", "0"),
    ],
)
def test_a_wrong_command_line_is_exit_2(server: FakeServer, tmp_path: Path, words: tuple[str, ...]) -> None:
    result = gang(server, tmp_path, *words)

    assert (result.code, result.out) == (2, "")
    assert "error: " in result.err
    assert "fix: " in result.err
    assert "Traceback" not in result.err


def test_a_misspelt_command_is_answered_with_the_nearest(server: FakeServer, tmp_path: Path) -> None:
    assert "Did you mean gang submit?" in gang(server, tmp_path, "sumbit").err


def test_without_a_server_the_way_to_one_is_told(tmp_path: Path) -> None:
    result = gang(None, tmp_path, "ls")

    assert result.code == 4
    assert "gang login" in result.err


def test_every_fault_of_a_job_file_has_its_line_and_the_likely_key(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text(
        "version: 1\nname: gpt\ncode: {path: /x}\nrun:\n  script: train.py\n"
        "resources:\n  num_gpu: 4\nstop_grace: soon\n"
    )
    faults = [
        {"pointer": "resources.num_gpu", "message": "unknown key.", "suggestion": "Did you mean resources.gpus?"},
        {"pointer": "stop_grace", "line": 8, "column": 1, "message": "is not a duration", "suggestion": "Write 30s."},
        {"pointer": "--set resources.gpus", "message": "must be a whole number.", "suggestion": ""},
    ]
    server.overrides["POST /jobs"] = lambda request: a_problem(422, "invalid_spec", "3 problems", errors=faults)

    for verb in ("check", "submit"):
        result = gang(server, tmp_path, verb, "gpt.yaml", "--set", "resources.gpus=x")
        assert result.code == 2
        assert result.err.splitlines()[:3] == [
            "gpt.yaml:7:3  resources.num_gpu: unknown key. Did you mean resources.gpus?",
            "gpt.yaml:8:1  stop_grace: is not a duration. Write 30s.",
            "--set resources.gpus: must be a whole number.",
        ]


def test_a_file_that_is_not_yaml_has_its_line(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "gpt.yaml").write_text("name: gpt\nrun: {script: [\n")

    result = gang(server, tmp_path, "check", "gpt.yaml")

    assert result.code == 2
    assert result.err.startswith("gpt.yaml:3:1  not valid YAML")
    assert server.requests == []


# --- Data on stdout ------------------------------------------------------------------------------------------------


def test_json_is_the_rest_answer_and_nothing_else(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12))
    (tmp_path / "job.yaml").write_text("name: gpt\ncode: {path: /x}\n")

    assert json.loads(gang(server, tmp_path, "show", "12", "-o", "json").out) == server.jobs[12]
    assert json.loads(gang(server, tmp_path, "-o", "json", "ls").out) == {"items": [server.jobs[12]]}
    submitted = gang(server, tmp_path, "submit", "job.yaml", "-o", "json")
    assert json.loads(submitted.out)["id"] == 13
    assert json.loads(gang(server, tmp_path, "cancel", "12", "-o", "json").out)["state"] == "stopping"


def test_submit_prints_the_job_on_stdout_and_the_next_steps_on_stderr(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "job.yaml").write_text("name: gpt\ncode: {path: /x}\n")

    result = gang(server, tmp_path, "submit", "job.yaml")

    assert result.code == 0
    assert result.out == "Submitted 12  gpt  2 × 2 GPUs\n"
    assert "gang logs -f 12" in result.err
    assert "gang cancel 12" in result.err


def test_piped_tables_are_whole_and_without_colours(server: FakeServer, tmp_path: Path) -> None:
    long_name, reason = "n" * 150, "It needs 16 GPUs on 2 nodes, 13 are free. " * 4
    server.add(a_job(12, name=long_name, state="waiting", reason={"code": "needs_gpus", "text": reason, "fix": ""}))

    result = gang(server, tmp_path, "ls", COLUMNS="60")

    assert long_name in result.out
    assert reason.strip() in result.out
    assert_harmless(result.out)


def test_tables_on_a_terminal_fit_it(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12, name="n" * 150))
    server.add(a_job(13, progress={"fraction": 0.4, "metrics": {"loss": 1.108}, "eta_seconds": 420}))

    wide = gang_on_terminal(server, tmp_path, "ls", columns=200)
    narrow = gang_on_terminal(server, tmp_path, "ls", "--no-color", columns=40)

    assert "LEFT" in wide.out
    assert "40%" in wide.out
    assert "\x1b[34m" in wide.out, "a running job is blue"
    lines = [line for line in narrow.out.replace("\r\n", "\n").rpartition("\x1b[2K")[2].splitlines() if line]
    assert all(len(line) <= 40 for line in lines), lines
    assert "LEFT" not in narrow.out
    assert any(line.lstrip().startswith("12") for line in lines), "ids stay"


def test_no_color_is_obeyed(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12))

    assert "\x1b[3" not in gang_on_terminal(server, tmp_path, "ls", NO_COLOR="1").out


def test_my_last_job_is_minus_one(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(11))
    server.add(a_job(12))

    assert gang(server, tmp_path, "show", "-1").out.startswith("12  gpt")
    assert gang(server, tmp_path, "show", "-2").out.startswith("11  gpt")


# --- Waiting and cancelling ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("state", "outcome", "code"),
    [
        ("succeeded", "succeeded", 0),
        ("failed", "user_error", 10),
        ("cancelled", "cancelled", 11),
        ("failed", "node_lost", 13),
        ("failed", "time_limit", 13),
    ],
)
def test_wait_exits_by_how_the_job_ended(
    server: FakeServer, tmp_path: Path, state: str, outcome: str, code: int
) -> None:
    cause = {"outcome": outcome, "sentence": "Rank 2 on node-2 raised ValueError.", "fix": "Correct the script."}
    server.add(a_job(12, state=state, outcome=outcome, cause=cause, ended_at="2026-01-05T10:03:09.000Z"))

    waited = gang(server, tmp_path, "wait", "12")
    followed = gang(server, tmp_path, "logs", "-f", "12", "--exit-status")

    assert (waited.code, followed.code) == (code, code)
    assert f"12 gpt {state} after 3m05s" in waited.out
    assert followed.out == "", "what is said of the end is not log text"
    if state == "failed":
        assert "cause: Rank 2 on node-2 raised ValueError." in waited.err
        assert "fix: Correct the script." in waited.err


def test_wait_that_is_too_long_is_exit_12_and_the_job_goes_on(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12))

    result = gang(server, tmp_path, "wait", "12", "--timeout", "2s")

    assert result.code == 12
    assert "goes on" in result.err
    assert server.requests_to("POST /jobs/12/cancel") == []


def test_cancelling_several_jobs_needs_consent(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12))
    server.add(a_job(13))
    server.add(a_job(14, state="succeeded"))

    refused = gang(server, tmp_path, "cancel", "12", "13")
    assert refused.code == 2
    assert "-y" in refused.err
    assert server.requests_to("POST /jobs/12/cancel") == []

    done = gang(server, tmp_path, "cancel", "12", "13", "14", "-y")
    assert done.code == 0
    assert done.out.splitlines() == [
        "12 gpt is stopping",
        "13 gpt is stopping",
        "14 gpt has succeeded already: nothing to stop",
    ]


def test_requeueing_says_where_the_job_goes_on(server: FakeServer, tmp_path: Path) -> None:
    at = "2026-01-05T10:05:00.000Z"
    server.add(a_job(12, checkpoint={"step": 120, "samples_seen": 3840, "accepted_at": at}))
    server.add(a_job(13, checkpoint=None))
    server.add(a_job(14))

    refused = gang(server, tmp_path, "requeue", "12", "13")
    assert (refused.code, "-y" in refused.err) == (2, True)
    assert server.requests_to("POST /jobs/12/requeue") == []

    done = gang(server, tmp_path, "requeue", "12", "13", "-y", "--reason", "make room")
    assert done.out.splitlines() == [
        "12 gpt is stopping, starts again from step 120 or what it saves now",
        "13 gpt is stopping, starts again from what it saves now",
    ]
    (request,) = server.requests_to("POST /jobs/12/requeue")
    assert json.loads(request.body) == {"reason": "make room", "from_start": False}
    again = gang(server, tmp_path, "requeue", "14", "--from-start")
    assert again.out == "14 gpt is stopping, starts again from the beginning\n"
    conflict = gang(server, tmp_path, "requeue", "14")
    assert (conflict.code, "waits already" in conflict.err, "fix: Nothing to do." in conflict.err) == (5, True, True)


def test_show_tells_the_step_that_a_job_would_resume_from(server: FakeServer, tmp_path: Path) -> None:
    at = "2026-01-05T10:05:00.000Z"
    server.add(a_job(12, checkpoint={"step": 120, "samples_seen": 3840, "accepted_at": at}))
    server.add(a_job(13))

    assert "  checkpoint step 120, 2026-01-05" in gang(server, tmp_path, "show", "12").out
    assert "checkpoint" not in gang(server, tmp_path, "show", "13").out


def test_check_shows_how_a_training_is_split(server: FakeServer, tmp_path: Path) -> None:
    plan = {"strategy": "ddp", "ranks": 4, "precision": "bf16", "grad_accum_steps": 2, "batch_size": 32,
            "parallel": {"dp_replicate": 4, "dp_shard": 1},
            "notes": ["parallel.strategy dp is taken as ddp."]}  # fmt: skip
    body = {"valid": True, "spec": {"name": "gpt"}, "resources": a_job()["resources"], "plan": plan, "reason": None}
    server.overrides["POST /jobs"] = lambda request: Answer(body=body)
    (tmp_path / "job.yaml").write_text("name: gpt\nrun: {recipe: mlp}\n")

    out = gang(server, tmp_path, "check", "job.yaml").out

    assert "  plan       ddp over 4 ranks, batch 32 (8 per rank) in 2 parts, bf16\n" in out
    assert "  note       parallel.strategy dp is taken as ddp.\n" in out
    assert [request.name for request in server.requests] == ["POST /jobs"], "a recipe packs no folder"


# --- A range of GPUs -----------------------------------------------------------------------------------------------

RANGE = {"nodes": 1, "gpus_per_node": 8, "gpus": 8, "min_gpus": 2, "gpu": None}
SIZE = {"nodes": 2, "gpus_per_node": 2, "gpus": 4, "processes_per_node": 2}


@pytest.mark.parametrize(
    ("facts", "shown", "listed"),
    [
        ({"state": "waiting", "size": None}, "2 to 8 GPUs\n", ["–", "2-8"]),
        ({"state": "waiting", "size": SIZE}, "2 to 8 GPUs, last 2 × 2\n", ["–", "2-8"]),
        (
            {"state": "running", "size": SIZE, "attempt": {"id": 3, "number": 2, "state": "running", "nodes": []}},
            "2 to 8 GPUs, now 2 × 2\n",
            ["2×2", "4"],
        ),
        ({"state": "succeeded", "size": SIZE}, "2 to 8 GPUs, last 2 × 2\n", ["2×2", "4"]),
    ],
)
def test_a_job_with_a_range_of_gpus_shows_what_it_asks_for_and_what_it_has(
    server: FakeServer, tmp_path: Path, facts: dict[str, Any], shown: str, listed: list[str]
) -> None:
    server.add(a_job(12, resources=RANGE, **facts))

    assert f"resources  {shown}" in gang(server, tmp_path, "show", "12").out
    assert gang(server, tmp_path, "ls").out.splitlines()[1].split()[4:6] == listed


def test_why_tells_what_a_job_ahead_has_or_asks_for(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12, state="waiting", reason={"code": "behind", "text": "It needs 2 to 8 GPUs.", "fix": ""}))
    ahead = [{"id": 7, "name": "a", "owner": "jun", "state": "waiting", "gpus": 8, "min_gpus": 2}]
    holders = [{"id": 8, "name": "b", "owner": "jun", "state": "running", "gpus": 4, "min_gpus": None}]
    body = {"id": 12, "state": "waiting", "reason": {"code": "behind", "text": "It needs 2 to 8 GPUs.", "fix": ""},
            "ahead": {"count": 1, "jobs": ahead}, "holders": holders, "can_ever_start": True}  # fmt: skip
    server.overrides["GET /jobs/12/why"] = lambda request: Answer(body=body)

    out = gang(server, tmp_path, "why", "12").out

    assert "Ahead of it: 1 job: 7 a (jun, 2-8 GPUs)." in out
    assert "Holding GPUs: 8 b (jun, 4 GPUs)." in out


@pytest.mark.parametrize(
    ("sizes", "shown"),
    [([8, 4, 2], "8, 4 or 2"), ([4], "4"), (list(range(64, 1, -1)), "one of 63 numbers from 2 to 64")],
)
def test_check_names_the_sizes_that_a_job_may_start_on(
    server: FakeServer, tmp_path: Path, sizes: list[int], shown: str
) -> None:
    body = {"valid": True, "spec": {"name": "gpt"}, "resources": {**RANGE, "sizes": sizes}, "reason": None}
    server.overrides["POST /jobs"] = lambda request: Answer(body=body)
    (tmp_path / "job.yaml").write_text("name: gpt\nrun: {recipe: mlp}\n")

    out = gang(server, tmp_path, "check", "job.yaml").out

    assert f"  resources  {shown} GPUs, the most that are free at each start\n" in out


def test_the_logs_of_a_job_are_those_of_the_ranks_that_it_had(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12, state="succeeded", resources=RANGE, processes_per_node=8, size=SIZE))
    server.logs = {rank: f"{rank}\n".encode() for rank in range(8)}

    assert gang(server, tmp_path, "logs", "12").out == "r0 0\nr1 1\nr2 2\nr3 3\n"


# --- Logs ----------------------------------------------------------------------------------------------------------


def test_logs_without_follow_never_wait(server: FakeServer, tmp_path: Path) -> None:
    for state in ("waiting", "starting", "running"):
        server.add(a_job(12, state=state))
        result = gang(server, tmp_path, "logs", "12")
        assert (result.code, result.out) == (0, "")
        assert f"is {state}" in result.err
    assert gang(server, tmp_path, "logs", "99").code == 3


def test_logs_of_several_ranks_say_which(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12, state="succeeded", outcome="succeeded"))
    server.logs = {0: b"a\nb\n", 1: b"", 2: b"c", 3: b"d\n"}

    assert gang(server, tmp_path, "logs", "12").out == "r0 a\nr0 b\nr2 c\nr3 d\n"
    assert gang(server, tmp_path, "logs", "12", "--rank", "0,3").out == "r0 a\nr0 b\nr3 d\n"
    assert gang(server, tmp_path, "logs", "12", "--rank", "0").out == "a\nb\n"
    assert gang(server, tmp_path, "logs", "12", "--rank", "0", "--tail", "1").out == "b\n"
    assert sorted(gang(server, tmp_path, "logs", "-f", "12").out.splitlines()) == ["r0 a", "r0 b", "r2 c", "r3 d"]


def test_followed_logs_are_byte_equal_when_the_server_is_cut_off(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12, state="succeeded", outcome="succeeded"))
    text = "".join(f"step {step} é\n" for step in range(200)) + "the last line"
    server.logs = {0: text.encode()}
    server.stream_cuts = iter([700, 3, 1500, 90])

    result = gang(server, tmp_path, "logs", "-f", "12", "--rank", "0")

    assert result.out == text + "\n"
    assert result.code == 0


def test_raw_logs_are_the_bytes_as_written(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12))
    server.logs = {0: HOSTILE.encode()}

    assert gang(server, tmp_path, "logs", "12", "--rank", "0", "--raw").out == HOSTILE


# --- Text of others (O-55) -----------------------------------------------------------------------------------------


def hostile_job(**changes: Any) -> dict[str, Any]:
    text = HOSTILE
    return a_job(
        12,
        **{
            "name": text,
            "owner": text,
            "team": text,
            "tags": {text: text},
            "reason": {"code": text, "text": text, "fix": text},
            "attempt": {"id": 1, "number": 1, "state": text, "nodes": [{"name": text, "state": text, "gpus": [0]}]},
            "progress": {"phase": text, "metrics": {text: 1.0, "loss": text}, "fraction": 0.5, "step": 4},
            "cause": {
                "outcome": text,
                "sentence": text,
                "fix": text,
                "node": text,
                "rank": 0,
                "note": text,
                "error": {"type": text, "message": text, "traceback": text},
                "ranks": [{"rank": 0, "node": text, "exit_code": 1}],
            },
            **changes,
        },
    )


COMMANDS = [
    ("ls",),
    ("show", "12", "--events"),
    ("why", "12"),
    ("logs", "12"),
    ("logs", "12", "--rank", "0"),
    ("logs", "-f", "12"),
    ("wait", "12"),
    ("cancel", "12"),
    ("requeue", "12"),
    ("plot", "12"),
    ("node", "ls"),
    ("admin", "user", "ls"),
    ("admin", "team", "ls"),
    ("admin", "token", "ls"),
    ("admin", "user", "create", "maria"),
    ("show", "nobody"),
]


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_no_text_of_others_acts_on_the_terminal(server: FakeServer, tmp_path: Path, words: tuple[str, ...]) -> None:
    server.add(hostile_job(state="failed", outcome="user_error"))
    make_everything_hostile(server)

    for options in ((), ("-o", "json", "--debug")):
        result = gang(server, tmp_path, *words, *options)
        assert_harmless(result.out)
        assert_harmless(result.err)
        assert "error: unexpected" not in result.err, result.err
    terminal = gang_on_terminal(server, tmp_path, *words, columns=200)
    assert "\x1b]0;" not in terminal.out
    assert not set(terminal.out) & set("\x00\x08\x9b\u202e")
    assert "\x1b[2J" not in terminal.out


def answering(body: Any) -> Callable[[Request], Answer]:
    """A route that always answers with `body`."""
    return lambda request: Answer(body=body)


def make_everything_hostile(server: FakeServer) -> None:
    """Hostile text in every answer there is."""
    text = HOSTILE
    server.logs = {0: f"{text}\n\x1b[31mred\x1b[0m\n".encode(), 1: text.encode()}
    gpu = {"index": 0, "uuid": text, "kind": "gpu", "model": text, "memory_bytes": 1, "job_id": 12, "quarantined": text}
    node = {"name": text, "state": text, "address": text, "cpus": 4, "memory_bytes": 1, "gpus": [gpu], "cordoned": text}
    answers: dict[str, Any] = {
        "GET /jobs/12/why": {
            "id": 12,
            "state": "waiting",
            "reason": {"code": text, "text": text, "fix": text},
            "ahead": {"count": 1, "jobs": [{"id": 3, "name": text, "owner": text, "state": text, "gpus": 1}]},
            "holders": [{"id": 4, "name": text, "owner": text, "state": text, "gpus": 1}],
        },
        "GET /jobs/12/events": {"items": [{"id": 1, "kind": text, "actor": text, "text": text, "node": text}]},
        "GET /jobs/12/metrics": {"attempt": 1, "keys": {text: {"step": [1, 2], "last": [1.0, "NaN"]}}},
        "GET /nodes": {"items": [node]},
        "GET /users": {"items": [{"name": text, "admin": True, "teams": [text]}]},
        "GET /teams": {"items": [{"name": text, "members": [text]}]},
        "GET /tokens": {"items": [{"id": 1, "user": text, "label": text, "kind": text}]},
    }
    for name, body in answers.items():
        server.overrides[name] = answering(body)
    server.overrides["POST /users"] = lambda request: a_problem(
        422,
        text,
        text,
        fix=text,
        request_id=text,
        errors=[{"pointer": text, "message": text, "suggestion": text}],
    )


def test_a_terminal_shows_colours_of_logs_and_the_progress_line(server: FakeServer, tmp_path: Path) -> None:
    job = a_job(12, state="succeeded", outcome="succeeded")
    server.add({**job, "progress": {"step": 80, "total_steps": 200, "fraction": 0.4, "metrics": {"loss": 2.31}}})
    server.logs = {0: f"\x1b[31mred\x1b[0m {HOSTILE}\n".encode()}

    result = gang_on_terminal(server, tmp_path, "logs", "-f", "12", "--rank", "0", columns=100)

    assert result.code == 0
    assert "\x1b[31mred" in result.out
    assert SHOWN in result.out
    assert "step 80/200" in result.out
    assert "loss 2.31" in result.out


def test_debug_prints_requests_as_curl_without_the_token(server: FakeServer, tmp_path: Path) -> None:
    server.add(a_job(12))

    result = gang(server, tmp_path, "show", "12", "--debug")

    assert f"curl -X GET {server.url}/api/v1/jobs/12" in result.err
    assert TOKEN not in result.err + result.out
    assert "$GANGLINE_TOKEN" in result.err


# --- login, init ---------------------------------------------------------------------------------------------------


def test_login_tries_the_token_and_stores_it_for_the_owner_alone(server: FakeServer, tmp_path: Path) -> None:
    (tmp_path / "token").write_text(f"{TOKEN}\n")

    result = gang(None, tmp_path, "login", server.url, "--token-file", "token")

    path = tmp_path / "config" / "config.json"
    assert result.code == 0
    assert "as priya" in result.out
    assert json.loads(path.read_text()) == {"url": server.url, "token": TOKEN}
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    server.add(a_job(12))
    assert gang(None, tmp_path, "show", "12").code == 0


def test_login_stores_nothing_that_does_not_work(server: FakeServer, tmp_path: Path) -> None:
    result = gang(None, tmp_path, "login", server.url, "--token-file", "-", stdin="glu_wrong\n")

    assert result.code == 4
    assert not (tmp_path / "config" / "config.json").exists()


@pytest.mark.parametrize("template", ["script", "ddp", "command", "recipe", "entry"])
def test_init_writes_a_file_that_submits(server: FakeServer, tmp_path: Path, template: str) -> None:
    folder = tmp_path / "my project"
    folder.mkdir()
    (folder / "main.py").write_text("")

    written = gang(server, folder, "init", "--template", template)
    assert (written.code, written.out) == (0, "Wrote job.yaml.\n")
    text = (folder / "job.yaml").read_text()
    assert "name: my-project" in text
    assert ("main.py" in text) is (template != "recipe")
    assert text.startswith(f"# yaml-language-server: $schema={server.url}/api/v1/schemas/job.json\n")
    assert "@" not in text

    assert gang(server, folder, "submit", "job.yaml").code == 0
    again = gang(server, folder, "init")
    assert again.code == 5
    assert "--force" in again.err


def test_a_pipe_that_closes_early_is_no_error_message(server: FakeServer, tmp_path: Path) -> None:
    for job_id in range(1, 1001):
        server.add(a_job(job_id, name="n" * 190))
    whole = gang(server, tmp_path, "ls", "--limit", "999")
    assert len(whole.out) > 128 * 1024, "a pipe holds 64 KiB: all of this never fits, so `gang` meets the closed end"

    with RunningGang(server, tmp_path, "ls", "--limit", "999") as running:
        assert running.process.stdout is not None
        assert running.process.stderr is not None
        first = running.process.stdout.read(1)
        running.process.stdout.close()
        said = running.process.stderr.read()
        assert (first.decode(), said, running.process.wait(BUSY_SECONDS)) == (whole.out[0], b"", 1)
