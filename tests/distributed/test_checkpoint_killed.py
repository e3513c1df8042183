"""O-41: a saving process is killed at random moments, or its disk fills; what is left is whole and resumed from."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.child import die_with_parent

REPOSITORY = Path(__file__).resolve().parents[2]
FEW = 8
"""Rounds of the normal run. With the final name given before the data, or the old one deleted before the new one is
complete, one of the first rounds is red."""
TMPFS_BYTES = 12 * 1024 * 1024
"""Room for five checkpoints and a part of one."""


def run_saver(*arguments: str, before: tuple[str, ...] = (), seconds: float) -> list[dict[str, Any]]:
    """What the saver found, a record per round."""
    command = [*before, sys.executable, "-m", "tests.distributed.checkpoint_saver", *arguments]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    with subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, stdout=subprocess.PIPE, text=True, preexec_fn=die_with_parent()
    ) as process:
        try:
            output, _ = process.communicate(timeout=seconds)
        finally:
            process.kill()
    assert process.returncode == 0, output
    return [json.loads(line) for line in output.splitlines()]


@pytest.mark.timeout(700)
@pytest.mark.parametrize("rounds", [FEW, pytest.param(200, marks=pytest.mark.full)])
def test_o41_after_kill_9_at_any_moment_training_resumes_from_a_whole_checkpoint(tmp_path: Path, rounds: int) -> None:
    seed = random.randrange(1_000_000)

    found = run_saver("kill", str(tmp_path), str(rounds), str(seed), seconds=600)

    assert len(found) == rounds
    for number, one in enumerate(found):
        where = f"round {number} of seed {seed}: {one}"
        assert one["killed"], where
        # No partial file carries the final name, and what was told to be complete is there
        assert one["broken"] == [], where
        assert one["newest"] >= one["finished"], where
        assert one["different"] == [] and one["notes"] == [], where
        if number:
            assert one["restored"] == found[number - 1]["newest"], where
    # The kills struck during saves, not beside them
    assert sum(bool(one["interrupted"]) for one in found) >= rounds / 4, f"seed {seed}"
    assert found[-1]["newest"] > rounds / 4


def test_o41_a_disk_that_fills_fails_the_save_and_leaves_the_checkpoint_before(tmp_path: Path) -> None:
    if shutil.which("unshare") is None or subprocess.run(["unshare", "--mount", "true"], check=False).returncode != 0:
        pytest.skip("needs root, to mount a small file system")

    found = run_saver("fill", str(tmp_path / "disk"), str(TMPFS_BYTES), before=("unshare", "--mount"), seconds=120)

    assert len(found) == 2
    for one in found:
        assert one["is_storage_full"], one
        assert "No space left on device" in one["failure"]
        assert one["failed_step"] > 2
        assert one["restored"] == one["failed_step"] - 1
        assert (one["different"], one["notes"], one["broken"], one["leftovers"]) == ([], [], [], [])
