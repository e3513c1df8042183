"""One row each: about the pool itself, the lease of the process that schedules, and what its forecasts taught it."""

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

forecast_experience = Table(
    "forecast_experience",
    METADATA,
    Column("id", Integer, primary_key=True),
    Column("experience", Text, nullable=False),
    time_column("written_at", nullable=False),
)
