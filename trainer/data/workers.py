"""Processes that load samples: how they start, end and fail.

They leave stopping to the rank: the signals that stop a job, Ctrl-C and the SIGUSR2 that dumps stacks do nothing to
them. They end with the loader, and within a second of their rank's death, however it died.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import shutil
import signal
import threading
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from multiprocessing.process import BaseProcess
from typing import Any, Final

import torch
from torch.utils.data import DataLoader, get_worker_info

from trainer.data.batches import Collate
from trainer.data.seeding import draws_random, generators_kept, seed_generators

_LEFT_TO_THE_RANK: Final = (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1, signal.SIGUSR2)
_CHECK_SECONDS: Final = 0.5
_CLOSE_SECONDS: Final = 2.0
"""A worker that has not ended by then, once the loader closes, is stuck in the user's code."""
_START_SECONDS: Final = 30.0
"""A worker that has not come up by then, which takes milliseconds, never will."""
_START_LOOK_SECONDS: Final = 0.002
_START_TRIES: Final = 3
_SHARED_MEMORY: Final = "/dev/shm"

Key = tuple[int, int]
"""(epoch, index) of a sample."""


class DataWorkerDied(RuntimeError):
    """A data worker was killed; the message says by what, and how much shared memory there is."""


class SampleFetcher:
    """Fetches and collates samples by (epoch, index): the dataset that torch's DataLoader sees.

    In a worker an exception becomes a `WorkerFailure`, so that the rank can raise what the user's code raised.
    """

    def __init__(self, data: Any, seed: int, collate: Collate) -> None:
        self._data, self._seed, self._collate = data, seed, collate

    def __getitems__(self, keys: list[Key]) -> Any:
        """The collated batch of `keys`."""
        if get_worker_info() is None:
            return self._fetch(keys)
        try:
            return self._fetch(keys)
        except Exception as error:  # noqa: BLE001  # whatever the user's code raises; it is raised again in the rank
            return WorkerFailure.of(error)

    def _fetch(self, keys: list[Key]) -> Any:
        if not draws_random(self._data):
            return self._collate([self._data[index] for _, index in keys])
        with generators_kept():
            samples = [self._item(epoch, index) for epoch, index in keys]
            seed_generators(self._seed, *keys[0], len(keys))  # a collate function may draw, too
            return self._collate(samples)

    def _item(self, epoch: int, index: int) -> Any:
        seed_generators(self._seed, epoch, index)
        return self._data[index]


@dataclass(frozen=True)
class WorkerFailure:
    """An exception of a worker on its way to the rank."""

    pickled: bytes
    text: str
    """The traceback in the worker."""

    @staticmethod
    def of(error: Exception) -> WorkerFailure:
        """The failure that carries `error`, or a RuntimeError that says the same where it cannot be pickled."""
        text = "".join(traceback.format_exception(error))
        try:
            pickled = pickle.dumps(error)
            pickle.loads(pickled)
        except Exception:  # noqa: BLE001  # anything may go wrong in the user's own exception class
            pickled = pickle.dumps(RuntimeError(f"{type(error).__name__}: {error}"))
        return WorkerFailure(pickled, text)

    def error(self) -> Exception:
        """The exception, with the worker's traceback as its cause."""
        error: Exception = pickle.loads(self.pickled)
        error.__cause__ = WorkerTraceback(self.text)
        return error


class WorkerTraceback(Exception):
    """Shows the traceback of a worker above that of the rank."""

    def __str__(self) -> str:
        return f"in a data worker:\n{self.args[0]}"


class BatchStream:
    """Collated batches, one for each list of keys that `key_batches()` yields, in its order."""

    def __init__(
        self,
        fetcher: SampleFetcher,
        key_batches: Callable[[], Iterator[list[Key]]],
        *,
        data_workers: int,
        device: torch.device,
    ) -> None:
        """`key_batches` is called once for each start of workers, which is tried again where one does not come up."""
        self._fetcher, self._key_batches = fetcher, key_batches
        self._data_workers, self._device = data_workers, device
        self._iterator: Iterator[Any] | None = None
        self._start()
        for _ in range(_START_TRIES - 1):
            if self._has_started():
                break
            self.close()
            self._start()

    def _start(self) -> None:
        before = set(multiprocessing.active_children())
        # Forked, so that a dataset may hold a lambda or an open memory map.
        context = multiprocessing.get_context("fork") if self._data_workers > 0 else None
        self._is_closing = context.RawValue("b", 0) if context is not None else None
        self._started = context.RawArray("b", self._data_workers) if context is not None else None
        began = partial(_start_worker, os.getpid(), self._is_closing, self._started)
        loader: DataLoader[Any] = DataLoader(
            self._fetcher,  # type: ignore[arg-type]  # torch asks for __getitems__ alone
            batch_sampler=self._key_batches(),
            collate_fn=_as_it_is,
            num_workers=self._data_workers,
            pin_memory=self._device.type == "cuda",
            generator=torch.Generator(),  # else it draws a seed of its own from the global one
            multiprocessing_context=context,
            worker_init_fn=began if self._data_workers > 0 else None,
        )
        with _signals_held():
            self._iterator = iter(loader)
        self._workers = set(multiprocessing.active_children()) - before

    def _has_started(self) -> bool:
        """Whether all workers came up, or ended. A fork beside a thread that begins or ends may leave the child waiting
        for a lock of the interpreter for ever (seen once with CPython 3.11.7)."""
        deadline = time.monotonic() + _START_SECONDS
        while self._started is not None and not all(self._started):
            if not all(worker.is_alive() for worker in self._workers):
                return True  # the next batch says what killed it
            if time.monotonic() >= deadline:
                return False
            time.sleep(_START_LOOK_SECONDS)
        return True

    def __next__(self) -> Any:
        """The next batch. Raises StopIteration, what the user's dataset raised, and DataWorkerDied."""
        if self._iterator is None:
            raise StopIteration
        try:
            batch = next(self._iterator)
        except RuntimeError as error:
            if self._workers and str(error).startswith("DataLoader worker (pid"):
                raise DataWorkerDied(_death_message(self._workers)) from error
            raise
        if isinstance(batch, WorkerFailure):
            raise batch.error()
        return batch

    def close(self) -> None:
        """End the workers; takes some seconds where one is stuck in the user's code. Safe to call twice."""
        if self._iterator is None:
            return
        if self._is_closing is not None:
            self._is_closing.value = 1
        self._iterator = None  # torch asks its workers to end, and waits for them
        for worker in self._workers:
            if worker.is_alive():
                worker.kill()
                worker.join()


def _as_it_is(batch: Any) -> Any:
    return batch


def _start_worker(rank_pid: int, is_closing: Any, started: Any, number: int) -> None:
    """Runs first in each worker."""
    started[number] = 1
    for one in _LEFT_TO_THE_RANK:
        signal.signal(one, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _LEFT_TO_THE_RANK)
    torch.set_num_threads(1)
    threading.Thread(target=_end_in_time, args=(rank_pid, is_closing), daemon=True, name="end-in-time").start()


def _end_in_time(rank_pid: int, is_closing: Any) -> None:
    """End this worker when its rank is gone, or when it is stuck while the loader closes."""
    # Not PR_SET_PDEATHSIG, which fires when the thread ends that started the worker; and a plain shared byte rather
    # than an Event, whose set() waits for every waiting process, also for one that was killed.
    while os.getppid() == rank_pid and not is_closing.value:
        time.sleep(_CHECK_SECONDS)
    if is_closing.value:
        time.sleep(_CLOSE_SECONDS)
    os._exit(0)


@contextlib.contextmanager
def _signals_held() -> Iterator[None]:
    """A worker inherits the mask, so a signal that comes before it ignores signals waits, and is then ignored."""
    former = signal.pthread_sigmask(signal.SIG_BLOCK, _LEFT_TO_THE_RANK)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, former)


def _death_message(workers: Iterable[BaseProcess]) -> str:
    ends = " ".join(f"Data worker {one.pid} {_end(one.exitcode)}." for one in workers if one.exitcode)
    try:
        usage = shutil.disk_usage(_SHARED_MEMORY)
    except OSError:
        return ends
    return (
        f"{ends} Shared memory ({_SHARED_MEMORY}) has {usage.total >> 20} MiB, {usage.free >> 20} MiB of them free; "
        "batches of data workers travel through it, and it counts as the job's memory. If it ran out: use fewer "
        "train.data_workers (0 needs none), smaller batches, or give the job more."
    )


def _end(exit_code: int) -> str:
    return f"exited with {exit_code}" if exit_code > 0 else f"was killed by {signal.Signals(-exit_code).name}"
