"""Acting on several things one after another: one that fails keeps none of the others from being done.

Not for: what a command does with one of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

from gangline.cli import exit_codes
from gangline.cli.errors import error_lines
from gangline.cli.session import Session
from gangline.client.errors import GanglineError, Unreachable
from gangline.client.models import Job
from gangline.protocol.outcomes import ExitCode

T = TypeVar("T")
R = TypeVar("R")


class Failures:
    """What went wrong, one by one, and the exit code that follows from it."""

    def __init__(self) -> None:
        self.errors: list[GanglineError] = []

    def each(self, items: Iterable[T], act: Callable[[T], R]) -> list[R]:
        """`act` on each item; returns what came of those that it worked for. The errors of the others are kept.

        A server that does not answer is not asked again for the rest: that is raised if it was the first to fail and
        nothing was done, else kept, with what was not tried.
        """
        done: list[R] = []
        left = list(items)
        while left:
            item = left.pop(0)
            try:
                done.append(act(item))
            except Unreachable as error:
                if not done and not self.errors:
                    raise
                self.errors.append(error)
                if left:
                    names = ", ".join(str(one.id if isinstance(one, Job) else one) for one in left)
                    self.errors.append(Unreachable(f"not tried: {names}"))
                break
            except GanglineError as error:
                self.errors.append(error)
        return done

    def print_json(self, session: Session, answers: Sequence[dict[str, Any]]) -> None:
        """What there is of those that it worked for: one alone as itself, else a list; nothing of none."""
        if answers:
            session.json(answers[0] if len(answers) == 1 and not self.errors else {"items": answers})

    def tell(self, session: Session) -> ExitCode:
        """Print the failures; the exit code is that of the first, 0 if there is none."""
        # What is wrong with all of them, such as a token, is said once.
        for lines in dict.fromkeys("\n".join(error_lines(error)) for error in self.errors):
            session.note(lines)
        return exit_codes.of_error(self.errors[0]) if self.errors else ExitCode.DONE
