"""Numbers, times and jobs in words. Pure: `now` is an argument.

Not for: colours or layout.
"""

from __future__ import annotations

import math
import re
from datetime import datetime
from typing import Any

from gangline.client.models import Job, Progress, Resources, Size, parse_number

NOTHING = "–"
MOST_PRIORITY = 100
"""The highest that is a number to its user; above it is only `top`."""
_UNITS = {"": 1.0, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86400.0, "w": 604800.0}
_DURATION = re.compile(r"(?:[0-9]+(?:\.[0-9]+)?\s*(?:s|min|m|h|d|w)\s*)+|[0-9]+(?:\.[0-9]+)?")
_DURATION_PART = re.compile(r"([0-9]+(?:\.[0-9]+)?)\s*(s|min|m|h|d|w)?")
_BLOCKS = " ▏▎▍▌▋▊▉█"


def parse_duration(text: str) -> float:
    """Seconds of `90`, `90s`, `5m`, `1h30m`, `2d`. Raises ValueError that says how to write one."""
    if not _DURATION.fullmatch(text.strip()):
        raise ValueError(f"{text!r} is not a duration; write it like 90s, 5m, 1h30m or 2d")
    return sum(float(number) * _UNITS[unit] for number, unit in _DURATION_PART.findall(text))


def duration(seconds: float) -> str:
    """`42s`, `3m05s`, `7h03m`, `2d04h`."""
    whole = max(0, round(seconds))
    if whole < 60:
        return f"{whole}s"
    if whole < 3600:
        return f"{whole // 60}m{whole % 60:02d}s"
    if whole < 86400:
        return f"{whole // 3600}h{whole % 3600 // 60:02d}m"
    return f"{whole // 86400}d{whole % 86400 // 3600:02d}h"


def local_time(at: datetime | None, now: datetime) -> str:
    """A time of day when it is today, else date and time; in the zone of `now`."""
    if at is None:
        return NOTHING
    there = at.astimezone(now.tzinfo)
    return there.strftime("%H:%M:%S" if there.date() == now.date() else "%Y-%m-%d %H:%M")


def size(num_bytes: float | None) -> str:
    """`512 MiB`, `31.3 GiB`."""
    if num_bytes is None:
        return NOTHING
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(num_bytes) < 1024:
            return f"{num_bytes:.0f} {unit}" if unit in ("B", "KiB") else f"{num_bytes:.1f} {unit}".replace(".0 ", " ")
        num_bytes /= 1024
    return f"{num_bytes:.1f} TiB"


def count(number: int, noun: str, plural: str = "") -> str:
    """`1 node`, `2 nodes`."""
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


def layout(job: Job) -> str:
    """Nodes × GPUs of each, as `2×8`; a dash while that is not decided."""
    size = _size_of(job)
    return NOTHING if size is None else f"{size.nodes}×{size.gpus_per_node}"


def gpu_number(job: Job) -> str:
    """How many GPUs it has (or had), or asks for: `16`, `2-8`."""
    size = _size_of(job)
    return gpu_range(job.resources.gpus, job.resources.min_gpus) if size is None else str(size.gpus)


def gpu_range(most: int, least: int | None) -> str:
    """`8`, or `2-8` of a job that runs on whatever number is free between the two."""
    return str(most) if least in (None, most) else f"{least}-{most}"


def _size_of(job: Job) -> Size | Resources | None:
    """What it runs or ran on; None for a job that may start on several sizes and does not run."""
    if job.resources.min_gpus is None:
        return job.resources
    return None if job.state == "waiting" else job.size


def bar(fraction: float, width: int = 9) -> str:
    """`████▏····` for a share of 0..1."""
    eighths = round(max(0.0, min(1.0, fraction)) * width * 8)
    full, rest = divmod(eighths, 8)
    return "█" * full + (_BLOCKS[rest] if rest else "") + "·" * (width - full - (1 if rest else 0))


def progress_cell(progress: Progress | None) -> str:
    """The progress column: a bar with per cent when the end is known, else the step or phase."""
    if progress is None:
        return NOTHING
    if progress.fraction is not None:
        return f"{bar(progress.fraction)} {progress.fraction * 100:.0f}%"
    if progress.step is not None:
        return f"step {progress.step}"
    return progress.phase or NOTHING


def metric(progress: Progress | None, name: str) -> str:
    """A metric's latest value, short; a non-finite one by name."""
    value = (progress.metrics if progress else {}).get(name)
    return NOTHING if value is None else metric_value(value)


def compact_number(value: float) -> str:
    """A number of about four digits: `1.108`, `23.9k`, `2.1e-05`."""
    if math.isnan(value):
        return "NaN"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    if size >= 1e15 or 0 < size < 1e-4:
        return f"{value:.2g}"
    for limit, letter in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e4, "k")):
        if size >= limit:
            return f"{value / (1e3 if letter == 'k' else limit):.3g}{letter}"
    if value == int(value):
        return str(int(value))
    return f"{value:.4g}"


def metric_value(value: Any) -> str:
    """A metric value as the wire carries it, short."""
    try:
        return compact_number(parse_number(value))
    except (TypeError, ValueError):
        return str(value)


def state_note(job: Job) -> str:
    """What a job that has no progress to show has to say for itself: its reason, or the cause of its end."""
    if job.reason is not None:
        return job.reason.text
    if job.state == "failed" and job.cause is not None:
        return job.cause.sentence
    return ""


def condition(state: str) -> str:
    """A state as the end of a sentence: `is running`, `has failed`, `was cancelled`."""
    return {"succeeded": "has succeeded", "failed": "has failed", "cancelled": "was cancelled"}.get(
        state, f"is {state}"
    )


def priority(number: int) -> str:
    """A priority as one would give it: `-50`, `7`, `top`."""
    return "top" if number > MOST_PRIORITY else str(number)


def gpus(job: Job) -> str:
    """`4 GPUs`, `2 × 8 GPUs`, with the type when one is asked for; `2 to 8 GPUs, now 2 × 2`."""
    asked = job.resources
    number = f"{asked.nodes} × {count(asked.gpus_per_node, 'GPU')}" if asked.nodes > 1 else count(asked.gpus, "GPU")
    if asked.min_gpus is not None:
        number = f"{asked.min_gpus} to {count(asked.gpus, 'GPU')}"
    number = f"{number} of {asked.gpu}" if asked.gpu else number
    if asked.min_gpus is None or job.size is None:
        return number
    return f"{number}, {'now' if job.attempt else 'last'} {job.size.nodes} × {job.size.gpus_per_node}"
