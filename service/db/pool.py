"""The pool's own identity: one random id, so that two pools never mistake each other's processes."""

import uuid

from sqlalchemy import insert, select

from service.db.session import Database
from service.db.tables import pool


def load_or_make_pool_id(database: Database) -> str:
    """The pool's id."""
    with database.write() as tx:
        row = tx.connection.execute(select(pool.c.pool_id)).one_or_none()
        if row is not None:
            return str(row.pool_id)
        pool_id = uuid.uuid4().hex[:12]
        tx.connection.execute(insert(pool).values(id=1, pool_id=pool_id, created_at=tx.now))
        return pool_id
