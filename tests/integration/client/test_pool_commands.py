"""`gang node …`, `gang top`, `gang usage` and `gang idle` as processes: what they send, print, and exit with."""

from __future__ import annotations

import json
import os
import pty
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime, timedelta, timezone
from pathlib import Path
from typing import Any

import pytest

from tests.integration.client.fake_rest_server import Answer, FakeServer, Request, a_problem
from tests.integration.client.gang_process import COMMAND, environment, gang, gang_on_terminal
from tests.integration.client.test_cli import HOSTILE, SHOWN, assert_harmless
from tests.support.child import end, hear_interrupts
from tests.support.wait import BUSY_SECONDS, wait_until


def a_gpu(index: int, **changes: Any) -> dict[str, Any]:
    return {
        "index": index, "uuid": f"GPU-{index}", "kind": "gpu", "model": "NVIDIA H100", "memory_bytes": 85 * 10**9,
        "job_id": None, "owner": None, "held": False, "quarantined": None, "utilisation": 0.0,
        "memory_used_bytes": 0, "idle_since": None, **changes,
    }  # fmt: skip


def a_node(name: str = "gpu-01", **changes: Any) -> dict[str, Any]:
    node = {
        "name": name, "state": "ready", "address": "10.0.0.1", "cpus": 64.0, "memory_bytes": 2**38, "cordoned": None,
        "cordon_until": None, "draining": False, "labels": {}, "shared_folder_id": None, "version": "0.1.0",
        "last_heartbeat_at": "2026-01-05T10:00:00.000Z",
        "gpus": [a_gpu(0, held=True, job_id=12, owner="priya", utilisation=0.97), a_gpu(1)],
    }  # fmt: skip
    return {**node, **changes}


def an_overview(**changes: Any) -> dict[str, Any]:
    return {
        "at": "2026-01-05T10:00:00.000Z",
        "nodes": [a_node(), a_node("gpu-02", cordoned="new driver", draining=True)],
        "running": [
            {
                "id": 12, "name": "gpt", "owner": "priya", "team": "vision", "state": "running", "gpus": 2,
                "started_at": "2026-01-05T09:00:00.000Z",
                "progress": {"step": 80, "total_steps": 200, "fraction": 0.4, "eta_seconds": 31.0, "metrics": {}},
            }
        ],
        "num_running": 1,
        "waiting": [
            {
                "id": 13, "name": "llm", "owner": "tomas", "team": "nlp", "state": "waiting", "gpus": 8,
                "waiting_since": "2026-01-05T09:58:00.000Z",
                "reason": {"code": "needs_gpus", "text": "8 GPUs are needed and 2 are free.", "fix": ""},
            }
        ],
        "num_waiting": 3,
        "num_gpus_waited_for": 24,
        "teams": [{"name": "vision", "held_gpus": 2, "quota_gpus": 1, "quota_nodes": None, "cap_gpus": 4}],
        **changes,
    }  # fmt: skip


def says(server: FakeServer, name: str, body: Any) -> None:
    server.overrides[name] = lambda request: Answer(body=body)


def sent(server: FakeServer, name: str) -> dict[str, Any]:
    (request,) = server.requests_to(name)
    body: dict[str, Any] = json.loads(request.body)
    return body


# --- Machines --------------------------------------------------------------------------------------------------------


def test_a_drain_says_what_stops_what_runs_on_and_how_to_undo_it(server: FakeServer, tmp_path: Path) -> None:
    node = a_node(cordoned="new driver", draining=True)
    says(server, "POST /nodes/gpu-01/drain", {**node, "stopped": [12, 15], "going_on": [14]})

    result = gang(server, tmp_path, "node", "drain", "gpu-01", "--reason", "new driver", "--now")

    assert sent(server, "POST /nodes/gpu-01/drain") == {"reason": "new driver", "until": None, "now": True}
    assert result.code == 0
    assert result.out == (
        "gpu-01 takes no new work: draining: new driver. 2 jobs stopped to start elsewhere: 12 15. "
        "1 job runs on to the end: 14 (--now stops them).\n"
    )
    assert "gang node resume gpu-01" in result.err


@pytest.mark.parametrize(
    ("words", "stopped", "going_on", "told"),
    [
        (
            (),
            [12],
            [33, 35, 14],
            "1 job stopped to start elsewhere: 12. "
            "2 jobs run on (checkpoints lie on gpu-01 alone): 33 35; --now stops them until gpu-01 is back. "
            "1 job runs on to the end: 14 (--now stops them).",
        ),
        (
            ("--now",),
            [33, 35],
            [],
            "2 jobs stopped and can go on only once gpu-01 is back (checkpoints lie on gpu-01 alone): 33 35.",
        ),
    ],
)
def test_a_drain_names_the_jobs_that_can_go_on_nowhere_else_and_why(
    server: FakeServer, tmp_path: Path, words: tuple[str, ...], stopped: list[int], going_on: list[int], told: str
) -> None:
    bound = [{"job_id": job_id, "why": "checkpoints lie on gpu-01 alone"} for job_id in (33, 35)]
    node = a_node(cordoned="new fan", draining=True)
    says(
        server,
        "POST /nodes/gpu-01/drain",
        {**node, "stopped": stopped, "going_on": going_on, "cannot_move": bound},
    )

    result = gang(server, tmp_path, "node", "drain", "gpu-01", "--reason", "new fan", *words)

    assert result.out == f"gpu-01 takes no new work: draining: new fan. {told}\n"


@pytest.mark.parametrize(("typed", "hours_ahead"), [("2h", 2), ("1d12h", 36), ("a local time", 5)])
def test_the_end_of_a_cordon_is_sent_with_its_zone(
    server: FakeServer, tmp_path: Path, typed: str, hours_ahead: int
) -> None:
    if typed == "a local time":  # of a zone of the test's own, in which no summer time begins meanwhile
        here = timezone(timedelta(hours=3))
        typed = (datetime.now(here) + timedelta(hours=hours_ahead)).replace(tzinfo=None).isoformat()
    says(server, "POST /nodes/gpu-01/cordon", a_node(cordoned="dust", cordon_until="2026-01-05T12:00:00.000Z"))

    result = gang(server, tmp_path, "node", "cordon", "gpu-01", "--reason", "dust", "--until", typed, TZ="HERE-3")

    until = datetime.fromisoformat(sent(server, "POST /nodes/gpu-01/cordon")["until"])
    assert abs(until - datetime.now(UTC) - timedelta(hours=hours_ahead)) < timedelta(minutes=2)
    assert "cordoned until" in result.out
    assert result.err == "", "it comes back by itself"


def test_resume_and_label(server: FakeServer, tmp_path: Path) -> None:
    says(server, "POST /nodes/gpu-01/resume", {**a_node(), "changed": False})
    says(server, "POST /nodes/gpu-01/labels", a_node(labels={"switch": "leaf-3"}))

    assert gang(server, tmp_path, "node", "resume", "gpu-01").out == "gpu-01 takes work already.\n"
    labelled = gang(server, tmp_path, "node", "label", "gpu-01", "switch=leaf-3", "rack-", "--reason", "moved")
    assert labelled.out == "gpu-01 has the labels switch=leaf-3.\n"
    assert sent(server, "POST /nodes/gpu-01/labels") == {
        "labels": {"switch": "leaf-3", "rack": None},
        "reason": "moved",
    }


@pytest.mark.parametrize(
    "words",
    [
        ("node", "drain", "gpu-01"),
        ("node", "cordon", "gpu-01", "--reason", "x", "--until", "soon"),
        ("node", "label", "gpu-01", "switch", "=x", "a="),
        ("usage", "--since", "yesterday"),
        ("usage", "-o", "xml"),
    ],
)
def test_a_wrong_command_line_is_exit_2_and_sends_nothing(
    server: FakeServer, tmp_path: Path, words: tuple[str, ...]
) -> None:
    result = gang(server, tmp_path, *words)
    assert (result.code, result.out, server.requests) == (2, "", [])
    assert "error: " in result.err


def test_all_wrong_labels_are_named_at_once(server: FakeServer, tmp_path: Path) -> None:
    assert "'switch', '=x', 'a=':" in gang(server, tmp_path, "node", "label", "gpu-01", "switch", "=x", "a=").err


def test_node_ls_shows_cordon_with_reason_and_end_and_labels(server: FakeServer, tmp_path: Path) -> None:
    nodes = [
        a_node(cordoned="dust", cordon_until="2026-01-05T12:00:00Z"),
        a_node("gpu-02", labels={"switch": "leaf-3"}),
    ]
    says(server, "GET /nodes", {"items": nodes})

    _, first, second = gang(server, tmp_path, "node", "ls", TZ="UTC").out.splitlines()

    assert "cordoned until 2026-01-05 12:00: dust" in first
    assert "switch=leaf-3" in second


# --- Usage and idle holders ------------------------------------------------------------------------------------------

USAGE = {
    "by": ["team", "week"], "since": "2026-01-01T00:00:00Z", "until": "2026-01-08T00:00:00Z", "next": None,
    "items": [
        {"team": "vision", "week": "2026-W01", "held_gpu_hours": 1234.5, "busy_gpu_hours": 617.25,
         "lost_gpu_hours": 2.5, "jobs": 7},
    ],
    "total": {"held_gpu_hours": 1234.5, "busy_gpu_hours": 617.25, "lost_gpu_hours": 2.5, "jobs": 7},
}  # fmt: skip


def test_usage_is_a_table_json_or_the_servers_csv(server: FakeServer, tmp_path: Path) -> None:
    def answer(request: Request) -> Answer:
        if request.params.get("format") == ["csv"]:
            return Answer(
                body=b"team,week,held_gpu_hours\nvision,2026-W01,1234.5\n", headers={"Content-Type": "text/csv"}
            )
        return Answer(body=USAGE)

    server.overrides["GET /usage"] = answer
    words = ("usage", "--by", "team,week", "--since", "2026-01-01", "--until", "2026-01-08")

    table = gang(server, tmp_path, *words)
    heading, line = table.out.splitlines()
    assert heading.split() == ["TEAM", "WEEK", "HELD", "BUSY", "BUSY", "%", "LOST", "JOBS"]
    assert line.split() == ["vision", "2026-W01", "1,234.5", "617.2", "50%", "2.5", "7"]
    assert "1,234.5 GPU-hours held, 617.2 of them busy" in table.err
    assert json.loads(gang(server, tmp_path, *words, "-o", "json").out) == USAGE
    csv = gang(server, tmp_path, *words, "-o", "csv")
    assert (csv.out, csv.err) == ("team,week,held_gpu_hours\nvision,2026-W01,1234.5\n", "")
    assert server.requests[0].params == {"by": ["team,week"], "since": ["2026-01-01"], "until": ["2026-01-08"]}


def test_since_seven_days_is_sent_as_an_instant(server: FakeServer, tmp_path: Path) -> None:
    says(server, "GET /usage", {**USAGE, "items": []})
    result = gang(server, tmp_path, "usage", "--since", "7d")
    since = datetime.fromisoformat(server.requests[0].params["since"][0])
    assert abs(datetime.now(UTC) - since - timedelta(days=7)) < timedelta(minutes=2)
    assert "Nobody that you may see held a GPU" in result.err


IDLE = {
    "job_id": 12, "name": "gpt", "owner": "amara", "team": "vision", "gpus": 2, "since": "2026-01-05T09:00:00Z",
    "nodes": [{"name": "gpu-12", "gpus": [0, 1]}], "idle_seconds": 1_560.0, "wasted_gpu_hours": 0.867,
}  # fmt: skip


def test_idle_holders_are_listed_with_owner_since_when_and_waste(server: FakeServer, tmp_path: Path) -> None:
    private = {**IDLE, "job_id": None, "name": "a private job of team nlp", "owner": None}
    says(server, "GET /idle", {"items": [IDLE, private], "next": None})

    result = gang(server, tmp_path, "idle")

    _, first, second = result.out.splitlines()
    assert all(word in first for word in ("12", "amara", "26m00s", "0.9 h", "gpu-12:0,1"))
    assert "a private job of team nlp" in second
    assert "4 GPUs, 1.7 GPU-hours held without use" in result.err
    says(server, "GET /idle", {"items": [], "next": None})
    assert "Nobody holds GPUs" in gang(server, tmp_path, "idle").err


# --- Top -------------------------------------------------------------------------------------------------------------


def test_top_in_a_pipe_shows_the_pool_once_and_whole(server: FakeServer, tmp_path: Path) -> None:
    says(server, "GET /overview", an_overview())

    result = gang(server, tmp_path, "top")

    assert (result.code, result.err) == (0, "")
    lines = result.out.splitlines()
    assert lines[0] == ("2 of 4 GPUs held, 97 % busy · 1 free · 2 cordoned or draining · 3 jobs wait for 24")
    assert any("█·" in line and "priya" in line for line in lines)
    assert any("draining: new driver" in line for line in lines)
    assert any("80/200" in line and "31s" in line for line in lines)
    assert any("8 GPUs are needed and 2 are free." in line for line in lines)
    assert "… 2 more waiting jobs" in lines
    assert any("vision" in line and "borrows 1" in line for line in lines)
    assert_harmless(result.out)


def test_top_once_on_a_terminal_fits_it(server: FakeServer, tmp_path: Path) -> None:
    says(server, "GET /overview", an_overview())
    result = gang_on_terminal(server, tmp_path, "top", "--once", columns=60, NO_COLOR="1")
    assert result.code == 0
    assert max(len(line) for line in result.out.replace("\r", "").splitlines()[1:]) <= 60


def test_top_as_json_is_the_rest_answer(server: FakeServer, tmp_path: Path) -> None:
    says(server, "GET /overview", an_overview())
    assert json.loads(gang(server, tmp_path, "top", "-o", "json").out) == an_overview()


@contextmanager
def top_on_terminal(server: FakeServer, folder: Path) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """A live `gang top`; yields the process and our end of its terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [*COMMAND, "top", "--every", "0.2s"],
        stdin=theirs, stdout=theirs, stderr=theirs,
        env=environment(server, folder, TERM="xterm-256color", COLUMNS="100", LINES="30"),
        preexec_fn=hear_interrupts,
    )  # fmt: skip
    os.close(theirs)
    os.set_blocking(ours, False)
    try:
        yield process, ours
    finally:
        end(process)
        os.close(ours)


def test_top_refreshes_waits_out_an_outage_and_is_left_by_ctrl_c(server: FakeServer, tmp_path: Path) -> None:
    says(server, "GET /overview", an_overview())
    seen = bytearray()

    def shows(text: str) -> bool:
        with suppress(OSError):  # nothing there at the moment
            seen.extend(os.read(ours, 65_536))
        return text.encode() in seen

    def has_ended() -> bool:
        shows("")  # on a terminal that nobody reads it could not even say goodbye
        return process.poll() is not None

    with top_on_terminal(server, tmp_path) as (process, ours):
        wait_until(lambda: shows("3 jobs wait for 24"), BUSY_SECONDS, "the first screen is not shown")
        says(server, "GET /overview", an_overview(num_waiting=1, num_gpus_waited_for=5))
        wait_until(lambda: shows("1 job waits for 5"), BUSY_SECONDS, "it does not refresh")
        server.overrides["GET /overview"] = lambda request: a_problem(500, "error", "down", fix="Wait.")
        wait_until(lambda: shows("No answer from the server"), BUSY_SECONDS, "an outage is not said")
        says(server, "GET /overview", an_overview(num_waiting=1, num_gpus_waited_for=7))
        wait_until(lambda: shows("1 job waits for 7"), BUSY_SECONDS, "it does not go on")
        process.send_signal(signal.SIGINT)
        wait_until(has_ended, BUSY_SECONDS, "Ctrl-C does not end it")
        assert process.returncode == 0


@pytest.mark.parametrize("words", [("top",), ("idle",), ("usage",), ("node", "ls"), ("node", "resume", "gpu-01")])
def test_no_text_of_others_acts_on_the_terminal(server: FakeServer, tmp_path: Path, words: tuple[str, ...]) -> None:
    node = a_node(cordoned=HOSTILE, labels={"rack": HOSTILE}, gpus=[a_gpu(0, held=True, owner=HOSTILE, model=HOSTILE)])
    job = {"id": 1, "name": HOSTILE, "owner": HOSTILE, "state": "running", "gpus": 1}
    waiting = {**job, "state": "waiting", "reason": {"code": "x", "text": HOSTILE}}
    says(server, "GET /nodes", {"items": [node]})
    says(
        server, "GET /overview", an_overview(nodes=[node], running=[job], waiting=[waiting], teams=[{"name": HOSTILE}])
    )
    says(server, "GET /idle", {"items": [{**IDLE, "name": HOSTILE, "owner": HOSTILE, "nodes": [{"name": HOSTILE}]}]})
    says(server, "GET /usage", {**USAGE, "items": [{**USAGE["items"][0], "team": HOSTILE}]})  # type: ignore[index, dict-item]
    server.overrides["POST /nodes/gpu-01/resume"] = lambda request: a_problem(404, "not_found", HOSTILE, fix=HOSTILE)

    result = gang(server, tmp_path, *words)

    assert SHOWN in result.out + result.err
    assert_harmless(result.out)
    assert_harmless(result.err)
