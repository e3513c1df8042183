"""The sweeper: silent nodes, unclaimed allocations, starts and stops past their deadline, cordons past their end.

It also asks what gives way to leave draining nodes, and tells of jobs that hold GPUs without using them.

Time is counted only while this process watches and an API answers: their downtime, or the database's, is never held
against a node, a start or a stop.
Each row is swept in a transaction of its own, so that a poisoned one cannot hold up the others.
"""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from sqlalchemy import Row, select, update
from sqlalchemy.exc import SQLAlchemyError

from gangline.protocol.outcomes import JobState, StopIntent
from service import clock
from service.background import BackgroundThread
from service.db.leadership import LostLeadership, assert_leader
from service.db.session import Database, Write
from service.db.tables import attempt_nodes, attempts, jobs, nodes
from service.db.transitions import StaleTransition, add_event, move_node
from service.domain.reasons import Reason, ReasonCode
from service.domain.silence import SilenceWatch, Verdict
from service.domain.spec import JobSpec
from service.domain.states import AttemptNodeState, AttemptState, NodeState
from service.errors import DatabaseUnavailable
from service.operations.api_presence import is_api_present
from service.operations.cordon_node import end_overdue_cordon
from service.operations.drain_node import load_in_the_way, stop_for_drain
from service.operations.find_idle_holders import IdleHolder, load_idle_holders, tell_idle_holder
from service.operations.force_close import force_close
from service.operations.job_lock import lock_job_of
from service.operations.lose_node import lose_node
from service.operations.settle_attempt import decide, end_attempt_node, load_endings, settle_attempt
from service.operations.stop_attempt import stop_attempt
from service.settings import Settings, unreachable_seconds

log = logging.getLogger("gangline.sweeper")

POISONED = (SQLAlchemyError, ValueError, KeyError, TypeError, AttributeError)
"""What a row that was damaged by hand may raise when it is looked at."""
IDLE_LOOK_SECONDS = 15.0
"""Between looks for jobs that hold GPUs without using them."""
MAX_FAILURES = 5
"""Sweeps of one attempt that may fail before it is closed by force."""


class Sweeper(BackgroundThread):
    """Repeats `sweep` in a thread."""

    def __init__(self, database: Database, settings: Settings, epoch: int):
        super().__init__("sweeper")
        self.database = database
        self.settings = settings
        self.epoch = epoch
        self.watch = SilenceWatch(
            unreachable_seconds=settings.unreachable_seconds,
            lost_seconds=settings.lost_seconds,
            mass_silence_seconds=settings.mass_silence_seconds,
            largest_gap_seconds=settings.sweep_seconds * 3,
        )
        self.failures: dict[int, int] = {}
        """How often each attempt could not be swept, by id."""
        self._idle_look_due_at = 0.0
        self._told_idle: set[int] = set()
        """Idle attempts that need not be told of again, as of the last look."""
        self._swept_at: float | None = None
        self._swept_now = 0.0
        self._up_since = 0.0
        """Database time since which there was no gap: deadlines count from here at the earliest."""

    def run(self) -> None:
        """See `BackgroundThread`."""
        while not self._stopping.wait(self.settings.sweep_seconds):
            try:
                self.sweep(clock.monotonic())
            except LostLeadership:
                log.warning("leadership_lost epoch=%s", self.epoch)
                return
            except DatabaseUnavailable as error:
                log.warning("sweep_skipped why=%s", error.detail)
                self.watch.forget_time()
                self._swept_at = None
            except Exception:
                # What no guard foresaw must not end sweeping for everybody; the trace names it.
                log.exception("sweep_failed")

    def sweep(self, monotonic_now: float) -> None:
        """One sweep. Raises LostLeadership, DatabaseUnavailable."""
        with self.database.read() as connection:
            now = self.database.now(connection)
            known = connection.execute(select(nodes).where(nodes.c.last_heartbeat_at.is_not(None))).all()
            open_attempts = connection.execute(
                select(attempts).where(attempts.c.state != AttemptState.ENDED).order_by(attempts.c.id)
            ).all()
            is_up = self.database.is_sqlite or is_api_present(connection, now, self.watch.largest_gap_seconds)
            overdue = connection.execute(select(nodes).where(nodes.c.cordon_until <= now)).all()
            in_the_way = load_in_the_way(connection, now, self.settings)
        self._note_gap(now, monotonic_now, is_up)
        self._sweep_nodes(known, monotonic_now)
        for node in overdue:
            self._guarded(partial(end_overdue_cordon, node=node), f"node {node.name}")
        for attempt in in_the_way:
            self._clear_the_way(attempt)
        for attempt in open_attempts:
            self._sweep_attempt(attempt, now)
        if monotonic_now >= self._idle_look_due_at:
            self._idle_look_due_at = monotonic_now + IDLE_LOOK_SECONDS
            self._look_for_idle_holders()

    def _clear_the_way(self, attempt: Row[Any]) -> None:
        leave = partial(stop_for_drain, attempt=attempt, actor="service", settle_seconds=self.settings.settle_seconds)
        try:
            self._guarded(leave, f"attempt {attempt.id}")
        except POISONED:
            log.exception("drain_failed attempt_id=%s", attempt.id)

    def _look_for_idle_holders(self) -> None:
        with self.database.read() as connection:
            found = load_idle_holders(connection, least_seconds=self.settings.idle_holder_seconds)
        for holder in found:
            if holder.holding.attempt_id in self._told_idle:
                continue
            self._guarded(partial(_tell_idle, holder=holder), f"attempt {holder.holding.attempt_id}")
        self._told_idle = {holder.holding.attempt_id for holder in found}

    def _note_gap(self, now: float, monotonic_now: float, is_up: bool) -> None:
        """Heartbeats, claims and reports could not arrive while nobody listened: begin to count anew."""
        passed = 0.0 if self._swept_at is None else monotonic_now - self._swept_at
        has_paused = self._swept_at is None or passed > self.watch.largest_gap_seconds
        # The database clock was set: what it says of times before is worth nothing.
        has_jumped = abs(now - self._swept_now - passed) > self.watch.largest_gap_seconds
        if has_paused or has_jumped or not is_up:
            self._up_since = now
        if not is_up:
            self.watch.forget_time()
        self._swept_at, self._swept_now = monotonic_now, now

    def _sweep_nodes(self, known: Sequence[Row[Any]], monotonic_now: float) -> None:
        self.watch.unreachable_seconds = unreachable_seconds(self.settings, len(known))
        verdicts = self.watch.observe({node.id: node.last_heartbeat_at for node in known}, monotonic_now)
        for node in known:
            try:
                self._sweep_node(node, verdicts[node.id])
            except POISONED:
                log.exception("node_not_swept node=%s", node.name)

    def _sweep_node(self, node: Row[Any], verdict: Verdict) -> None:
        if verdict is Verdict.UNREACHABLE and node.state == NodeState.READY:
            self._guarded(partial(_mark_unreachable, node=node), f"node {node.name}")
        elif verdict is Verdict.LOST and node.state == NodeState.UNREACHABLE:
            why = f"no heartbeat for {self.settings.lost_seconds:g} s"
            self._guarded(partial(lose_node, node=node, why=why), f"node {node.name}")

    def _sweep_attempt(self, attempt: Row[Any], now: float) -> None:
        try:
            self._guarded(partial(self._look_at, attempt=attempt, now=now), f"attempt {attempt.id}")
            self.failures.pop(attempt.id, None)
        except POISONED as error:
            self.failures[attempt.id] = self.failures.get(attempt.id, 0) + 1
            log.exception("reconcile_failed attempt_id=%s times=%s", attempt.id, self.failures[attempt.id])
            if self.failures[attempt.id] >= MAX_FAILURES:
                self._guarded(partial(force_close, attempt=attempt, why=str(error)), f"attempt {attempt.id}")

    def _guarded(self, change: Callable[[Write], None], what: str) -> None:
        try:
            with self.database.write() as tx:
                assert_leader(tx, self.epoch)
                change(tx)
        except StaleTransition as stale:
            log.info("sweep_superseded what=%s why=%s", what, stale)

    def _look_at(self, tx: Write, attempt: Row[Any], now: float) -> None:
        lock_job_of(tx, attempt.id)
        if attempt.state == AttemptState.STOPPING:
            self._look_at_stopping(tx, attempt, now)
        elif attempt.state in (AttemptState.ALLOCATED, AttemptState.LAUNCHING):
            self._look_at_starting(tx, attempt, now)

    def _look_at_starting(self, tx: Write, attempt: Row[Any], now: float) -> None:
        age = now - (max(attempt.created_at, self._up_since) if attempt.created_at <= now else self._up_since)
        if age > self.settings.start_seconds:
            self._give_up_start(tx, attempt, f"not all ranks were started within {self.settings.start_seconds:g} s")
        elif age > self.settings.claim_seconds:
            unclaimed = tx.connection.execute(
                select(nodes)
                .join(attempt_nodes, attempt_nodes.c.node_id == nodes.c.id)
                .where(
                    attempt_nodes.c.attempt_id == attempt.id,
                    attempt_nodes.c.state == AttemptNodeState.ALLOCATED,
                )
            ).all()
            if unclaimed:
                names = ", ".join(node.name for node in unclaimed)
                self._give_up_start(
                    tx, attempt, f"{names} did not claim its part within {self.settings.claim_seconds:g} s"
                )

    def _give_up_start(self, tx: Write, attempt: Row[Any], detail: str) -> None:
        stop_attempt(
            tx,
            attempt.id,
            StopIntent.START_DEADLINE,
            detail=detail,
            settle_seconds=self.settings.settle_seconds,
        )

    def _look_at_stopping(self, tx: Write, attempt: Row[Any], now: float) -> None:
        rows = tx.connection.execute(
            select(attempt_nodes, nodes.c.name.label("node_name"), nodes.c.state.label("node_state"))
            .join(nodes, nodes.c.id == attempt_nodes.c.node_id, isouter=True)
            .where(attempt_nodes.c.attempt_id == attempt.id, attempt_nodes.c.state != AttemptNodeState.ENDED)
        ).all()
        for row in rows:
            if row.node_name is None:
                end_attempt_node(tx, row, report=None, is_lost=True)
        settle_attempt(tx, attempt.id)
        silent = [row.node_name for row in rows if row.node_state in (NodeState.UNREACHABLE, NodeState.LOST)]
        if silent:
            _tell_unconfirmed(tx, attempt, silent)
        is_overdue = attempt.settle_at is not None and now > attempt.settle_at
        if rows and is_overdue and now - self._up_since > self.settings.settle_seconds and attempt.cause is None:
            _fix_outcome(tx, attempt)


def _tell_idle(tx: Write, holder: IdleHolder) -> None:
    tell_idle_holder(tx, holder)


def _mark_unreachable(tx: Write, node: Row[Any]) -> None:
    move_node(tx, node.id, NodeState.UNREACHABLE, name=node.name, text=f"{node.name} missed its heartbeats.")


def _tell_unconfirmed(tx: Write, attempt: Row[Any], silent: list[str]) -> None:
    names = ", ".join(silent)
    reason = Reason(
        code=ReasonCode.STOP_UNCONFIRMED,
        text=f"Node {names} does not answer, so it is not known whether the job has stopped there.",
        fix=f"It ends when the node answers again. An admin who knows that it is off: gang node release {silent[0]}.",
    )
    text = json.dumps(reason.to_json(), ensure_ascii=False)
    changed = tx.connection.execute(
        update(jobs)
        .where(
            jobs.c.id == attempt.job_id,
            jobs.c.state == JobState.STOPPING,
            jobs.c.reason.is_(None) | (jobs.c.reason != text),
        )
        .values(reason=text, version=jobs.c.version + 1)
    )
    if changed.rowcount:
        add_event(tx, "stop_unconfirmed", actor="service", job_id=attempt.job_id, text=reason.text)
        tx.wake(f"job:{attempt.job_id}")


def _fix_outcome(tx: Write, attempt: Row[Any]) -> None:
    """The settle deadline passed: the outcome is fixed from what is known; the attempt still waits for its nodes."""
    spec = JobSpec.from_json(tx.connection.execute(select(jobs.c.spec).where(jobs.c.id == attempt.job_id)).scalar_one())
    cause = decide(attempt, load_endings(tx, attempt.id), spec)
    fixed = {**dataclasses.asdict(cause), "error": None}
    tx.connection.execute(
        update(attempts).where(attempts.c.id == attempt.id).values(cause=json.dumps({"fixed": fixed}))
    )
    add_event(
        tx,
        "outcome_fixed",
        actor="service",
        job_id=attempt.job_id,
        attempt_number=attempt.number,
        text=f"Not all nodes reported in time; the outcome is {cause.outcome}.",
    )
