"""One row about the pool itself, and the lease of the process that schedules."""

from sqlalchemy import BigInteger, Column, Integer, Table, Text

from service.db.tables.base import METADATA, time_column

pool = Table(
    "pool",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("pool_id", Text, nullable=False),
    time_column("created_at", nullable=False),
    time_column("api_seen_at"),
)

leader_lease = Table(
    "leader_lease",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("epoch", BigInteger, nullable=False),
    Column("holder", Text, nullable=False),
    time_column("renewed_at", nullable=False),
)
