"""What a supervisor reports of its part of an attempt: rendezvous, started, failing, ended; and the directive it gets.

Every report carries the claim token; `open_part` refuses the stale ones inside the same transaction as the effect.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from typing import Any

from sqlalchemy import Connection, Row, bindparam, func, select, update

from gangline.protocol.launch import Directive, NodeReport, Rendezvous, StopOrder
from gangline.protocol.outcomes import JobState, Outcome, StopIntent
from service.auth.tokens import hash_token
from service.db.session import Database, Write
from service.db.tables import attempt_nodes, attempts, jobs, nodes
from service.db.transitions import add_event, move_attempt, move_attempt_node, move_job
from service.domain.states import AttemptNodeState, AttemptState, NodeState
from service.errors import AttemptFenced, NotFound, Unauthorized
from service.operations.job_lock import lock_job_of
from service.operations.lose_node import lose_node
from service.operations.settle_attempt import end_attempt_node, settle_attempt
from service.operations.stop_attempt import stop_attempt
from service.settings import Settings


@dataclass(frozen=True, kw_only=True)
class Part:
    """One node's part of an attempt, named by its path and proved by its claim token."""

    attempt_id: int
    node_rank: int
    token: str


_PART = select(attempt_nodes).where(
    attempt_nodes.c.attempt_id == bindparam("attempt_id"), attempt_nodes.c.node_rank == bindparam("node_rank")
)
_ATTEMPT = (
    select(attempts, jobs.c.limit_seconds)
    .join(jobs, jobs.c.id == attempts.c.job_id)
    .where(attempts.c.id == bindparam("attempt_id"))
)


def open_part(connection: Connection, part: Part, *, allow_ended: bool = False) -> Row[Any]:
    """The attempt-node row. Raises NotFound, Unauthorized (wrong token), AttemptFenced (over for this node)."""
    row = connection.execute(_PART, {"attempt_id": part.attempt_id, "node_rank": part.node_rank}).one_or_none()
    if row is None:
        raise NotFound(f"attempt {part.attempt_id} has no node rank {part.node_rank}")
    if row.token_hash is None or not hmac.compare_digest(row.token_hash, hash_token(part.token)):
        raise Unauthorized(f"this token did not claim node rank {part.node_rank} of attempt {part.attempt_id}")
    if row.state == AttemptNodeState.ENDED and not (allow_ended and not row.is_lost):
        raise AttemptFenced(f"attempt {part.attempt_id} is over for node rank {part.node_rank}")
    return row


def read_directive(connection: Connection, part: Part) -> Directive:
    """What the API wants of this supervisor now."""
    open_part(connection, part)
    row = connection.execute(_ATTEMPT, {"attempt_id": part.attempt_id}).one()
    stop = None
    if row.state == AttemptState.STOPPING and row.stop_intent:
        stop = StopOrder(intent=row.stop_intent, grace_seconds=row.stop_grace_seconds)
    rendezvous = None
    if row.rendezvous_address is not None:
        rendezvous = Rendezvous(address=row.rendezvous_address, port=row.rendezvous_port)
    return Directive(
        version=row.directive_version, stop=stop, rendezvous=rendezvous, time_limit_seconds=row.limit_seconds
    )


def report_rendezvous(database: Database, part: Part, *, address: str, port: int) -> Directive:
    """Node rank 0 tells where rank 0 will listen; the other nodes' supervisors are woken."""
    with database.write() as tx:
        open_part(tx.connection, part)
        tx.connection.execute(
            update(attempts)
            .where(attempts.c.id == part.attempt_id, attempts.c.state != AttemptState.ENDED)
            .values(
                rendezvous_address=address,
                rendezvous_port=port,
                directive_version=attempts.c.directive_version + 1,
            )
        )
        tx.wake(f"directive:{part.attempt_id}")
        return read_directive(tx.connection, part)


def report_started(database: Database, part: Part, *, sent_at: float) -> Directive:
    """All ranks of this node run. The attempt is running once every node has said so. Idempotent."""
    with database.write() as tx:
        lock_job_of(tx, part.attempt_id)
        row = open_part(tx.connection, part)
        if row.state == AttemptNodeState.CLAIMED:
            move_attempt_node(
                tx,
                row.id,
                AttemptNodeState.STARTED,
                columns={"started_at": tx.now, "clock_offset_seconds": tx.now - sent_at},
            )
            _run_if_all_started(tx, part.attempt_id)
        return read_directive(tx.connection, part)


def _run_if_all_started(tx: Write, attempt_id: int) -> None:
    attempt = tx.connection.execute(select(attempts).where(attempts.c.id == attempt_id).with_for_update()).one()
    num_missing = tx.connection.execute(
        select(func.count())
        .select_from(attempt_nodes)
        .where(
            attempt_nodes.c.attempt_id == attempt_id,
            attempt_nodes.c.state.in_([AttemptNodeState.ALLOCATED, AttemptNodeState.CLAIMED]),
        )
    ).scalar_one()
    if num_missing or attempt.state != AttemptState.LAUNCHING:
        return
    job = tx.connection.execute(select(jobs.c.started_at, jobs.c.state).where(jobs.c.id == attempt.job_id)).one()
    if job.state != JobState.STARTING:
        return
    move_attempt(tx, attempt_id, AttemptState.RUNNING, columns={"running_at": tx.now})
    move_job(
        tx,
        attempt.job_id,
        JobState.RUNNING,
        actor="node",
        text=f"All ranks of attempt {attempt.number} run.",
        attempt_number=attempt.number,
        columns={"started_at": job.started_at or tx.now},
    )
    tx.wake(f"log:{attempt_id}")


def report_failing(database: Database, settings: Settings, part: Part, report: NodeReport) -> Directive:
    """The first failure on a node: the peers are told to stop at once; the outcome is decided when all have ended."""
    with database.write() as tx:
        lock_job_of(tx, part.attempt_id)
        row = open_part(tx.connection, part)
        _note_clock(tx, row, report)
        _stop_peers(tx, settings, row, report)
    if any(rank.is_peer_loss for rank in report.ranks):
        with database.write() as tx:
            _lose_unreachable_peers(tx, part.attempt_id)
    with database.read() as connection:
        return read_directive(connection, part)


def report_ended(database: Database, settings: Settings, part: Part, report: NodeReport) -> None:
    """The end of the attempt on this node: its process set is empty. Sending it again changes nothing."""
    with database.write() as tx:
        lock_job_of(tx, part.attempt_id)
        row = open_part(tx.connection, part, allow_ended=True)
        if row.state == AttemptNodeState.ENDED:
            return
        _note_clock(tx, row, report)
        quarantine = None
        if report.leftovers or not report.process_set_empty:
            quarantine = f"attempt {part.attempt_id} left processes: {', '.join(report.leftovers) or 'unknown'}"
            add_event(tx, "gpus_quarantined", actor="node", text=quarantine, job_id=_job_id(tx, part.attempt_id))
        end_attempt_node(tx, row, report=report, quarantine=quarantine)
        if _has_failed(report):
            _stop_peers(tx, settings, row, report)
        settle_attempt(tx, part.attempt_id)


def _job_id(tx: Write, attempt_id: int) -> int:
    return int(tx.connection.execute(select(attempts.c.job_id).where(attempts.c.id == attempt_id)).scalar_one())


def _has_failed(report: NodeReport) -> bool:
    if report.failure is not None:
        return True
    if report.result is not None:
        # All ranks of the gang came to the end together: an abort in teardown, or 75, must not get the peers stopped.
        return False
    return any(rank.signal is not None or rank.exit_code not in (0, None) for rank in report.ranks)


def _note_clock(tx: Write, row: Row[Any], report: NodeReport) -> None:
    if report.sent_at:
        tx.connection.execute(
            update(attempt_nodes)
            .where(attempt_nodes.c.id == row.id)
            .values(clock_offset_seconds=tx.now - report.sent_at)
        )


def _stop_peers(tx: Write, settings: Settings, row: Row[Any], report: NodeReport) -> None:
    is_limit = report.failure is not None and report.failure.outcome == Outcome.TIME_LIMIT
    detail = report.failure.message if is_limit and report.failure else f"a rank of node rank {row.node_rank} failed"
    stop_attempt(
        tx,
        row.attempt_id,
        StopIntent.TIME_LIMIT if is_limit else StopIntent.PEER_FAILURE,
        detail=detail,
        settle_seconds=settings.settle_seconds,
        actor="node",
    )


def _lose_unreachable_peers(tx: Write, attempt_id: int) -> None:
    """Two witnesses, silence to the service and a lost connection to a peer, together mean that a node is lost."""
    peers = tx.connection.execute(
        select(nodes)
        .join(attempt_nodes, attempt_nodes.c.node_id == nodes.c.id)
        .where(
            attempt_nodes.c.attempt_id == attempt_id,
            attempt_nodes.c.state != AttemptNodeState.ENDED,
            nodes.c.state == NodeState.UNREACHABLE,
        )
    ).all()
    for node in peers:
        lose_node(tx, node, why="it does not answer, and its peers lost their connection to it")
