"""Records about the queue: why a job waits, when it starts, all that wait. Frozen, with the field names of REST.

Not for: jobs themselves (`gangline.client.models`, whose `build` makes these too).
"""

from __future__ import annotations

from dataclasses import dataclass, field
from datetime import datetime
from typing import Any

from gangline.client.models import Reason


@dataclass(frozen=True, kw_only=True)
class BlockingJob:
    """A job that is ahead of a waiting one, or holds GPUs. A private job of another team shows neither id nor owner."""

    id: int | None = None
    name: str = ""
    owner: str | None = None
    state: str = ""
    gpus: int = 0
    """That it has, or waits for: at most, if there is a `min_gpus`."""
    min_gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class Ahead:
    """How many jobs are ahead in the queue, and the last few of them."""

    count: int = 0
    jobs: tuple[BlockingJob, ...] = ()


@dataclass(frozen=True, kw_only=True)
class StartRange:
    """When a waiting job starts: from `low` to `p90`, as likely before as after `p50`; all None where unknown."""

    low: datetime | None = None
    p50: datetime | None = None
    p90: datetime | None = None
    low_seconds: float | None = None
    p50_seconds: float | None = None
    p90_seconds: float | None = None
    why_unknown: str | None = None


@dataclass(frozen=True, kw_only=True)
class QuotaStanding:
    """What a team and a user hold of what they may hold, in GPUs and whole nodes; None: no bound."""

    team: str = ""
    held_gpus: int = 0
    quota_gpus: int | None = None
    held_nodes: int = 0
    quota_nodes: int | None = None
    cap_gpus: int | None = None
    user_held_gpus: int = 0
    user_cap_gpus: int | None = None


@dataclass(frozen=True, kw_only=True)
class StartVariant:
    """The same job asking for less, and when it would start. `kind`: `gpus`, `limit` or `gpu_type`."""

    kind: str
    value: str
    text: str = ""
    starts_in_seconds: float | None = None
    would_stop: tuple[BlockingJob, ...] = ()
    start: StartRange | None = None


@dataclass(frozen=True, kw_only=True)
class LimitAdvice:
    """What the user's own ended jobs say of the time limit asked for."""

    text: str
    limit_seconds: float
    used_share: float | None = None
    jobs: int = 0
    gained_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class Why:
    """Why a job is where it is."""

    id: int
    state: str
    reason: Reason | None = None
    ahead: Ahead = Ahead()
    holders: tuple[BlockingJob, ...] = ()
    """Some of the jobs that hold GPUs; empty where those are not what it waits for."""
    can_ever_start: bool | None = None
    """None of a job that does not wait."""
    estimated_start: datetime | None = None
    start: StartRange | None = None
    """None from a server that does not foretell, and of a job that does not wait."""
    position: int | None = None
    left_seconds: float | None = None
    quota: QuotaStanding | None = None
    variants: tuple[StartVariant, ...] = ()
    advice: LimitAdvice | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class QueuedJob:
    """A job of the queue. A private job of another team shows neither id nor owner."""

    id: int | None = None
    name: str = ""
    owner: str | None = None
    team: str = ""
    state: str = ""
    gpus: int = 0
    min_gpus: int | None = None
    position: int | None = None
    """From 1 in the order of the policy; None while something holds it back."""
    left_seconds: float | None = None
    """Of run that it is expected to need."""
    waiting_since: datetime | None = None
    reason: Reason | None = None
    start: StartRange | None = None
    """None beyond the first jobs of a page."""
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)


@dataclass(frozen=True, kw_only=True)
class QueuePage:
    """A part of the queue. `next`: the position to go on from."""

    policy: str = ""
    count: int = 0
    items: tuple[QueuedJob, ...] = ()
    next: int | None = None
    raw: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
