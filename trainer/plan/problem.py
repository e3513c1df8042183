"""What is wrong with a plan: all problems at once, each with the key it is about and what to write instead. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class PlanProblem:
    """One thing that keeps a plan from running."""

    key: str
    """Key of the job file it is about, such as `parallel.strategy`."""
    message: str
    """What is wrong, with the values; completes the sentence "<key> …"."""
    fix: str


class PlanError(ValueError):
    """The plan cannot run; `problems` says all that is wrong."""

    def __init__(self, problems: Iterable[PlanProblem]) -> None:
        self.problems = tuple(problems)
        super().__init__("; ".join(f"{one.key} {one.message} {one.fix}" for one in self.problems))
