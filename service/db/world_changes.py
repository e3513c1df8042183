"""Tell the scheduler what it has to read again, in the same transaction as the change itself.

The leader deletes the marks as it reads them, so a mark that commits late is read late, and none is lost. Not for:
changes that the scheduler does not look at (names, tokens, logs).
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

from sqlalchemy import insert

from service.db.session import Write
from service.db.tables import world_changes

ChangeKind = Literal["job", "node", "team", "user"]


def mark_changed(tx: Write, kind: ChangeKind, key: int) -> None:
    """Have the scheduler read this row again, and wake it after the commit. `key` is the row's id."""
    mark_all_changed(tx, kind, (key,))


def mark_all_changed(tx: Write, kind: ChangeKind, keys: Iterable[int]) -> None:
    """`mark_changed` for several rows in one statement; none changes nothing."""
    rows = [{"kind": kind, "key": key} for key in keys]
    if rows:
        tx.connection.execute(_INSERT, rows)
        tx.wake("schedule")


_INSERT = insert(world_changes)
