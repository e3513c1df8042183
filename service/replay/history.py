"""The jobs that a server has run, as a trace: what `GET /jobs` tells of ended jobs. Pure.

Not for: asking the server (`service.replay.command`).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from gangline.protocol.outcomes import JobState
from service.replay.traces import Trace, TraceFaults, TraceJob, trace_of

NAME: Final = "history"
ENDED_STATES: Final = tuple(state for state in JobState if state.is_terminal)


def trace_of_history(items: Iterable[Mapping[str, Any]]) -> Trace:
    """Jobs that held GPUs and ended, as a trace; those that never started or had no GPU are left out.

    `items` are job objects of the REST interface. The run time is the time for which a job held its GPUs, all its
    attempts together. Raises TraceFaults when no job is left.
    """
    jobs: list[TraceJob] = []
    for item in sorted(items, key=lambda item: int(item["id"])):
        gpus = _gpus(item)
        held = float(item["cost"]["gpu_seconds"])
        if item["state"] not in ENDED_STATES or gpus == 0 or held <= 0.0:
            continue
        limit = item.get("limit_seconds")
        jobs.append(
            TraceJob(
                row=len(jobs),
                job_id=str(item["id"]),
                submitted_at=round(datetime.fromisoformat(item["submitted_at"]).timestamp()),
                duration=max(1, round(held / gpus)),
                gpus=gpus,
                team=str(item.get("team") or ""),
                limit=None if limit is None else max(1, round(limit)),
            )
        )
    if not jobs:
        raise TraceFaults(NAME, ["no job that held GPUs has ended yet"], "replay a trace file until some have")
    return trace_of(NAME, jobs)


def _gpus(item: Mapping[str, Any]) -> int:
    """What its last attempt had; what it asked for if that is not told."""
    size = item.get("size")
    return int((size or item["resources"])["gpus"])
