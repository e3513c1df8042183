"""Publishes the outbox: after a commit, one Celery message per hint, "look at attempt 17".

A hint may be lost, repeated or late: heartbeats carry the truth. So nothing here blocks a request: publishing has short
timeouts, no retry, and a circuit breaker; hints that have grown old are dropped.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from sqlalchemy import delete, select

from gangline.protocol.names import LAUNCH_TASK
from service import clock
from service.background import BackgroundThread
from service.db.session import Database
from service.db.tables import outbox
from service.errors import DatabaseUnavailable
from service.events.bus import Bus

log = logging.getLogger("gangline.dispatcher")

HINT_LIFE_SECONDS = 60.0
BREAKER_SECONDS = 2.0
BATCH = 200


@dataclass
class HintHealth:
    """Whether hints get through; read by `/readyz`, written by the dispatcher of the same process."""

    state: str = "elsewhere"
    """`ok`, `failing` (jobs start by heartbeat, later), `none` (no broker), `elsewhere` (sent by another process)."""
    num_published: int = 0
    num_failed: int = 0


class Dispatcher(BackgroundThread):
    """Runs in a thread: woken by the topic `outbox`, else once a tick. Without a broker it only clears the outbox."""

    def __init__(self, database: Database, bus: Bus, broker_url: str, health: HintHealth, *, tick_seconds: float = 5.0):
        super().__init__("dispatcher", bus.thread_event("outbox"))
        self._database = database
        self._broker_url = broker_url
        self._tick_seconds = tick_seconds
        self._celery: Any = None
        self._producer: Any = None
        self._closed_until = 0.0
        self._health = health
        health.state = "ok" if broker_url else "none"

    def run(self) -> None:
        """See `BackgroundThread`."""
        while not self._stopping.is_set():
            self._wake.clear()
            try:
                is_drained = self.publish_batch()
            except DatabaseUnavailable as error:
                log.warning("dispatch_skipped why=%s", error.detail)
                is_drained = True
            if is_drained:
                self._wake.wait(self._tick_seconds)
            elif self._closed_until > clock.monotonic():
                self._stopping.wait(BREAKER_SECONDS)

    def publish_batch(self) -> bool:
        """Publish what is in the outbox; True when nothing is left to do now."""
        with self._database.read() as connection:
            rows = connection.execute(select(outbox).order_by(outbox.c.id).limit(BATCH)).all()
            now = self._database.now(connection)
        if not rows:
            return True
        done: list[int] = []
        for row in rows:
            is_stale = now - row.created_at > HINT_LIFE_SECONDS
            if is_stale or not self._broker_url or self._publish(row.queue, row.attempt_id):
                done.append(row.id)
            else:
                break
        if done:
            with self._database.write() as tx:
                tx.connection.execute(delete(outbox).where(outbox.c.id.in_(done)))
        return len(done) == len(rows) and len(rows) < BATCH

    def _publish(self, queue: str, attempt_id: int) -> bool:
        from kombu.exceptions import KombuError, OperationalError

        if clock.monotonic() < self._closed_until:
            return False
        try:
            if self._celery is None:
                self._celery = make_producer_app(self._broker_url)
                self._producer = self._celery.amqp.Producer(self._celery.connection_for_write())
            self._celery.send_task(
                LAUNCH_TASK,
                args=[attempt_id],
                queue=queue,
                expires=HINT_LIFE_SECONDS,
                ignore_result=True,
                retry=False,
                producer=self._producer,
            )
        except (OperationalError, KombuError, OSError) as error:
            self._health.num_failed += 1
            self._health.state = "failing"
            self._closed_until = clock.monotonic() + BREAKER_SECONDS
            self._celery = self._producer = None
            log.warning("hint_not_sent attempt_id=%s queue=%s why=%s", attempt_id, queue, str(error)[:200])
            return False
        self._health.num_published += 1
        self._health.state = "ok"
        return True


def make_producer_app(broker_url: str) -> Any:
    """A Celery app that only sends: JSON, no results, 2 s timeouts."""
    from celery import Celery

    app = Celery("gangline", broker=broker_url, set_as_current=False)
    app.conf.update(
        task_serializer="json",
        accept_content=["json"],
        task_ignore_result=True,
        result_backend=None,
        task_create_missing_queues=True,
        broker_connection_max_retries=0,
        broker_transport_options={
            "ack_emulation": False,
            "socket_connect_timeout": 1,
            "socket_timeout": 2,
            "max_retries": 0,
        },
    )
    return app
