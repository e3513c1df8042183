"""Start ranges, what-ifs and quotas in words. Pure: `now` is an argument.

Not for: which command says them (`gang why`, `gang queue`, `gang check --when`).
"""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime

from gangline.cli.words import NOTHING, count, duration, gpu_range, local_time
from gangline.client.queue_models import BlockingJob, QuotaStanding, StartRange, StartVariant

SOON_SECONDS = 60.0
MAX_NAMED = 5


def start_sentence(start: StartRange, now: datetime) -> str:
    """`Starts in 40m00s to 3h10m, most likely after about 1h20m (16:20:00).`"""
    low, middle, high = start.low_seconds, start.p50_seconds, start.p90_seconds
    if low is None or middle is None or high is None:
        why = f": {start.why_unknown}" if start.why_unknown else "."
        return f"When it starts is unknown{why}"
    if high < SOON_SECONDS:
        return "Starts now."
    at = local_time(start.p50, now)
    return f"Starts {_from_to(low, high)}, most likely in about {duration(middle)} ({at})."


def start_cell(start: StartRange | None) -> str:
    """The same in a table: `now`, `40m00s–3h10m`."""
    if start is None:
        return NOTHING
    if start.low_seconds is None or start.p90_seconds is None:
        return "unknown"
    if start.p90_seconds < SOON_SECONDS:
        return "now"
    low = "now" if start.low_seconds < SOON_SECONDS else duration(start.low_seconds)
    return f"{low}–{duration(start.p90_seconds)}"


def _from_to(low: float, high: float) -> str:
    return f"within {duration(high)}" if low < SOON_SECONDS else f"in {duration(low)} to {duration(high)}"


def quota_lines(quota: QuotaStanding) -> Iterator[str]:
    """What the team and the user hold of what they may; nothing where there are no bounds."""
    if quota.quota_gpus is not None:
        yield f"Team {quota.team} holds {quota.held_gpus} of the {quota.quota_gpus} GPUs of its quota."
    if quota.quota_nodes is not None:
        yield f"Team {quota.team} holds {quota.held_nodes} of the {quota.quota_nodes} whole nodes of its quota."
    if quota.cap_gpus is not None:
        yield f"Team {quota.team} holds {quota.held_gpus} of at most {quota.cap_gpus} GPUs."
    if quota.user_cap_gpus is not None:
        yield f"Its owner holds {quota.user_held_gpus} of at most {quota.user_cap_gpus} GPUs."


def variant_line(variant: StartVariant) -> str:
    """A variant's sentence, with whom it would stop."""
    stops = f" It would stop {names(variant.would_stop)}." if variant.would_stop else ""
    return f"{variant.text}{stops}"


def names(jobs: tuple[BlockingJob, ...]) -> str:
    """`7 a (jun, 8 GPUs) and 3 more`."""
    shown = [blocking(job) for job in jobs[:MAX_NAMED]]
    if len(jobs) > MAX_NAMED:
        shown.append(f"{len(jobs) - MAX_NAMED} more")
    return ", ".join(shown)


def blocking(job: BlockingJob) -> str:
    """`7 a (jun, 8 GPUs)`; a private job of another team without its id and owner."""
    gpus = count(job.gpus, "GPU") if job.min_gpus is None else f"{gpu_range(job.gpus, job.min_gpus)} GPUs"
    facts = [word for word in (job.owner, gpus) if word]
    return f"{'' if job.id is None else f'{job.id} '}{job.name} ({', '.join(facts)})"
