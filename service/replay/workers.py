"""Carries out the replays of a study, in processes side by side.

Not for: what a replay is (`service.replay.study`).
"""

from __future__ import annotations

import contextlib
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ProcessPoolExecutor, wait
from typing import Any

from service.replay.study import Outcome, Row, Study, Task, rows_of, run_alone, run_task

POLL_SECONDS = 0.2
"""How often the progress of the processes is looked at."""

_study: Study
_count: Any  # the ended jobs of all processes together


def run_study(study: Study, num_processes: int, on_progress: Callable[[int], None]) -> list[Row]:
    """All replays of a study; `on_progress` gets the number of jobs that have ended in all of them so far.

    Raises SimulationFault. When it is interrupted, no process stays behind.
    """
    if num_processes == 1:
        return _run_here(study, on_progress)
    context = multiprocessing.get_context("spawn")
    count = context.Value("q", 0)
    executor = ProcessPoolExecutor(
        min(num_processes, len(study.tasks())), mp_context=context, initializer=_begin, initargs=(study, count)
    )
    try:
        seeds = study.seeds if study.with_alone else ()
        with _interrupts_held():
            futures: list[Future[Outcome]] = [executor.submit(_work, task) for task in study.tasks()]
            alone = {seed: executor.submit(_work_alone, seed) for seed in seeds}
        pending: set[Future[Any]] = {*futures, *alone.values()}
        while pending:
            done, pending = wait(pending, timeout=POLL_SECONDS, return_when=FIRST_COMPLETED)
            for future in done:
                future.result()
            on_progress(count.value)
        return rows_of(
            study, [future.result() for future in futures], {seed: found.result() for seed, found in alone.items()}
        )
    except BaseException:
        for process in multiprocessing.active_children():
            process.terminate()
        raise
    finally:
        executor.shutdown(cancel_futures=True)


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal. Those started in here never hear it: this one ends them."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _run_here(study: Study, on_progress: Callable[[int], None]) -> list[Row]:
    total = 0

    def tell(count: int) -> None:
        nonlocal total
        total += count
        on_progress(total)

    outcomes = [run_task(study, task, tell) for task in study.tasks()]
    seeds = study.seeds if study.with_alone else ()
    return rows_of(study, outcomes, {seed: run_alone(study, seed, tell) for seed in seeds})


def _begin(study: Study, count: Any) -> None:
    global _study, _count
    _study, _count = study, count


def _tell(count: int) -> None:
    with _count.get_lock():
        _count.value += count


def _work(task: Task) -> Outcome:
    return run_task(_study, task, _tell)


def _work_alone(seed: int) -> dict[int, float]:
    return run_alone(_study, seed, _tell)
