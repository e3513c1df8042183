"""A carrier of hints that cannot be trusted: it takes them from the service and delivers them thrice, or never.

Between the two it is the only way, so nothing reaches an agent but what it delivers. Not for: content; messages are
carried as they are.
"""

from __future__ import annotations

import contextlib
import threading
from types import TracebackType

import redis

from gangline.protocol.names import node_queue
from tests.support.redis import RedisServer

COPIES = 3
LOST_IN = 4
"""Every fourth hint is never delivered."""


class Tamperer:
    """Carries hints from `source` to `target`. Use as a context manager."""

    def __init__(self, source: RedisServer, target: RedisServer, node_names: list[str]) -> None:
        self.num_taken = 0
        self.num_lost = 0
        self.error: Exception | None = None
        self._source = source
        self._target = target
        self._queues = [node_queue(name) for name in node_names]
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="tamperer", daemon=True)

    def __enter__(self) -> Tamperer:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stopping.set()
        self._thread.join()
        if self.error is not None and kind is None:
            raise self.error

    def _run(self) -> None:
        try:
            while not self._stopping.is_set():
                # A Redis that was killed, on either side, costs hints and nothing else.
                with contextlib.suppress(redis.ConnectionError, redis.TimeoutError):
                    self._carry_one()
        except Exception as error:  # noqa: BLE001  # handed to the test's thread
            self.error = error

    def _carry_one(self) -> None:
        with redis.Redis.from_url(self._source.client_url, socket_timeout=5) as source:
            taken = source.brpop(self._queues, timeout=1)
        if taken is None:
            return
        queue, message = taken
        self.num_taken += 1
        if self.num_taken % LOST_IN == 0:
            self.num_lost += 1
            return
        with redis.Redis.from_url(self._target.client_url, socket_timeout=5) as target:
            target.lpush(queue, *[message] * COPIES)
