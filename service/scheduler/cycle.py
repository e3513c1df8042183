"""The shell around `plan`: load, plan, apply with guarded updates. One pass is `run_cycle`; `Scheduler` repeats it.

Each placement is one transaction that carries the leader's epoch: attempt, attempt-nodes and allocations of all nodes,
or nothing. Losing a guard is normal: somebody else was faster, and the next pass sees it.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence

from sqlalchemy import bindparam, insert, select, update
from sqlalchemy.exc import IntegrityError

from gangline.protocol.names import node_queue
from gangline.protocol.outcomes import JobState
from service import clock
from service.background import BackgroundThread
from service.db.leadership import LostLeadership, assert_leader
from service.db.session import Database, Write
from service.db.tables import allocations, attempt_nodes, attempts, jobs, nodes
from service.db.transitions import StaleTransition, add_hint, move_job
from service.domain.reasons import Reason, ReasonCode
from service.domain.states import AttemptNodeState, AttemptState, NodeState
from service.errors import DatabaseUnavailable
from service.events.bus import Bus
from service.scheduler.load_world import load_world
from service.scheduler.plan import Place, Wait, plan
from service.settings import Settings

log = logging.getLogger("gangline.scheduler")


def run_cycle(database: Database, settings: Settings, epoch: int) -> int:
    """One pass: load the world, plan, apply. Returns the number of jobs placed. Raises LostLeadership."""
    with database.read() as connection:
        now = database.now(connection)
        world, reasons = load_world(connection, now, settings)
    if not world.waiting:
        return 0
    decided = plan(world, now)
    num_placed = sum(_apply_place(database, place, epoch) for place in decided.places)
    _apply_reasons(database, _new_reasons(decided.waits, reasons), epoch)
    return num_placed


def _new_reasons(waits: Sequence[Wait], stored: Mapping[int, str | None]) -> dict[int, str]:
    """The reason, as JSON text, of each job whose stored one says something else."""
    texts: dict[Reason, str] = {}  # thousands of jobs share a few reasons
    changed: dict[int, str] = {}
    for wait in waits:
        text = texts.get(wait.reason)
        if text is None:
            text = texts[wait.reason] = json.dumps(wait.reason.to_json(), ensure_ascii=False)
        before = stored[wait.job_id]
        if text != before and not (before is not None and _is_same_back_off(wait.reason, before)):
            changed[wait.job_id] = text
    return changed


def _is_same_back_off(reason: Reason, stored: str) -> bool:
    """The seconds of a back-off change with every pass; rewriting them would wake every watcher for nothing."""
    return reason.code is ReasonCode.BACK_OFF and json.loads(stored)["code"] == ReasonCode.BACK_OFF


def _apply_place(database: Database, place: Place, epoch: int) -> bool:
    try:
        with database.write() as tx:
            assert_leader(tx, epoch)
            _place(tx, place, epoch)
    except (StaleTransition, IntegrityError) as error:
        log.info("placement_superseded job_id=%s why=%s", place.job_id, str(error).split("\n", 1)[0])
        return False
    return True


_JOB_FOR_PLACEMENT = select(
    jobs.c.num_attempts, jobs.c.start_reason, jobs.c.memory_bytes_per_node, jobs.c.layouts
).where(jobs.c.id == bindparam("job_id"), jobs.c.state == JobState.WAITING, ~jobs.c.is_cancel_wished)

_NODES_FOR_PLACEMENT = (
    select(nodes.c.id, nodes.c.name)
    .where(
        nodes.c.id.in_(bindparam("node_ids", expanding=True)),
        nodes.c.state == NodeState.READY,
        nodes.c.cordon_reason.is_(None),
    )
    .with_for_update(read=True)
)
_INSERT_ATTEMPT = insert(attempts).returning(attempts.c.id)
_INSERT_PART = insert(attempt_nodes).returning(attempt_nodes.c.id)
_INSERT_ALLOCATIONS = insert(allocations)


def _place(tx: Write, place: Place, epoch: int) -> None:
    job = tx.connection.execute(_JOB_FOR_PLACEMENT, {"job_id": place.job_id}).one_or_none()
    if job is None:
        raise StaleTransition(f"job {place.job_id} waits no more")
    layout, shares = place.gang.layout, place.gang.shares
    node_ids = [share.node_id for share in shares]
    rows = tx.connection.execute(_NODES_FOR_PLACEMENT, {"node_ids": node_ids})
    names = {row.id: row.name for row in rows}
    if len(names) != len(node_ids):
        raise StaleTransition(f"job {place.job_id}: a node is not ready any more")
    number = job.num_attempts + 1
    attempt_id = tx.connection.execute(
        _INSERT_ATTEMPT,
        {
            "job_id": place.job_id,
            "number": number,
            "state": AttemptState.ALLOCATED,
            "num_nodes": layout.num_nodes,
            "gpus_per_node": layout.gpus_per_node,
            "processes_per_node": layout.processes_per_node,
            "start_reason": job.start_reason,
            "leader_epoch": epoch,
            "stop_detail": "",
            "stop_grace_seconds": 0.0,
            "directive_version": 1,
            "created_at": tx.now,
        },
    ).scalar_one()
    for node_rank, share in enumerate(shares):
        attempt_node_id = tx.connection.execute(
            _INSERT_PART,
            {
                "attempt_id": attempt_id,
                "node_id": share.node_id,
                "node_rank": node_rank,
                "state": AttemptNodeState.ALLOCATED,
                "is_lost": False,
                "clock_offset_seconds": 0.0,
                "cpus": layout.cpus_per_node,
                "memory_bytes": job.memory_bytes_per_node,
                "created_at": tx.now,
            },
        ).scalar_one()
        if share.gpu_indices:
            tx.connection.execute(
                _INSERT_ALLOCATIONS,
                [
                    {
                        "attempt_node_id": attempt_node_id,
                        "node_id": share.node_id,
                        "gpu_index": index,
                        "allocated_at": tx.now,
                    }
                    for index in share.gpu_indices
                ],
            )
        add_hint(tx, node_queue(names[share.node_id]), attempt_id)
    where = ", ".join(f"{names[share.node_id]} GPU {','.join(map(str, share.gpu_indices)) or '–'}" for share in shares)
    # Of a job that always asks for the same, the number goes without saying.
    size = "" if job.layouts is None else f"with {layout.num_gpus} GPU{'' if layout.num_gpus == 1 else 's'} "
    move_job(
        tx,
        place.job_id,
        JobState.STARTING,
        actor="scheduler",
        text=f"Attempt {number} starts {size}on {where}.",
        attempt_number=number,
        columns={"num_attempts": number, "reason": None, "not_before": None},
    )


_SET_REASON = (
    update(jobs)
    .where(jobs.c.id == bindparam("job_id"), jobs.c.state == JobState.WAITING)
    .values(reason=bindparam("new_reason"), version=jobs.c.version + 1)
)


def _apply_reasons(database: Database, reasons: Mapping[int, str], epoch: int) -> None:
    if not reasons:
        return
    with database.write() as tx:
        assert_leader(tx, epoch)
        rows = [{"job_id": job_id, "new_reason": text} for job_id, text in reasons.items()]
        tx.connection.execute(_SET_REASON, rows)
        tx.wake(*(f"job:{job_id}" for job_id in reasons))


class Scheduler(BackgroundThread):
    """Runs passes in a thread: at once when woken (`schedule`), else on a slow tick."""

    REST_FACTOR = 3.0
    """A pass rests for this many times its own length, so that a long queue never starves the API of the processor."""

    def __init__(self, database: Database, settings: Settings, bus: Bus, epoch: int):
        super().__init__("scheduler", bus.thread_event("schedule"))
        self._database = database
        self._settings = settings
        self._bus = bus
        self._epoch = epoch
        self.has_lost_leadership = False

    def run(self) -> None:
        """See `BackgroundThread`."""
        self._wake.set()
        while not self._stopping.is_set():
            self._wake.wait(self._settings.schedule_seconds)
            self._wake.clear()
            if self._stopping.is_set():
                return
            began = clock.monotonic()
            try:
                run_cycle(self._database, self._settings, self._epoch)
            except LostLeadership:
                log.warning("leadership_lost epoch=%s", self._epoch)
                self.has_lost_leadership = True
                return
            except DatabaseUnavailable as error:
                log.warning("cycle_skipped why=%s", error.detail)
                self._stopping.wait(1.0)
            except Exception:
                # One poisoned row must not end scheduling for everybody; the trace names it, the next tick tries again.
                log.exception("cycle_failed")
                self._stopping.wait(1.0)
            self._stopping.wait((clock.monotonic() - began) * self.REST_FACTOR)
