"""Waiting for a condition with a deadline: the one place in the tests that sleeps.

Not for: waiting a fixed time. A test that needs time to pass gives the code under test a clock.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Literal, TypeVar

T = TypeVar("T")

POLL_SECONDS = 0.02
BUSY_SECONDS = 60.0
"""What starts, ends or answers at once may take this long where other processes want the cores too. Only a test that
fails waits for the whole of it."""


def wait_until(
    condition: Callable[[], T | Literal[False] | None], timeout: float, message: str | Callable[[], str]
) -> T:
    """Call `condition` until it returns something true, and return that.

    `timeout` is in seconds. `message` says what was awaited; as a function it is called at the end, so that it can
    show the state reached. Raises TimeoutError with the message, the time waited and the last value. Exceptions of
    `condition` pass through: a condition that may fail for a while says so itself.
    """
    deadline = time.monotonic() + timeout
    while True:
        value = condition()
        if value:
            return value
        if time.monotonic() >= deadline:
            text = message if isinstance(message, str) else message()
            raise TimeoutError(f"{text}: not within {timeout:g} s (last value {value!r})")
        time.sleep(POLL_SECONDS)


def stays_true(condition: Callable[[], object], seconds: float, message: str | Callable[[], str]) -> None:
    """Check again and again, for `seconds`, that `condition` holds: for what must *not* happen meanwhile.

    Raises AssertionError with the message at the first look at which it does not hold.
    """
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if not condition():
            raise AssertionError(message if isinstance(message, str) else message())
        time.sleep(POLL_SECONDS)
