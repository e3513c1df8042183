"""What a run was good for, by what of it is kept."""

from __future__ import annotations

from typing import Any

import pytest

from service.domain.progress import Progress
from service.domain.run_accounts import EndedRun, RunAccounts, account_run

PROGRESS = Progress(rank=0, step=50, total_steps=100, updated_at=900.0, seconds_per_step=10.0)
"""500 s left, as of 900."""


def account(**more: Any) -> RunAccounts:
    """Two GPUs from 0 on, ranks from 30 on, the last checkpoint at 800, the end at 1000."""
    run = EndedRun(
        **{
            "created_at": 0.0,
            "running_at": 30.0,
            "ended_at": 1000.0,
            "checkpointed_at": 800.0,
            "num_gpus": 2,
            "progress": PROGRESS,
            "is_last": False,
            **more,
        }
    )
    return account_run(run, least_report_seconds=120.0)


WORLDS: dict[str, tuple[dict[str, Any], tuple[float, float, float | None]]] = {
    "up to its last checkpoint; the rest and the next start are lost": ({}, (770.0, 460.0, 600.0)),
    "nothing, without a checkpoint": ({"checkpointed_at": None}, (0.0, 2000.0, 1370.0)),
    "a checkpoint of its very end": ({"checkpointed_at": 1000.0}, (970.0, 60.0, 400.0)),
    "all of it, when no attempt follows": ({"is_last": True}, (970.0, 60.0, 400.0)),
    "nothing, when its ranks never ran": ({"running_at": None}, (0.0, 2000.0, None)),
    "reports of less than two minutes are not believed": ({"running_at": 800.0}, (0.0, 2000.0, None)),
    "it reported nothing": ({"progress": None}, (770.0, 460.0, None)),
}


@pytest.mark.parametrize("sentence", WORLDS)
def test_what_is_kept(sentence: str) -> None:
    more, expected = WORLDS[sentence]
    found = account(**more)
    assert (found.useful_seconds, found.lost_gpu_seconds, found.measured_left_seconds) == expected
