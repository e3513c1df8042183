"""The lease of the one process that schedules and sweeps: an epoch that every one of its writes carries.

A paused leader that wakes up late finds a higher epoch and writes nothing more; a lock alone would not fence it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sqlalchemy import bindparam, insert, select, update

from service.db.session import Database, Write
from service.db.tables import leader_lease


class LostLeadership(Exception):
    """Another process holds the lease; nothing was changed."""


@dataclass(frozen=True, kw_only=True)
class SeenLease:
    """The lease as somebody who waits for it has seen it."""

    epoch: int
    holder: str
    renewed_at: float


def see_lease(database: Database) -> SeenLease | None:
    """The lease as it is; None while nobody has ever held it."""
    with database.read() as connection:
        row = connection.execute(select(leader_lease)).one_or_none()
    return None if row is None else SeenLease(epoch=row.epoch, holder=row.holder, renewed_at=row.renewed_at)


def take_lease(
    database: Database, holder: str, *, lease_seconds: float, unchanged: SeenLease | None = None
) -> int | None:
    """Take the lease if it is free or run out: the new epoch, or None while another holds it.

    `unchanged`: it has also run out if it still is as it was seen, which the caller has watched for long enough by a
    clock that never jumps; then `lease_seconds` should be infinite.
    """
    with database.write() as tx:
        row = tx.connection.execute(select(leader_lease).with_for_update()).one_or_none()
        if row is None:
            tx.connection.execute(insert(leader_lease).values(id=1, epoch=1, holder=holder, renewed_at=tx.now))
            return 1
        seen = SeenLease(epoch=row.epoch, holder=row.holder, renewed_at=row.renewed_at)
        is_free = row.holder in ("", holder) or tx.now - row.renewed_at > lease_seconds or seen == unchanged
        if not is_free:
            return None
        tx.connection.execute(update(leader_lease).values(epoch=row.epoch + 1, holder=holder, renewed_at=tx.now))
        return int(row.epoch) + 1


def renew_lease(database: Database, epoch: int) -> bool:
    """Prolong the lease; False when another has taken it."""
    with database.write() as tx:
        renewed = tx.connection.execute(
            update(leader_lease).where(leader_lease.c.epoch == epoch).values(renewed_at=tx.now)
        )
        return renewed.rowcount == 1


def give_up_lease(database: Database, epoch: int) -> None:
    """Let another take the lease at once."""
    with database.write() as tx:
        tx.connection.execute(update(leader_lease).where(leader_lease.c.epoch == epoch).values(holder=""))


_ASSERT = select(leader_lease.c.epoch).where(leader_lease.c.epoch == bindparam("epoch")).with_for_update(read=True)


def assert_leader(tx: Write, epoch: int) -> None:
    """Raise LostLeadership unless `epoch` is the present one; holds it until the end of the transaction."""
    if tx.connection.execute(_ASSERT, {"epoch": epoch}).one_or_none() is None:
        raise LostLeadership(f"epoch {epoch} is over")
