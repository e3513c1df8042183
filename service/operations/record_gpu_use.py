"""Record what a heartbeat says of each GPU's use: the latest sample, since when it is idle, and the attempts' work.

Not for: what the numbers mean (`service.domain.gpu_use`, pure).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from sqlalchemy import bindparam, delete, insert, select, update

from service.db.session import Database, Write
from service.db.tables import allocations, attempt_nodes, attempts, gpu_use
from service.domain.gpu_use import GPUSample, LastSample, busy_seconds, idle_since

_KNOWN = select(gpu_use.c.gpu_index, gpu_use.c.at, gpu_use.c.idle_since).where(
    gpu_use.c.node_id == bindparam("node_id")
)
_HOLDERS = (
    select(allocations.c.gpu_index, allocations.c.allocated_at, attempt_nodes.c.attempt_id)
    .join(attempt_nodes, attempt_nodes.c.id == allocations.c.attempt_node_id)
    .where(allocations.c.node_id == bindparam("node_id"), allocations.c.released_at.is_(None))
)
_INSERT = insert(gpu_use).values(
    node_id=bindparam("of_node"),
    gpu_index=bindparam("of_gpu"),
    at=bindparam("new_at"),
    utilisation=bindparam("new_utilisation"),
    memory_bytes=bindparam("new_memory"),
    idle_since=bindparam("new_idle_since"),
)
_UPDATE = (
    update(gpu_use)
    .where(gpu_use.c.node_id == bindparam("of_node"), gpu_use.c.gpu_index == bindparam("of_gpu"))
    .values(
        at=bindparam("new_at"),
        utilisation=bindparam("new_utilisation"),
        memory_bytes=bindparam("new_memory"),
        idle_since=bindparam("new_idle_since"),
    )
)
_FORGET = delete(gpu_use).where(gpu_use.c.node_id == bindparam("of_node"), gpu_use.c.gpu_index == bindparam("of_gpu"))
_ADD_BUSY = (
    update(attempts)
    .where(attempts.c.id == bindparam("attempt_id"))
    .values(busy_gpu_seconds=attempts.c.busy_gpu_seconds + bindparam("seconds"))
)


def record_gpu_use(
    tx: Write, node_id: int, samples: Sequence[GPUSample], *, longest_seconds: float
) -> dict[int, float]:
    """Keep a node's samples as the latest; returns the GPU-seconds of work that they add, by attempt.

    `longest_seconds`: for how long one sample may stand. A GPU that the heartbeat says nothing of is forgotten: its use
    is not known any more.
    """
    known = {
        row.gpu_index: LastSample(at=row.at, idle_since=row.idle_since)
        for row in tx.connection.execute(_KNOWN, {"node_id": node_id})
    }
    if not samples and not known:
        return {}
    holders = {row.gpu_index: row for row in tx.connection.execute(_HOLDERS, {"node_id": node_id})}
    busy: defaultdict[int, float] = defaultdict(float)
    added: list[dict[str, float | int | None]] = []
    changed: list[dict[str, float | int | None]] = []
    for sample in samples:
        last, holder = known.pop(sample.index, None), holders.get(sample.index)
        idle_from = idle_since(sample, last, now=tx.now, longest_seconds=longest_seconds)
        row = {
            "new_at": tx.now,
            "new_utilisation": sample.utilisation,
            "new_memory": sample.memory_bytes,
            "new_idle_since": idle_from,
            "of_node": node_id,
            "of_gpu": sample.index,
        }
        (added if last is None else changed).append(row)
        if holder is not None:
            busy[holder.attempt_id] += busy_seconds(
                sample, last, held_since=holder.allocated_at, now=tx.now, longest_seconds=longest_seconds
            )
    if added:
        tx.connection.execute(_INSERT, added)
    if changed:
        tx.connection.execute(_UPDATE, changed)
    if known:
        tx.connection.execute(_FORGET, [{"of_node": node_id, "of_gpu": index} for index in known])
    return {attempt_id: seconds for attempt_id, seconds in sorted(busy.items()) if seconds > 0}


def add_busy_seconds(database: Database, busy: dict[int, float]) -> None:
    """Add GPU-seconds of work to attempts, each in a transaction of its own: a heartbeat, which holds its node, must
    not wait for whoever holds an attempt."""
    for attempt_id, seconds in busy.items():
        with database.write() as tx:
            tx.connection.execute(_ADD_BUSY, {"attempt_id": attempt_id, "seconds": seconds})
