"""The events file: nothing that matters is dropped, and a slow disk costs progress lines only."""

from __future__ import annotations

import errno
import json
import os
import threading
from pathlib import Path
from typing import Any

import pytest

from tests.support.wait import wait_until
from trainer.events import EventWriter

WAIT_SECONDS = 60.0
"""The writer is a thread of its own: a busy machine lets it wait."""


def records(path: Path) -> list[dict[str, Any]]:
    """What a file holds."""
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def test_records_are_numbered_lines_and_values_that_are_not_finite_have_names(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "events")
    events.progress(step=3, total_steps=10, phase="training", metrics={"loss": float("nan"), "lr": 0.5})
    events.notice("something")
    events.close(WAIT_SECONDS)

    first, second = records(tmp_path / "events")
    assert (first["seq"], first["kind"], first["step"], first["total_steps"]) == (1, "progress", 3, 10)
    assert first["metrics"] == {"loss": "NaN", "lr": 0.5}
    assert (second["seq"], second["kind"], second["text"]) == (2, "notice", "something")


def test_where_a_record_ends_is_told_also_when_others_write_into_the_file(tmp_path: Path) -> None:
    path = tmp_path / "events"
    path.write_bytes(b'{"from": "user code"}\n')
    events = EventWriter(path)

    end = events.emit({"kind": "checkpoint", "step": 5})

    assert wait_until(end, WAIT_SECONDS, "the record is written") == path.stat().st_size
    events.close(WAIT_SECONDS)


class StuckDisk(EventWriter):
    """Its disk takes nothing until `released` is set."""

    released = threading.Event()

    def _write(self, path: Path, batch: list[Any]) -> None:
        self.released.wait(30)
        super()._write(path, batch)


def test_a_disk_that_takes_nothing_costs_the_oldest_progress_and_nothing_else(tmp_path: Path) -> None:
    events = StuckDisk(tmp_path / "events", max_waiting=10)
    events.progress(step=1)
    wait_until(lambda: not events._waiting, WAIT_SECONDS, "the writer took the first and is stuck with it")

    events.emit({"kind": "checkpoint", "step": 2})
    for step in range(3, 100):
        events.progress(step=step)

    assert events.num_dropped == 97 - 9
    events.released.set()
    events.close(WAIT_SECONDS)
    assert [one["step"] for one in records(tmp_path / "events")] == [1, 2, *range(91, 100)]


def test_a_file_that_cannot_be_written_is_told_once_and_breaks_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    events = EventWriter(tmp_path / "absent" / "events")
    events.progress(step=1)
    events.progress(step=2)
    events.close(WAIT_SECONDS)

    assert capsys.readouterr().err.count("progress is not recorded") == 1


def test_a_checkpoint_that_a_full_disk_refused_is_told_when_it_takes_something_again(tmp_path: Path) -> None:
    events = EventWriter(tmp_path / "absent" / "events")
    end = events.emit({"kind": "checkpoint", "step": 5})
    events.progress(step=5)
    wait_until(lambda: events._has_warned, WAIT_SECONDS, "the writer was refused")
    assert end() is None

    (tmp_path / "absent").mkdir()
    events.notice("something")
    events.close(WAIT_SECONDS)

    written = records(tmp_path / "absent" / "events")
    assert [one["kind"] for one in written if one["kind"] != "progress"] == ["checkpoint", "notice"]
    assert end() is not None


class NearlyFull:
    """`os`, whose next `write` takes a few bytes, and the one after that nothing."""

    def __init__(self) -> None:
        self.left = [7, 0]

    def __getattr__(self, name: str) -> Any:
        return getattr(os, name)

    def write(self, descriptor: int, data: bytes) -> int:
        if not self.left:
            return os.write(descriptor, data)
        if room := self.left.pop(0):
            return os.write(descriptor, data[:room])
        raise OSError(errno.ENOSPC, "No space left on device")


def test_what_follows_a_line_that_the_disk_took_a_part_of_is_a_line_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("trainer.events.os", NearlyFull())
    events = EventWriter(tmp_path / "events")
    events.emit({"kind": "checkpoint", "step": 5})
    wait_until(lambda: events._has_warned, WAIT_SECONDS, "the writer was refused")
    events.emit({"kind": "checkpoint", "step": 6})
    events.close(WAIT_SECONDS)

    torn, *whole = (tmp_path / "events").read_bytes().splitlines()
    assert torn == b'{"seq":'
    assert [json.loads(line)["step"] for line in whole] == [5, 6]
