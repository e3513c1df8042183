"""What a rank's wait status means, for the trainer's ranks and for all others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gangline.protocol.pulse import Phase
from worker.endings import RESULT_PATIENCE_SECONDS, Ending, judge_ending
from worker.node_report import read_result

SIGABRT = 6
CASES: dict[str, tuple[int, dict[str, Any], Ending]] = {
    "exit 0": (0, {}, Ending.FINE),
    "an exception": (65 << 8, {}, Ending.FAILED),
    "a signal": (SIGABRT, {}, Ending.FAILED),
    "stopped by us": (9, {"stopped_by_us": True}, Ending.FINE),
    "a signal after the result": (SIGABRT, {"result": "succeeded"}, Ending.FINE),
    "an exit after the result": (1 << 8, {"result": "succeeded"}, Ending.FINE),
    "75 after the result": (75 << 8, {"result": "preempted"}, Ending.FINE),
    "75 before the result": (75 << 8, {}, Ending.OPEN),
    "76 before the result": (76 << 8, {}, Ending.OPEN),
    "75 and no result came": (75 << 8, {"waited_seconds": RESULT_PATIENCE_SECONDS}, Ending.FAILED),
    "a signal in teardown, before the result": (SIGABRT, {"phase": Phase.ENDED}, Ending.OPEN),
    "a signal in training": (SIGABRT, {"phase": Phase.TRAINING}, Ending.FAILED),
    "a script's 75 is just its code": (75 << 8, {"is_trainer": False}, Ending.FAILED),
    "a script has no result": (SIGABRT, {"is_trainer": False, "result": "succeeded"}, Ending.FAILED),
}


@pytest.mark.parametrize("name", CASES)
def test_an_end_is_fine_a_failure_or_open(name: str) -> None:
    status, facts, expected = CASES[name]
    values: dict[str, Any] = {
        "stopped_by_us": False,
        "is_trainer": True,
        "result": None,
        "phase": None,
        "waited_seconds": 0.0,
    }

    assert judge_ending(status, **{**values, **facts}) is expected


@pytest.mark.parametrize(
    ("text", "result"),
    [
        ('{"outcome": "succeeded", "step": 3}', "succeeded"),
        ('{"outcome": "failed"}', None),
        ('{"outcome": ', None),
        ("[]", None),
        ("[" * 60_000, None),  # the job's own code can write there, and must not bring its supervisor down
    ],
)
def test_a_result_is_read_or_there_is_none(tmp_path: Path, text: str, result: str | None) -> None:
    (tmp_path / "result.json").write_text(text)
    assert read_result(tmp_path) == result
