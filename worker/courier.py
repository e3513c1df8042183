"""The thread that sends everything a supervisor has to say: messages in order, stream bytes as they arrive, the end.

What is refused or unanswered is kept and tried again, with back-off; only `Fenced` ends the sending early. Not for:
what to say (`worker.supervisor`), or hearing what the server wants (`worker.directives`), though answers are passed on.
"""

from __future__ import annotations

import dataclasses
import random
import threading
import time
from collections.abc import Callable
from typing import Final

from gangline.protocol.launch import Directive, NodeReport
from worker.agent_log import log
from worker.api import Answered, AttemptApi, Fenced, Unavailable
from worker.mailbox import Mailbox
from worker.shipper import Shipper

FIRST_RETRY_SECONDS: Final = 0.2
LONGEST_RETRY_SECONDS: Final = 5.0
ACTIVE_POLL_SECONDS: Final = 0.02
"""Pause between looks at the files while there is output."""
QUIET_POLL_SECONDS: Final = 0.1
"""The pause it grows to while there is none."""
POLL_GROWTH: Final = 1.5
REFUSED_STORAGE_SECONDS: Final = 60.0
"""After this long of refused bytes the end is reported without them."""

_LOGGED_FAILURES: Final = frozenset((0, 5, 50, 500, 5000))
"""In a long outage not every try is worth a line."""

Message = Callable[[AttemptApi], Directive]


@dataclasses.dataclass(frozen=True, kw_only=True)
class FencedNotice:
    """The server answered that this attempt is over for it."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class DeliveredNotice:
    """The server has the final report."""


def retry_seconds(failures: int, chance: float) -> float:
    """Pause after `failures` (at least 1) in a row; `chance` in 0..1 spreads the supervisors of a pool. Pure."""
    longest: float = min(FIRST_RETRY_SECONDS * 2.0 ** min(failures - 1, 16), LONGEST_RETRY_SECONDS)
    return longest * (0.75 + 0.25 * chance)


def next_poll_seconds(current: float, *, was_active: bool) -> float:
    """Pause before the next look at the files: short after output, growing while there is none. Pure."""
    return ACTIVE_POLL_SECONDS if was_active else min(current * POLL_GROWTH, QUIET_POLL_SECONDS)


class Courier:
    """Owns the sending connection. `send`, `finish` and `wake` may be called from any thread."""

    def __init__(self, api: AttemptApi, shipper: Shipper, mailbox: Mailbox, *, gather_seconds: float) -> None:
        self._api = api
        self._shipper = shipper
        self._mailbox = mailbox
        self._gather_seconds = gather_seconds
        self._changed = threading.Condition()
        self._messages: list[tuple[str, Message]] = []
        self._final: NodeReport | None = None
        self._final_since = 0.0
        self._is_woken = False
        self._thread = threading.Thread(target=self._run, name="courier", daemon=True)

    @property
    def answered_at(self) -> float | None:
        """Monotonic time of sending of the last request that the API answered."""
        return self._api.connection.answered_at

    def start(self) -> None:
        """Begin to send. Ranks are best started before: forking a process that has threads is a risk to avoid."""
        self._thread.start()

    def send(self, name: str, message: Message) -> None:
        """Queue a message. Messages go in order, before the stream bytes that are not sent yet."""
        with self._changed:
            self._messages.append((name, message))
            self._is_woken = True
            self._changed.notify()

    def finish(self, report: NodeReport) -> None:
        """Send the rest of every stream, then the final report; `DeliveredNotice` follows."""
        with self._changed:
            self._final = report
            self._final_since = time.monotonic()
            self._is_woken = True
            self._changed.notify()

    # --- The thread --------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._send_until_the_end()
        except Fenced:
            self._mailbox.post(FencedNotice())
        except Exception as error:  # noqa: BLE001  # the main loop raises it: this thread's death must not go unseen
            self._mailbox.post(error)

    def _send_until_the_end(self) -> None:
        failures = 0
        poll = ACTIVE_POLL_SECONDS
        while True:
            num_bytes, is_refused = self._try(self._work, failures)
            if self._is_end_due() and self._try(self._send_end, failures) == (0, False):
                self._mailbox.post(DeliveredNotice())
                return
            if is_refused:
                failures += 1
                self._pause(retry_seconds(failures, random.random()), is_retry=True)
                continue
            failures = 0
            poll = next_poll_seconds(poll, was_active=num_bytes > 0)
            if self._final is None:
                self._pause(max(poll, self._gather_seconds) if num_bytes else poll, is_retry=False)
            elif not num_bytes:
                self._pause(ACTIVE_POLL_SECONDS, is_retry=False)

    def _try(self, work: Callable[[], tuple[int, bool]], failures: int) -> tuple[int, bool]:
        """Do it; what keeps us from it now (a refusal, no answer, a file that cannot be read) comes back as refused."""
        try:
            return work()
        except Fenced:
            raise
        except (Answered, Unavailable, OSError) as error:
            if failures in _LOGGED_FAILURES:
                log("send_failed", failures=failures + 1, error=error)
            return 0, True

    def _work(self) -> tuple[int, bool]:
        """One round: messages, then stream bytes. Returns (bytes sent, whether anything was refused)."""
        is_refused = False
        while self._messages:
            name, message = self._messages[0]
            try:
                directive = message(self._api)
            except Fenced:
                raise
            except Answered as error:
                log("message_refused", message=name, error=error)
                is_refused = True
                break  # the streams need not wait for it
            with self._changed:
                del self._messages[0]
            self._mailbox.post(directive)
        with self._changed:
            is_final = self._final is not None
        result = self._shipper.ship_round(is_final=is_final)
        if result.refusal is not None and not is_refused:
            raise result.refusal
        return result.num_bytes, is_refused or result.refusal is not None

    def _is_end_due(self) -> bool:
        """Whether the final report may go: everything before it was accepted, or has been refused for too long."""
        with self._changed:
            if self._final is None:
                return False
            is_late = time.monotonic() - self._final_since >= REFUSED_STORAGE_SECONDS
            return is_late or (not self._messages and self._shipper.is_all_sent())

    def _send_end(self) -> tuple[int, bool]:
        with self._changed:
            report = self._final
        if report is None:
            return 0, True
        self._api.ended(dataclasses.replace(report, sent_at=time.time()))
        return 0, False

    def _pause(self, seconds: float, *, is_retry: bool) -> None:
        with self._changed:
            if not self._is_woken:
                self._changed.wait(seconds)
            elif is_retry:
                # What woke us failed as well: without this a dead server would be asked without pause.
                self._is_woken = False
                self._changed.wait(seconds)
            self._is_woken = False
