"""A checkpoint that still grows is no hang, however slow the disk; one that stands still is."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from gangline.protocol.pulse import Phase, Pulse, read_pulse
from tests.distributed.checkpoint_cases import ALONE
from tests.distributed.tasks import table
from tests.distributed.training_cases import Recorder
from tests.support.wait import BUSY_SECONDS, stays_true, wait_until
from trainer.assembly import assemble_task
from trainer.checkpoint import growth, saving
from trainer.checkpoint.growth import told_while_bytes_move
from trainer.checkpoint.layout import Manifest
from trainer.loop import FLOOR_SECONDS, Surroundings, Training
from trainer.plan.parallel_plan import ParallelPlan
from trainer.plan.training_plan import RunTarget, TrainingPlan, TrainSettings
from trainer.stop import StopFlag
from trainer.task import TrainTask

LOOK_SECONDS = 0.02
watched = partial(told_while_bytes_move, look_seconds=LOOK_SECONDS)


def grow(folder: Path) -> bool:
    """Two mebibytes more; true, so that a condition can begin with it."""
    with open(folder / "shard", "ab") as file:
        return file.write(bytes(2 << 20)) > 0


def test_it_is_told_as_long_as_files_grow_and_not_after_the_end(tmp_path: Path) -> None:
    told: list[float] = []
    with watched(tmp_path, told.append):
        wait_until(lambda: grow(tmp_path) and len(told) >= 3, BUSY_SECONDS, "it is not told three times")
    count = len(told)
    assert told == sorted(told)
    grow(tmp_path)
    stays_true(lambda: len(told) == count, 10 * LOOK_SECONDS, "told after the end")


def test_what_stands_still_is_not_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(growth, "_by_this_process", lambda: 5 << 20)
    grow(tmp_path)
    told: list[float] = []
    with watched(tmp_path, told.append):
        stays_true(lambda: told == [], 10 * LOOK_SECONDS, "told of nothing")


def test_what_the_process_itself_reads_counts_too(tmp_path: Path) -> None:
    """Checksums of a checkpoint are read back, which no folder shows."""
    grow(tmp_path)
    told: list[float] = []
    with watched(tmp_path, told.append):
        wait_until(lambda: (tmp_path / "shard").read_bytes() and told, BUSY_SECONDS, "nothing is told")


def test_a_checkpoint_that_is_written_slowly_is_allowed_more_than_its_phase(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on a network disk: the writer returns only when the watchdog would have been told to wait longer."""
    pulse = Pulse(tmp_path / "pulse")
    allowed: list[float] = []

    def write_slowly(*arguments: Any, **more: Any) -> Manifest:
        reading = read_pulse(tmp_path / "pulse")
        assert reading is not None
        assert (reading.phase, reading.floor_seconds) == (Phase.CHECKPOINT, FLOOR_SECONDS[Phase.CHECKPOINT])
        folder, usual = tmp_path / "checkpoints", reading.floor_seconds
        wait_until(lambda: grow(folder) and pulse.floor_seconds > usual, BUSY_SECONDS, "it gets no more time")
        last = read_pulse(tmp_path / "pulse")
        assert last is not None
        assert last.moves == reading.moves, "who is behind in a hang is told by moves, so these are none"
        allowed.append(last.floor_seconds)
        return written(*arguments, **more)

    written = saving.write_checkpoint
    monkeypatch.setattr("trainer.checkpoint.checkpointer.write_checkpoint", write_slowly)
    monkeypatch.setattr("trainer.loop.told_while_bytes_move", watched)
    plan = TrainingPlan(
        run=RunTarget(entry="tests:table"),
        parallel=ParallelPlan(strategy="single"),
        train=TrainSettings(steps=1, batch_size=4),
        checkpoint_root=str(tmp_path / "checkpoints"),
    )
    task = TrainTask(model=lambda: nn.Linear(12, 5).double(), loss=nn.functional.cross_entropy, data=table())
    (tmp_path / "checkpoints").mkdir()

    around = Surroundings(mesh=ALONE, events=Recorder(), stop=StopFlag({}), pulse=pulse, say=lambda text: None)
    Training(assemble_task(task, plan, ALONE, around.events, {}), around).run()

    assert allowed
    assert pulse.floor_seconds == FLOOR_SECONDS[Phase.STOPPING]
