"""Progress of an attempt from the events its ranks report: latest values, rate and ETA. Pure.

Not for: the curves (`service.domain.metric_pyramid`).
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from typing import Any

from service.domain.text import UNSTORABLE

RATE_WEIGHT = 0.2
"""Weight of the newest step interval in the smoothed seconds per step."""


@dataclass(frozen=True, kw_only=True)
class Progress:
    """The latest progress of an attempt, as stored with it."""

    rank: int
    """The rank that reports: the lowest one that has reported a step or metric."""
    step: int | None = None
    total_steps: int | None = None
    phase: str | None = None
    checkpoint: str | None = None
    metrics: dict[str, float | str] = field(default_factory=dict)
    """Latest value by name; a value that is not finite is the string NaN, Infinity or -Infinity."""
    updated_at: float = 0.0
    step_at: float | None = None
    seconds_per_step: float | None = None

    def eta_seconds(self, now: float) -> float | None:
        """Seconds left by the smoothed rate, or None while there is none."""
        if self.step is None or self.total_steps is None or self.seconds_per_step is None:
            return None
        since = max(0.0, now - self.updated_at)
        return max(0.0, (self.total_steps - self.step) * self.seconds_per_step - since)

    def to_json(self) -> dict[str, Any]:
        """As stored."""
        return asdict(self)

    @classmethod
    def from_json(cls, data: dict[str, Any]) -> Progress:
        """From what `to_json` gave."""
        return cls(**data)


@dataclass(frozen=True, kw_only=True)
class ProgressEvent:
    """One line that a rank reported, checked."""

    rank: int
    at: float
    step: int | None
    total_steps: int | None
    phase: str | None
    checkpoint: str | None
    metrics: dict[str, float | str]


def advance(progress: Progress | None, event: ProgressEvent) -> Progress:
    """`progress` after `event`. The step never goes back; a higher rank than the reporting one is ignored."""
    if progress is None or event.rank < progress.rank:
        progress = Progress(rank=event.rank)
    elif event.rank > progress.rank:
        return progress
    changed = replace(
        progress,
        total_steps=event.total_steps if event.total_steps is not None else progress.total_steps,
        phase=event.phase or progress.phase,
        checkpoint=event.checkpoint or progress.checkpoint,
        metrics={**progress.metrics, **event.metrics},
        updated_at=max(event.at, progress.updated_at),
    )
    if event.step is None or (progress.step is not None and event.step <= progress.step):
        return changed
    return replace(changed, step=event.step, step_at=event.at, seconds_per_step=_rate(progress, event.step, event.at))


def known_metrics(progress: Progress | None, event: ProgressEvent, limit: int) -> dict[str, float | str]:
    """The metrics of `event` that keep an attempt within `limit` different names: all, or only names it has already."""
    known = progress.metrics if progress is not None and progress.rank <= event.rank else {}
    if len(known.keys() | event.metrics.keys()) <= limit:
        return event.metrics
    return {name: value for name, value in event.metrics.items() if name in known}


def _rate(progress: Progress, step: int, at: float) -> float | None:
    if progress.step is None or progress.step_at is None or at <= progress.step_at:
        return progress.seconds_per_step
    newest = (at - progress.step_at) / (step - progress.step)
    if progress.seconds_per_step is None:
        return newest
    return RATE_WEIGHT * newest + (1 - RATE_WEIGHT) * progress.seconds_per_step


MAX_METRICS = 100
MAX_NAME_LENGTH = 200
_NON_FINITE = frozenset({"NaN", "Infinity", "-Infinity"})


def parse_event(rank: int, data: Any) -> ProgressEvent | str:
    """A reported line as an event, or why it is refused. Never raises on what a job may write."""
    if not isinstance(data, dict) or data.get("kind") != "progress":
        return "not a progress record"
    metrics = data.get("metrics") or {}
    if not isinstance(metrics, dict) or len(metrics) > MAX_METRICS:
        return f"metrics must be an object of at most {MAX_METRICS} names"
    kept: dict[str, float | str] = {}
    for name, value in metrics.items():
        if not 0 < len(name) <= MAX_NAME_LENGTH:
            return f"a metric name has {len(name)} characters; it must have 1 to {MAX_NAME_LENGTH}"
        if UNSTORABLE.search(name):
            return f"the metric name {name[:50]!r} holds a character that cannot be stored"
        checked = _number(value)
        if checked is None:
            return f"metric {name[:50]!r} is not a number"
        kept[name] = checked
    at = _number(data.get("at"))
    return ProgressEvent(
        rank=rank,
        at=at if isinstance(at, float) else 0.0,
        step=_count(data.get("step")),
        total_steps=_count(data.get("total_steps")),
        phase=_text(data.get("phase")),
        checkpoint=_text(data.get("checkpoint")),
        metrics=kept,
    )


def _number(value: Any) -> float | str | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    if isinstance(value, str):
        return value if value in _NON_FINITE else None
    try:
        number = float(value)
    except OverflowError:
        return "Infinity" if value > 0 else "-Infinity"
    if number != number:
        return "NaN"
    if number in (float("inf"), float("-inf")):
        return "Infinity" if number > 0 else "-Infinity"
    return number


def _count(value: Any) -> int | None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 2**53:
        return None
    return value


def _text(value: Any) -> str | None:
    return UNSTORABLE.sub("\ufffd", value[:1000]) if isinstance(value, str) and value else None
