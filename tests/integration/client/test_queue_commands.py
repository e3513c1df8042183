"""`gang queue`, `gang why` and `gang check --when`: when a job starts, in words, as a fake server tells it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.integration.client.fake_rest_server import Answer, FakeServer, a_job
from tests.integration.client.gang_process import gang

HOUR = 3600.0
REASON = {"code": "needs_gpus", "text": "It needs 4 GPUs, 1 is free.", "fix": "It starts when enough are free."}
HOLDER = {"id": 7, "name": "long", "owner": "jun", "state": "running", "gpus": 4, "min_gpus": None}
SECRET = {"id": None, "name": "a private job of team vision", "owner": None, "state": "waiting", "gpus": 2}


def start(low: float | None, p50: float | None, p90: float | None, why: str | None = None) -> dict[str, Any]:
    at = None if p50 is None else "2026-07-01T12:00:00Z"
    return {"low": at, "p50": at, "p90": at, "low_seconds": low, "p50_seconds": p50, "p90_seconds": p90,
            "why_unknown": why}  # fmt: skip


def why(server: FakeServer, tmp_path: Path, **members: Any) -> str:
    server.add(a_job(12, state="waiting", reason=REASON))
    body = {"id": 12, "state": "waiting", "reason": REASON, "ahead": {"count": 0, "jobs": []},
            "can_ever_start": True, "estimated_start": None, **members}  # fmt: skip
    server.overrides["GET /jobs/12/why"] = lambda request: Answer(body=body)
    return gang(server, tmp_path, "why", "12").out


@pytest.mark.parametrize(
    ("told", "said"),
    [
        (start(0.0, 0.0, 0.0), "Starts now."),
        (start(600.0, 2 * HOUR, 5 * HOUR), "Starts in 10m00s to 5h00m, most likely in about 2h00m"),
        (start(5.0, 300.0, HOUR), "Starts within 1h00m, most likely in about 5m00s"),
        (start(None, None, None, "It is held by ann."), "When it starts is unknown: It is held by ann."),
    ],
)
def test_why_says_when_it_starts(server: FakeServer, tmp_path: Path, told: dict[str, Any], said: str) -> None:
    assert said in why(server, tmp_path, start=told)


def test_why_says_what_would_be_sooner_and_how_the_quota_stands(server: FakeServer, tmp_path: Path) -> None:
    quota = {
        "team": "vision",
        "held_gpus": 6,
        "quota_gpus": 8,
        "held_nodes": 1,
        "quota_nodes": 2,
        "cap_gpus": None,
        "user_held_gpus": 2,
        "user_cap_gpus": 4,
    }
    variant = {"kind": "gpus", "value": "2", "text": "With 2 GPUs it would start now.", "would_stop": [HOLDER]}
    advice = {"text": "Your last 40 jobs used 22% of their limit.", "limit_seconds": 4 * HOUR}

    out = why(server, tmp_path, quota=quota, variants=[variant], advice=advice)

    assert "Team vision holds 6 of the 8 GPUs of its quota." in out
    assert "Team vision holds 1 of the 2 whole nodes of its quota." in out
    assert "Its owner holds 2 of at most 4 GPUs." in out
    assert "sooner: With 2 GPUs it would start now. It would stop 7 long (jun, 4 GPUs)." in out
    assert "limit: Your last 40 jobs used 22% of their limit." in out


def test_the_queue_is_listed_in_the_order_of_turns(server: FakeServer, tmp_path: Path) -> None:
    item = {"id": 12, "name": "gpt", "owner": "ann", "team": "vision", "state": "waiting", "gpus": 4, "position": 1,
            "left_seconds": 2 * HOUR, "reason": REASON, "start": start(0.0, HOUR, 3 * HOUR)}  # fmt: skip
    body = {"policy": "time-left", "count": 9, "items": [item, {**SECRET, "position": 2, "reason": REASON}], "next": 2}
    server.overrides["GET /queue"] = lambda request: Answer(body=body)

    done = gang(server, tmp_path, "queue")

    header, first, second = done.out.splitlines()[:3]
    assert header.split() == ["#", "ID", "NAME", "OWNER", "GPUS", "LEFT", "STARTS", "IN", "WHY"]
    assert first.split()[:7] == ["1", "12", "gpt", "ann", "4", "2h00m", "now–3h00m"]
    assert "a private job of team vision" in second
    assert "--after 2 shows more" in done.err


def test_an_empty_queue_says_so(server: FakeServer, tmp_path: Path) -> None:
    server.overrides["GET /queue"] = lambda request: Answer(body={"items": [], "count": 0, "next": None})

    assert "No jobs wait." in gang(server, tmp_path, "queue").err


def check(server: FakeServer, tmp_path: Path, *words: str, **members: Any) -> str:
    body = {"valid": True, "spec": {"name": "gpt"}, "resources": {}, "reason": None, **members}
    server.overrides["POST /jobs"] = lambda request: Answer(body=body)
    (tmp_path / "job.yaml").write_text(json.dumps({"name": "gpt", "run": {"command": ["true"]}}))
    return gang(server, tmp_path, "check", "job.yaml", *words).out


def test_check_tells_when_only_if_asked(server: FakeServer, tmp_path: Path) -> None:
    told = {"starts_now": False, "starts_in_seconds": None, "start": start(600.0, 2 * HOUR, 5 * HOUR)}

    assert "start " not in check(server, tmp_path, **told)
    assert "start      Starts in 10m00s to 5h00m" in check(server, tmp_path, "--when", **told)


def test_check_names_whom_it_would_stop_and_what_is_sooner(server: FakeServer, tmp_path: Path) -> None:
    variant = {"kind": "gpus", "value": "2", "text": "With 2 GPUs it would start now."}
    told = {"starts_now": False, "starts_in_seconds": 300.0, "would_stop": [HOLDER], "variants": [variant]}

    out = check(server, tmp_path, "--when", **told)

    assert "start      in about 5m00s" in out
    assert "stops      7 long (jun, 4 GPUs)" in out
    assert "sooner     With 2 GPUs it would start now." in out
