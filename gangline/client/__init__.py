"""The Python client: `Client`, the records it answers with, and its errors.

Importing it is cheap: each name is loaded when it is first used (PEP 562), httpx and PyYAML when a request or a file
first needs them. Not for: the CLI's words and tables (`gangline.cli`), which are built on this.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gangline.client.client import Client
    from gangline.client.errors import (
        GanglineError,
        InvalidRequest,
        InvalidSpec,
        NotAllowed,
        NotFound,
        Refused,
        ServerFailed,
        TimedOut,
        Unreachable,
    )
    from gangline.client.log_models import Gap, LogLine, LogPage, Metrics, Series
    from gangline.client.models import (
        Attempt,
        AttemptNode,
        Cause,
        Checkpoint,
        EndedAttempt,
        Hold,
        Job,
        JobEvent,
        Me,
        Progress,
        Reason,
        Resources,
    )
    from gangline.client.pool_models import IdleHolder, Node, NodeGPU, Overview, Usage, UsageRow
    from gangline.client.queue_models import QueuedJob, QueuePage, StartRange, Why

__all__ = [
    "Attempt",
    "AttemptNode",
    "Cause",
    "Checkpoint",
    "Client",
    "EndedAttempt",
    "GanglineError",
    "Gap",
    "Hold",
    "IdleHolder",
    "InvalidRequest",
    "InvalidSpec",
    "Job",
    "JobEvent",
    "LogLine",
    "LogPage",
    "Me",
    "Metrics",
    "Node",
    "NodeGPU",
    "NotAllowed",
    "NotFound",
    "Overview",
    "Progress",
    "QueuePage",
    "QueuedJob",
    "Reason",
    "Refused",
    "Resources",
    "Series",
    "ServerFailed",
    "StartRange",
    "TimedOut",
    "Unreachable",
    "Usage",
    "UsageRow",
    "Why",
]

_HOMES = {
    "client": ("Client",),
    "errors": (
        "GanglineError",
        "InvalidRequest",
        "InvalidSpec",
        "NotAllowed",
        "NotFound",
        "Refused",
        "ServerFailed",
        "TimedOut",
        "Unreachable",
    ),
    "log_models": ("Gap", "LogLine", "LogPage", "Metrics", "Series"),
    "models": (
        "Attempt",
        "AttemptNode",
        "Cause",
        "Checkpoint",
        "EndedAttempt",
        "Hold",
        "Job",
        "JobEvent",
        "Me",
        "Progress",
        "Reason",
        "Resources",
    ),
    "pool_models": ("IdleHolder", "Node", "NodeGPU", "Overview", "Usage", "UsageRow"),
    "queue_models": ("QueuePage", "QueuedJob", "StartRange", "Why"),
}


def __getattr__(name: str) -> Any:
    for module, names in _HOMES.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{module}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
