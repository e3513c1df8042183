"""Builds the report of a node from its ranks and from the files they left. Reads files, sends nothing.

Not for: reading texts for errors (`worker.evidence`, pure).
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangline.protocol import names
from gangline.protocol.launch import ErrorRecord, NodeFailure, RankReport, RunPlan
from gangline.protocol.outcomes import Outcome, TrainerExit
from worker import evidence
from worker.endings import RESULTS, is_trainer
from worker.shared_memory import size_bytes

_MAX_ERROR_FILE_BYTES: Final = 1 << 20
_MAX_RESULT_BYTES: Final = 64 << 10
_TRAINER_CODES: Final = frozenset(int(code) for code in TrainerExit)


@dataclass(kw_only=True)
class RankRun:
    """A started rank, as the supervisor follows it."""

    rank: int
    local_rank: int
    pid: int
    started_at: float
    """Epoch seconds."""
    status: int | None = None
    """Wait status, once it has ended."""
    ended_at: float = 0.0
    reaped_at: float = 0.0
    """Monotonic time of its end."""
    stopped_by_us: bool = False
    killed_after_grace: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether its main process has ended and been reaped."""
        return self.status is not None


def rank_report(run: RankRun, attempt_folder: Path, job: RunPlan, *, is_gang: bool, now: float) -> RankReport:
    """How a rank ended. Its error is looked for only when it failed. A rank alone (`is_gang` false) loses no peers."""
    exit_code, signal_name = (None, None) if run.status is None else evidence.exit_of(run.status)
    error = None if run.status in (None, 0) else _error_of(run.rank, attempt_folder)
    if evidence.is_shared_memory_exhausted(error, signal_name) and (size := size_bytes()) is not None:
        error = evidence.with_shared_memory_hint(error, size)
    return RankReport(
        rank=run.rank,
        local_rank=run.local_rank,
        exit_code=exit_code,
        signal=signal_name,
        stopped_by_us=run.stopped_by_us,
        killed_after_grace=run.killed_after_grace,
        started_at=run.started_at,
        ended_at=run.ended_at if run.has_ended else now,
        error=error,
        is_peer_loss=is_gang and _is_peer_loss(exit_code, error, job),
    )


def read_result(attempt_folder: Path) -> str | None:
    """How the training ended, as the trainer wrote it before teardown; None when it has not."""
    data = _read_start(attempt_folder / names.RESULT_FILE, _MAX_RESULT_BYTES)
    try:
        record = json.loads(data) if data else None
    except (ValueError, RecursionError):
        return None  # it is being written, or the job's own code wrote it
    word = record.get("outcome") if isinstance(record, dict) else None
    return word if isinstance(word, str) and word in RESULTS else None


def exhausted_shared_memory(reports: tuple[RankReport, ...]) -> int | None:
    """Size of shared memory in bytes, when a rank reads as having run out of it."""
    is_full = any(evidence.is_shared_memory_exhausted(report.error, report.signal) for report in reports)
    return size_bytes() if is_full else None


def port_failure(reports: tuple[RankReport, ...], port: int | None, now: float) -> NodeFailure | None:
    """A launch failure, when rank 0 could not listen on the port that we had reserved."""
    if port is None:
        return None
    for report in reports:
        if report.rank == 0 and evidence.is_port_taken(report.error, port):
            return NodeFailure(
                outcome=Outcome.LAUNCH_FAILED,
                message=f"The rendezvous port {port} was taken by another process before rank 0 could listen on it.",
                fix="Nothing in the job is wrong; it is started again on another port.",
                at=report.ended_at or now,
            )
    return None


def _is_peer_loss(exit_code: int | None, error: ErrorRecord | None, job: RunPlan) -> bool:
    """The trainer tells a lost peer from the user's own errors by the exception itself, which is better than texts."""
    if is_trainer(job) and exit_code in _TRAINER_CODES:
        return exit_code == TrainerExit.COMMUNICATION_ERROR
    return evidence.is_peer_loss(error)


def _error_of(rank: int, attempt_folder: Path) -> ErrorRecord | None:
    written = _read_start(attempt_folder / names.error_file(rank), _MAX_ERROR_FILE_BYTES)
    error = evidence.error_of_file(written) if written else None
    if error is not None:
        return error
    tail = _read_end(attempt_folder / names.log_file(rank), evidence.TAIL_BYTES)
    return evidence.error_of_log(tail) or evidence.error_of_abort(tail)


def _read_start(path: Path, num_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            return file.read(num_bytes)
    except OSError:
        return b""  # not written, or the job made something else of it: no evidence either way


def _read_end(path: Path, num_bytes: int) -> bytes:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - num_bytes))
            return file.read(num_bytes)
    except OSError:
        return b""
