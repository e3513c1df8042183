"""Processes that load samples fail like the code they run, leave signals to their rank, and never outlive it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support.child import die_with_parent
from tests.support.wait import wait_until
from trainer.data import workers
from trainer.data.loader import TrainLoader
from trainer.data.workers import DataWorkerDied
from trainer.task import TrainTask

REPOSITORY = Path(__file__).resolve().parents[4]


class Dataset:
    """Item i is what `item(i)` returns."""

    def __init__(self, item: Callable[[int], Any]) -> None:
        self.item = item

    def __len__(self) -> int:
        return 100

    def __getitem__(self, index: int) -> Any:
        return self.item(index)


@contextlib.contextmanager
def steps(item: Callable[[int], Any], data_workers: int = 1) -> Iterator[Iterator[Any]]:
    """Batches of one sample each."""
    task = TrainTask(model=torch.nn.Identity(), loss=lambda output, target: output, data=Dataset(item))
    loader = TrainLoader(
        task, seed=0, batch_size=1, parts_rank=0, parts_size=1, grad_accum_steps=1, data_workers=data_workers,
        device=torch.device("cpu"), first_sample=0, last_sample=None,
    )  # fmt: skip
    try:
        yield (step.micro_batches[0].batch for step in loader)
    finally:
        loader.close()


class OddError(Exception):
    """Cannot be pickled and read back."""

    def __init__(self, one: int, two: int) -> None:
        super().__init__(f"{one} is not {two}")


def fail(error: Exception) -> Callable[[int], Any]:
    def raise_it(index: int) -> Any:
        raise error

    return raise_it


@pytest.mark.parametrize("data_workers", [0, 2])
@pytest.mark.parametrize("error", [ValueError("a broken sample"), KeyError("label"), FileNotFoundError(2, "gone")])
def test_an_exception_arrives_as_the_users_own_with_its_traceback(error: Exception, data_workers: int) -> None:
    with steps(fail(error), data_workers) as batches, pytest.raises(type(error)) as caught:
        next(batches)

    assert str(caught.value) == str(error)
    assert "raise_it" in "".join(traceback.format_exception(caught.value)), "the line that raised is shown"


def test_an_exception_that_cannot_travel_still_says_what_it_was() -> None:
    with steps(fail(OddError(1, 2))) as batches, pytest.raises(RuntimeError, match="OddError: 1 is not 2") as caught:
        next(batches)

    assert "raise_it" in "".join(traceback.format_exception(caught.value))


def test_a_worker_leaves_signals_to_its_rank_and_uses_one_thread() -> None:
    with steps(lambda index: torch.tensor([os.getpid(), torch.get_num_threads()])) as batches:
        (pid, num_threads) = next(batches)[0].tolist()
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2):
            os.kill(pid, number)
        pids = {next(batches)[0, 0].item() for _ in range(20)}

    assert pid != os.getpid()
    assert num_threads == 1
    assert pids == {pid}, "it works on"


def test_a_signal_in_the_moment_of_the_start_does_not_end_a_worker() -> None:
    stop = threading.Event()
    pids: set[int] = set()

    def pester() -> None:
        while not stop.is_set():
            for pid in children() - pids:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)

    pids |= children()
    thread = threading.Thread(target=pester)
    thread.start()
    try:
        for _ in range(5):
            with steps(lambda index: index, data_workers=2) as batches:
                assert [next(batches).shape for _ in range(3)] == [(1,)] * 3
    finally:
        stop.set()
        thread.join()


def test_o12_a_killed_worker_is_named_with_the_shared_memory_there_is() -> None:
    def die(index: int) -> Any:
        os.kill(os.getpid(), signal.SIGBUS)

    with (
        steps(die) as batches,
        pytest.raises(DataWorkerDied, match=r"was killed by SIGBUS.*Shared memory \(/dev/shm\) has \d+ MiB"),
    ):
        next(batches)


def test_a_worker_that_never_comes_up_is_started_again_and_no_sample_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As one that was forked while another thread held a lock that the child then waits for."""
    start, tried = workers._start_worker, tmp_path / "tried"

    def start_or_wait(rank_pid: int, is_closing: Any, started: Any, number: int) -> None:
        if number == 1 and not tried.exists():
            tried.touch()
            threading.Event().wait()
        start(rank_pid, is_closing, started, number)

    monkeypatch.setattr(workers, "_start_worker", start_or_wait)
    monkeypatch.setattr(workers, "_START_SECONDS", 1.0)
    with steps(lambda index: (os.getpid(), index), data_workers=2) as batches:
        seen = [next(batches) for _ in range(40)]
        pids = {int(pid) for pid, _ in seen}
        indices = [int(index) for _, index in seen]

    with steps(lambda index: index, data_workers=0) as batches:
        assert indices == [int(next(batches)) for _ in range(40)]
    assert len(pids) == 2
    assert tried.exists()


def test_closing_ends_the_workers() -> None:
    with steps(lambda index: torch.tensor(os.getpid()), data_workers=2) as batches:
        pids = {int(next(batches)) for _ in range(10)}
        assert len(pids) == 2

    assert not any(is_alive(pid) for pid in pids)


def test_closing_does_not_wait_for_workers_that_are_stuck(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def get_stuck_at_the_second(index: int) -> int:
        mark = tmp_path / str(os.getpid())
        if mark.exists():
            mark.write_text("stuck")
            threading.Event().wait()
        mark.touch()
        return index

    with steps(get_stuck_at_the_second, data_workers=2) as batches:
        next(batches)
        wait_until(lambda: [mark.read_text() for mark in tmp_path.iterdir()] == ["stuck"] * 2, 60, "both are stuck")
        monkeypatch.setattr(torch.utils.data._utils, "MP_STATUS_CHECK_INTERVAL", 40.0)  # torch waits so long for each
        started = time.monotonic()
    seconds = time.monotonic() - started

    assert not any(is_alive(int(mark.name)) for mark in tmp_path.iterdir())
    assert seconds < 30


RANK = """
import os, sys, threading, torch
from trainer.data.loader import TrainLoader
from trainer.task import TrainTask

class Data:
    def __len__(self): return 1000
    num_read = 0
    def __getitem__(self, index):
        self.num_read += 1
        if self.num_read > 1:
            threading.Event().wait()
        return torch.tensor(os.getpid())

task = TrainTask(model=torch.nn.Identity(), loss=None, data=Data())
loader = TrainLoader(task, seed=0, batch_size=1, parts_rank=0, parts_size=1, grad_accum_steps=1, data_workers=2,
                     device=torch.device("cpu"), first_sample=0, last_sample=None)
steps = iter(loader)
print(*{int(next(steps).micro_batches[0].batch) for _ in range(2)}, flush=True)
sys.stdin.read()
"""


def test_workers_end_with_a_rank_that_was_killed_even_when_they_are_stuck() -> None:
    rank = subprocess.Popen(
        [sys.executable, "-c", RANK], cwd=REPOSITORY, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        preexec_fn=die_with_parent(),
    )  # fmt: skip
    assert rank.stdin is not None
    assert rank.stdout is not None
    try:
        pids = [int(word) for word in rank.stdout.readline().split()]
        assert len(pids) == 2
        assert all(is_alive(pid) for pid in pids)
    finally:
        rank.kill()
        rank.wait()
        rank.stdin.close()
        rank.stdout.close()

    try:
        wait_until(lambda: not any(is_alive(pid) for pid in pids), 60, "the workers end")
    finally:
        for pid in filter(is_alive, pids):
            os.kill(pid, signal.SIGKILL)


def children() -> set[int]:
    """Processes whose parent is this one."""
    found = set()
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError, IndexError):
            if int((folder / "stat").read_text().rpartition(")")[2].split()[1]) == os.getpid():
                found.add(int(folder.name))
    return found


def is_alive(pid: int) -> bool:
    """Whether the process runs; a zombie does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
