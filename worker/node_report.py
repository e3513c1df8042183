"""Builds the report of a node from its ranks and from the files they left. Reads files, sends nothing.

Not for: reading texts for errors (`worker.evidence`, pure).
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from gangline.protocol import names
from gangline.protocol.launch import ErrorRecord, NodeFailure, RankReport
from gangline.protocol.outcomes import Outcome
from worker import evidence

_MAX_ERROR_FILE_BYTES: Final = 1 << 20


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
    stopped_by_us: bool = False
    killed_after_grace: bool = False

    @property
    def has_ended(self) -> bool:
        """Whether its main process has ended and been reaped."""
        return self.status is not None

    @property
    def has_failed(self) -> bool:
        """Whether it ended by itself with anything but 0."""
        return self.status is not None and self.status != 0 and not self.stopped_by_us


def rank_report(run: RankRun, attempt_folder: Path, *, is_gang: bool, now: float) -> RankReport:
    """How a rank ended. Its error is looked for only when it failed. A rank alone (`is_gang` false) loses no peers."""
    exit_code, signal_name = (None, None) if run.status is None else evidence.exit_of(run.status)
    error = None if run.status in (None, 0) else _error_of(run.rank, attempt_folder)
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
        is_peer_loss=is_gang and evidence.is_peer_loss(error),
    )


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


def _error_of(rank: int, attempt_folder: Path) -> ErrorRecord | None:
    written = _read_start(attempt_folder / names.error_file(rank), _MAX_ERROR_FILE_BYTES)
    error = evidence.error_of_file(written) if written else None
    return error or evidence.error_of_log(_read_end(attempt_folder / names.log_file(rank), evidence.TAIL_BYTES))


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
