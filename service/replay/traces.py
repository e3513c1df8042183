"""A trace: the jobs that a cluster once ran, with what is known of each. Pure: text in, records out.

Not for: reading files (`service.replay.files`) or a server's history (`service.replay.history`).
"""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

REQUIRED_COLUMNS: Final = ("submit_s", "duration_s", "gpus")
MAX_GPUS: Final = 1_000_000
MAX_SECONDS: Final = 10**10
"""Three hundred years: above it a number is no length of time but a mistake."""
MAX_SHOWN_FAULTS: Final = 20


@dataclass(frozen=True, slots=True)
class TraceJob:
    """One job of a trace. Times are whole seconds; `submitted_at` counts from any moment that all jobs share."""

    row: int
    """Its index in the file from 0; what is drawn for it (limit, reports) is seeded by it."""
    job_id: str
    submitted_at: int
    duration: int
    """Seconds that it ran, or would run undisturbed."""
    gpus: int
    team: str = ""
    limit: int | None = None
    """Its recorded time limit in seconds; None where the source has none."""
    is_preemptible: bool | None = None
    """Whether it said that it resumes; None where the source does not tell."""
    reports: bool | None = None
    """Whether it reported its progress; None where the source does not tell."""


@dataclass(frozen=True)
class Trace:
    """All jobs of one source, in order of submission; those of one second in the order of the file."""

    name: str
    jobs: tuple[TraceJob, ...]

    @property
    def first_submission(self) -> int:
        """Of the earliest job."""
        return self.jobs[0].submitted_at

    @property
    def last_submission(self) -> int:
        """Of the latest job: the window of a trace ends there."""
        return self.jobs[-1].submitted_at

    @property
    def teams(self) -> tuple[str, ...]:
        """Names of all teams, sorted."""
        return tuple(sorted({job.team for job in self.jobs}))


class TraceFaults(ValueError):
    """What is wrong with a trace, all of it: one line each, with the place in the file."""

    def __init__(self, name: str, faults: Sequence[str], fix: str):
        shown = list(faults[:MAX_SHOWN_FAULTS])
        if len(faults) > len(shown):
            shown.append(f"… and {len(faults) - len(shown)} more")
        super().__init__("\n".join(f"{name}: {fault}" for fault in shown))
        self.faults = tuple(faults)
        self.fix = fix


def parse_trace(name: str, lines: Iterable[str]) -> Trace:
    """The jobs of a CSV text whose first line names the columns: at least submit_s, duration_s and gpus.

    `job_id`, `team` and `limit_s` are read where they are there; other columns are ignored. Seconds may have decimals
    and are rounded. Raises TraceFaults with every fault of the file.
    """
    reader = csv.DictReader(lines)
    columns = reader.fieldnames or ()
    missing = [column for column in REQUIRED_COLUMNS if column not in columns]
    if missing:
        raise TraceFaults(
            name,
            [f"line 1: there is no column {column}" for column in missing],
            f"the first line names the columns, of which {', '.join(REQUIRED_COLUMNS)} must be there",
        )
    faults: list[str] = []
    jobs = []
    for row, cells in enumerate(reader):
        reading = _Cells(cells, f"line {reader.line_num}", faults)
        submitted_at = reading.number("submit_s", 0, MAX_SECONDS)
        duration = reading.number("duration_s", 1, MAX_SECONDS)
        gpus = reading.number("gpus", 1, MAX_GPUS)
        limit = reading.number("limit_s", 1, MAX_SECONDS) if cells.get("limit_s") else None
        job_id, team = cells.get("job_id") or str(row), cells.get("team") or ""
        jobs.append(TraceJob(row, job_id, submitted_at, duration, gpus, team, limit))
    if not jobs and not faults:
        faults.append("it holds no jobs")
    if faults:
        raise TraceFaults(name, faults, "correct or remove these lines")
    return trace_of(name, jobs)


def trace_of(name: str, jobs: Sequence[TraceJob]) -> Trace:
    """A trace of at least one job, put in order."""
    return Trace(name, tuple(sorted(jobs, key=lambda job: job.submitted_at)))  # stable: file order within a second


class _Cells:
    """Reads the cells of one line; what is wrong with them is added to `faults`."""

    def __init__(self, cells: dict[str, str], place: str, faults: list[str]):
        self._cells = cells
        self._place = place
        self._faults = faults

    def number(self, column: str, least: int, most: int) -> int:
        """A whole number from `least` to `most`; `least` where there is none, which is then a fault."""
        text = (self._cells.get(column) or "").strip()
        try:
            number = round(float(text))
        except (ValueError, OverflowError):
            number = least - 1
        if least <= number <= most:
            return number
        self._faults.append(f"{self._place}: {column} is {text!r}; it takes a number from {least:,} to {most:,}")
        return least
