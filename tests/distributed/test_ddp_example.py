"""The DDP example keeps its word: the losses of one process, one step at which all leave, the real error first."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tests.support.child import die_with_parent, end
from tests.support.ports import held_port

SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "ddp_script" / "train.py"
STOPPED = 75
END_SECONDS = 150.0
"""Of which importing torch may take a minute on a busy machine."""

pytestmark = pytest.mark.timeout(4 * END_SECONDS)


def run_ranks(folder: Path, world_size: int, *arguments: str, rank_environment: dict[int, dict[str, str]]) -> list[int]:
    """Run the script as `world_size` ranks; events, output and errors per rank lie in `folder`. Returns exit codes."""
    with held_port() as port, contextlib.ExitStack() as leaving:
        ranks = []
        for rank in range(world_size):
            environment = {
                **os.environ,
                "RANK": str(rank),
                "LOCAL_RANK": str(rank),
                "WORLD_SIZE": str(world_size),
                "MASTER_ADDR": "127.0.0.1",
                "MASTER_PORT": str(port),
                "CUDA_VISIBLE_DEVICES": "",
                "GANGLINE_EVENTS_FILE": str(folder / f"events-{rank}.jsonl"),
                "TORCHELASTIC_ERROR_FILE": str(folder / f"error-{rank}.json"),
                **rank_environment.get(rank, {}),
            }
            with open(folder / f"output-{rank}.log", "wb") as output:
                command = [sys.executable, str(SCRIPT), *arguments]
                process = subprocess.Popen(
                    command, env=environment, stdout=output, stderr=output, preexec_fn=die_with_parent()
                )
            leaving.callback(end, process, first=signal.SIGKILL)
            ranks.append(process)
        return [process.wait(timeout=END_SECONDS) for process in ranks]


def reported(folder: Path, rank: int, key: str) -> list[float]:
    """The values of one metric, in the order reported."""
    lines = (folder / f"events-{rank}.jsonl").read_text().splitlines()
    events = [json.loads(line)["metrics"] for line in lines]
    return [metrics[key] for metrics in events if key in metrics]


def test_two_ranks_give_the_losses_of_one_process(tmp_path: Path) -> None:
    runs = {}
    for world_size in (1, 2):
        folder = tmp_path / str(world_size)
        folder.mkdir()
        arguments = ("--steps", "8", "--validate-every", "4")
        assert run_ranks(folder, world_size, *arguments, rank_environment={}) == [0] * world_size
        runs[world_size] = folder

    for key, count in (("loss", 8), ("val_loss", 3)):
        alone = reported(runs[1], 0, key)
        assert len(alone) == count
        for rank in (0, 1):
            # fp32: the order of the all-reduce differs; a wrong slice or a missing average differs by 1e-2 and more
            assert reported(runs[2], rank, key) == pytest.approx(alone, abs=1e-5)
    assert reported(runs[2], 0, "val_loss")[-1] < reported(runs[2], 0, "val_loss")[0]


def test_when_one_rank_is_asked_to_stop_all_leave_at_the_same_step(tmp_path: Path) -> None:
    stop_file = tmp_path / "stop"
    stop_file.write_text("cancel")

    codes = run_ranks(tmp_path, 2, "--steps", "500", rank_environment={1: {"GANGLINE_STOP_FILE": str(stop_file)}})

    assert codes == [STOPPED, STOPPED]
    assert len(reported(tmp_path, 0, "loss")) == len(reported(tmp_path, 1, "loss")) == 1
    assert "asked to stop: leaving after step 1 of 500" in (tmp_path / "output-0.log").read_text()


def test_an_error_is_printed_and_recorded_and_ends_the_rank_with_1(tmp_path: Path) -> None:
    codes = run_ranks(tmp_path, 2, "--heads", "7", rank_environment={})

    assert codes == [1, 1]
    assert "RuntimeError: shape" in (tmp_path / "output-0.log").read_text()
    assert "RuntimeError: shape" in json.loads((tmp_path / "error-0.json").read_text())["message"]["message"]
