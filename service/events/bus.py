"""In-process wake-ups by topic: "look again", never data. Threads and async streams wait here for a commit.

A wake-up may be lost or come for nothing; every waiter looks at SQL again, and also after a timeout. Topics:
`job:<id>`, `attempt:<id>`, `directive:<attempt id>`, `log:<attempt id>`, `events:<job id>`, `schedule`, `outbox`.
"""

from __future__ import annotations

import asyncio
import threading
from collections import defaultdict
from collections.abc import Iterable


class Bus:
    """Publishes topics to waiting threads and coroutines."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._threads: dict[str, set[threading.Event]] = defaultdict(set)
        self._coroutines: dict[str, set[Subscription]] = defaultdict(set)
        self.is_closed = False

    def publish(self, topics: Iterable[str]) -> None:
        """Wake everybody who waits for one of `topics`. May be called from any thread."""
        with self._lock:
            events = {event for topic in topics for event in self._threads.get(topic, ())}
            subscriptions = {sub for topic in topics for sub in self._coroutines.get(topic, ())}
        for event in events:
            event.set()
        for subscription in subscriptions:
            subscription.wake_threadsafe()

    def thread_event(self, *topics: str) -> threading.Event:
        """An event that is set at each publish of `topics`; the caller clears it before it looks."""
        event = threading.Event()
        with self._lock:
            for topic in topics:
                self._threads[topic].add(event)
        return event

    def subscribe(self, *topics: str) -> Subscription:
        """A context manager for coroutines; wake-ups from its creation on are kept."""
        return Subscription(self, topics)

    def close(self) -> None:
        """Wake everybody for the last time: the process is stopping."""
        self.is_closed = True
        with self._lock:
            events = {event for waiting in self._threads.values() for event in waiting}
            subscriptions = {sub for waiting in self._coroutines.values() for sub in waiting}
        for event in events:
            event.set()
        for subscription in subscriptions:
            subscription.wake_threadsafe()

    def _add(self, subscription: Subscription) -> None:
        with self._lock:
            for topic in subscription.topics:
                self._coroutines[topic].add(subscription)

    def _remove(self, subscription: Subscription) -> None:
        with self._lock:
            for topic in subscription.topics:
                waiting = self._coroutines.get(topic)
                if waiting is not None:
                    waiting.discard(subscription)
                    if not waiting:
                        del self._coroutines[topic]


class Subscription:
    """One coroutine's interest in some topics."""

    def __init__(self, bus: Bus, topics: tuple[str, ...]):
        self.topics = topics
        self._bus = bus
        self._event = asyncio.Event()
        self._loop = asyncio.get_running_loop()

    def __enter__(self) -> Subscription:
        self._bus._add(self)
        return self

    def __exit__(self, *_: object) -> None:
        self._bus._remove(self)

    def wake_threadsafe(self) -> None:
        """Called by `publish`, from any thread."""
        try:
            self._loop.call_soon_threadsafe(self._event.set)
        except RuntimeError:
            # The loop is closed: nobody waits any more.
            return

    async def wait(self, timeout_seconds: float) -> bool:
        """Wait for a wake-up; False after the timeout or when the process is stopping."""
        try:
            await asyncio.wait_for(self._event.wait(), timeout_seconds)
        except TimeoutError:
            return False
        self._event.clear()
        return not self._bus.is_closed
