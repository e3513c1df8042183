"""The policies by name: who of the waiting jobs starts next, and who is stopped for it. Pure.

A policy fills a `Pass`. To add one, write its file and name it here.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from service.scheduler.policies.fifo import fifo
from service.scheduler.policies.fifo_easy import fifo_easy
from service.scheduler.policies.time_left import time_left
from service.scheduler.scheduling_pass import Pass
from service.scheduler.world import BY_LEFT, BY_SUBMISSION


@dataclass(frozen=True, kw_only=True)
class Policy:
    """One policy."""

    name: str
    order: str
    """How the queue is ordered."""
    run: Callable[[Pass], None]
    meaning: str
    """One sentence for the documentation."""
    knows_standing: bool = True
    """Jobs within their team's quota go before jobs that borrow, where teams have quotas."""


POLICIES: Final[Mapping[str, Policy]] = {
    policy.name: policy
    for policy in (
        Policy(
            name="time-left",
            order=BY_LEFT,
            run=time_left,
            meaning="Jobs with the least time left go first; others are stopped for them where it pays.",
        ),
        Policy(
            name="fifo",
            order=BY_SUBMISSION,
            run=fifo,
            meaning="First come, first served; a job that does not fit lets smaller ones pass.",
        ),
        Policy(
            name="fifo+easy",
            order=BY_SUBMISSION,
            run=fifo_easy,
            meaning="First come, first served; others pass the first that does not fit only if they do not delay it.",
            knows_standing=False,
        ),
    )
}
DEFAULT_POLICY: Final = "time-left"
