"""The jobs that a server has run, as a trace, and its pool: what `GET /jobs` and `GET /nodes` tell. Pure.

Not for: asking the server (`service.replay.command`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from datetime import datetime
from typing import Any, Final

from gangline.protocol.outcomes import JobState
from service.domain.states import NodeState
from service.replay.pool_size import PoolShape
from service.replay.traces import Trace, TraceFaults, TraceJob, trace_of

NAME: Final = "history"
RECORDED_KEYS: Final = ("limit_seconds", "preemptible", "reports_progress")
"""What is taken as it was, of each job."""
ENDED_STATES: Final = tuple(state for state in JobState if state.is_terminal)


def trace_of_history(items: Iterable[Mapping[str, Any]]) -> Trace:
    """Jobs that held GPUs and ended, as a trace; those that never started or had no GPU are left out.

    `items` are job objects of the REST interface. The run time is the time for which a job held its GPUs, all its
    attempts together. Raises TraceFaults when no job is left, and for a server that does not tell all that is needed.
    """
    items = list(items)
    _check_keys(items)
    jobs: list[TraceJob] = []
    for item in sorted(items, key=lambda item: int(item["id"])):
        gpus = _gpus(item)
        held = float(item["cost"]["gpu_seconds"])
        if item["state"] not in ENDED_STATES or gpus == 0 or held <= 0.0:
            continue
        limit = item["limit_seconds"]
        jobs.append(
            TraceJob(
                row=len(jobs),
                job_id=str(item["id"]),
                submitted_at=round(datetime.fromisoformat(item["submitted_at"]).timestamp()),
                duration=max(1, round(held / gpus)),
                gpus=gpus,
                team=str(item.get("team") or ""),
                limit=None if limit is None else max(1, round(limit)),
                is_preemptible=item["preemptible"],
                reports=item["reports_progress"],
            )
        )
    if not jobs:
        raise TraceFaults(NAME, ["no job that held GPUs has ended yet"], "replay a trace file until some have")
    return trace_of(NAME, jobs)


def pool_of_nodes(items: Iterable[Mapping[str, Any]]) -> PoolShape:
    """The pool as its nodes tell it: all that have GPUs, cordoned and unreachable ones too, but none that left.

    `items` are node objects of the REST interface. Raises TraceFaults when no such node is there.
    """
    sizes = Counter(len(item["gpus"]) for item in items if item["state"] != NodeState.LOST and item["gpus"])
    if not sizes:
        raise TraceFaults(NAME, ["the pool has no node with GPUs now"], "give --nodes and --gpus-per-node")
    return PoolShape(sizes=tuple(sorted(sizes.items(), reverse=True)))


def _check_keys(items: Iterable[Mapping[str, Any]]) -> None:
    missing = sorted({key for item in items for key in RECORDED_KEYS if key not in item})
    if missing:
        raise TraceFaults(
            NAME,
            [f"the server does not tell {' and '.join(missing)} of its jobs"],
            "bring the server up to the version of this command: gang --version",
        )


def _gpus(item: Mapping[str, Any]) -> int:
    """What its last attempt had; what it asked for if that is not told."""
    size = item.get("size")
    return int((size or item["resources"])["gpus"])
