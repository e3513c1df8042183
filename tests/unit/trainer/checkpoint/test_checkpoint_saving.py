"""Saving: complete or absent, told once, the newest ones kept, and training goes on beside it."""

from __future__ import annotations

import json
import resource
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.checkpoint_cases import (
    ALONE,
    OPTIMIZERS,
    Told,
    at,
    checkpointer_for,
    differences,
    path_of,
    plan_for,
    small_model,
    snapshot,
    train,
)
from tests.support.wait import wait_until
from trainer.checkpoint import saving
from trainer.checkpoint.checkpointer import FAILED, Checkpointer, CheckpointFailed
from trainer.checkpoint.layout import TEMPORARY_PREFIX, list_checkpoints, list_leftovers, temporary_of, verify

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")  # one rank saves alone on purpose

WAIT_SECONDS = 60.0


class Run:
    """A model, its optimizer and its checkpointer."""

    def __init__(self, root: Path, *, told: Told | None = None, **plan: Any) -> None:
        self.root = root
        self.model = small_model()
        self.optimizer = OPTIMIZERS["adamw"](self.model)
        self.told = told or Told()
        self.checkpointer: Checkpointer = checkpointer_for(ALONE, plan_for(root, **plan), self.told)

    def save(self, step: int, *, is_async: bool = False) -> None:
        train(self.model, self.optimizer, 1, seed=step)
        self.checkpointer.save(self.model, self.optimizer, at(step), is_async=is_async)

    def restored(self) -> dict[str, Any]:
        model = small_model(seed=9)
        optimizer = OPTIMIZERS["adamw"](model)
        assert checkpointer_for(ALONE, plan_for(self.root), Told()).restore(model, optimizer) is not None
        return snapshot(model, optimizer)

    @property
    def on_disk(self) -> list[int]:
        return [one.step for one in list_checkpoints(self.root)]


@pytest.fixture
def held(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Saves stop before their shards until the event is set."""
    go_on = threading.Event()
    write_shards = saving._write_shards

    def wait_and_write(*arguments: Any) -> Any:
        assert go_on.wait(30)
        return write_shards(*arguments)

    monkeypatch.setattr(saving, "_write_shards", wait_and_write)
    return go_on


def test_an_asynchronous_save_holds_the_state_of_its_step_though_training_goes_on(
    tmp_path: Path, held: threading.Event
) -> None:
    run = Run(tmp_path)
    run.save(1, is_async=True)
    expected = snapshot(run.model, run.optimizer)

    train(run.model, run.optimizer, 5)
    run.optimizer.param_groups[0]["lr"] = 7.0
    assert run.checkpointer.finished_step == 0
    assert run.on_disk == []
    held.set()
    wait_until(lambda: run.checkpointer.finished_step == 1, WAIT_SECONDS, "the save ends")

    assert differences(run.restored(), expected) == []


def test_one_save_is_in_flight_and_the_next_one_waits_for_it(tmp_path: Path, held: threading.Event) -> None:
    run = Run(tmp_path)
    run.save(1, is_async=True)
    threading.Timer(0.05, held.set).start()

    run.save(2, is_async=True)

    assert 1 in run.on_disk
    run.checkpointer.wait()
    assert run.on_disk == [2, 1]
    assert run.told.paths("checkpoint") == [path_of(1), path_of(2)]


def test_a_checkpoint_is_told_when_it_is_announced_with_all_that_the_api_stores(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(3, is_async=True)
    wait_until(lambda: run.checkpointer.finished_step == 3, WAIT_SECONDS, "the save ends")
    assert run.told.records == []

    run.checkpointer.announce(3)
    run.checkpointer.announce(3)
    run.checkpointer.wait()

    size = sum(file.stat().st_size for file in (tmp_path / path_of(3)).iterdir() if file.name[0] in "_.")
    assert run.told.records == [
        {"kind": "checkpoint", "step": 3, "path": path_of(3), "samples_seen": 48, "num_bytes": size}
    ]


def test_the_manifest_says_what_is_inside(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(3)

    manifest = verify(tmp_path / path_of(3))

    assert (manifest.position, manifest.world_size) == (at(3), 1)
    assert manifest.torch_version == torch.__version__
    assert manifest.plan["train"]["steps"] == 100
    assert manifest.keys["model.0.weight"] == "float32[8, 6]"
    assert manifest.keys["optimizer.state.0.weight/exp_avg"] == "float32[8, 6]"
    assert manifest.keys["optimizer.group.0.weight"] == "object"
    assert {file.name for file in manifest.files} == {"__0_0.distcp", ".metadata"}
    assert json.loads((tmp_path / path_of(3) / "manifest.json").read_text())["version"] == 1


def test_saving_a_step_twice_writes_it_once(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(3, is_async=True)
    run.checkpointer.wait()
    inode = (tmp_path / path_of(3)).stat().st_ino

    run.checkpointer.save(run.model, run.optimizer, at(3), is_async=False)

    assert (tmp_path / path_of(3)).stat().st_ino == inode
    assert run.told.paths("checkpoint") == [path_of(3)]


def test_a_whole_checkpoint_of_an_earlier_try_is_left_and_a_broken_one_replaced(tmp_path: Path) -> None:
    for step in (3, 4):
        Run(tmp_path).save(step)
    (tmp_path / path_of(4) / "COMPLETE").unlink()
    inode = (tmp_path / path_of(3)).stat().st_ino
    temporary_of(tmp_path / path_of(5)).mkdir()
    run = Run(tmp_path)

    for step in (3, 4, 5):
        run.save(step)

    assert (tmp_path / path_of(3)).stat().st_ino == inode
    for step in (3, 4, 5):
        assert verify(tmp_path / path_of(step)).position == at(step)
    assert [note for note in run.told.notes if "COMPLETE" in note and "replaced" in note]
    assert list_leftovers(tmp_path) == []


def test_what_interrupted_saves_of_earlier_attempts_left_is_deleted_at_the_start(tmp_path: Path) -> None:
    run = Run(tmp_path)
    run.save(3)
    for attempt in ("attempt-1", "attempt-2"):
        leftover = tmp_path / attempt / f"{TEMPORARY_PREFIX}step-00000009"
        leftover.mkdir(parents=True)
        (leftover / "__0_0.distcp").write_bytes(b"half")

    later = Run(tmp_path, attempt=3)
    later.checkpointer.restore(later.model, later.optimizer)
    later.checkpointer.close()

    assert list_leftovers(tmp_path) == []
    assert run.on_disk == [3]


def test_without_a_supervisor_complete_is_accepted_and_the_newest_are_kept(tmp_path: Path) -> None:
    run = Run(tmp_path, keep=2)
    for step in (1, 2, 3, 10):
        run.save(step, is_async=True)
    run.checkpointer.wait()
    run.checkpointer.close()

    assert run.on_disk == [10, 3]
    assert run.told.paths("checkpoint_removed") == [path_of(1), path_of(2)]
    assert list_leftovers(tmp_path) == []


def test_nothing_is_deleted_before_the_api_has_accepted_what_replaces_it(tmp_path: Path) -> None:
    told = Told(has_supervisor=True)
    run = Run(tmp_path, told=told, keep=1)
    for step in (1, 2, 3):
        run.save(step)
    assert run.on_disk == [3, 2, 1]

    told.accepted = 250  # the events of 1 and 2, and half of that of 3
    run.save(4)
    run.checkpointer.close()

    assert run.on_disk == [4, 3, 2]
    assert told.paths("checkpoint_removed") == [path_of(1)]


def test_checkpoints_of_earlier_attempts_count_and_broken_ones_do_not(tmp_path: Path) -> None:
    first = Run(tmp_path, keep=9)
    for step in (10, 20, 30):
        first.save(step)
    (tmp_path / path_of(30) / "COMPLETE").unlink()
    told = Told(has_supervisor=True)
    second = Run(tmp_path, told=told, attempt=2, keep=2, resume_from=[(path_of(s), s) for s in (30, 20, 10)])
    restored = second.checkpointer.restore(second.model, second.optimizer)
    assert restored is not None
    assert restored.path == path_of(20)

    second.save(21)
    assert second.on_disk == [30, 21, 20, 10]
    told.accept_all()
    second.save(22)
    second.checkpointer.close()

    assert second.on_disk == [30, 22, 21, 20]  # 30 is broken, but younger than 20: it goes with it
    assert told.paths("checkpoint_removed") == [path_of(10)]


@pytest.mark.parametrize("is_async", [False, True])
def test_a_failed_save_says_why_and_leaves_the_older_ones(tmp_path: Path, is_async: bool) -> None:
    run = Run(tmp_path)
    run.save(1)
    expected = snapshot(run.model, run.optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))
    try:
        with pytest.raises(
            CheckpointFailed, match=r"checkpoint of step 2 could not be written: .*File too large"
        ) as one:
            run.save(2, is_async=is_async)
            run.checkpointer.wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    assert one.value.is_storage_full
    assert run.checkpointer.finished_or_failed == FAILED
    with pytest.raises(CheckpointFailed, match="step 2"):
        run.checkpointer.finished_step  # noqa: B018  # the property raises
    assert run.on_disk == [1]
    assert list_leftovers(tmp_path) == []
    assert differences(run.restored(), expected) == []


def test_without_a_checkpoint_root_nothing_is_written_or_read() -> None:
    model = small_model()
    optimizer = OPTIMIZERS["sgd"](model)
    plan = plan_for(Path("unused"))
    told = Told()
    checkpointer = checkpointer_for(ALONE, type(plan)(run=plan.run, parallel=plan.parallel, train=plan.train), told)

    assert checkpointer.restore(model, optimizer) is None
    assert checkpointer.save(model, optimizer, at(1), is_async=True) == 0.0
    checkpointer.wait()
    checkpointer.close()
    assert (checkpointer.finished_step, told.records) == (0, [])
