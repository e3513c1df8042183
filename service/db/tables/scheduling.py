"""What the scheduler leaves for its next pass: GPUs promised to a job, and what changed since it last looked."""

from sqlalchemy import BigInteger, CheckConstraint, Column, ForeignKey, Table, Text

from service.db.tables.base import METADATA, BigId, json_column, time_column

nominations = Table(
    "nominations",
    METADATA,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    json_column("layout", nullable=False),
    # [[node id, [GPU indices]], ...]
    json_column("shares", nullable=False),
    # Ids of the attempts that are stopped for it.
    json_column("victims", nullable=False),
    Column("leader_epoch", BigInteger, nullable=False),
    time_column("created_at", nullable=False),
    time_column("expires_at", nullable=False),
)

# Written in the transaction of the change, deleted by the leader as it reads them: the order of commits is no matter.
world_changes = Table(
    "world_changes",
    METADATA,
    Column("id", BigId, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("key", BigInteger, nullable=False),
    CheckConstraint("kind IN ('job', 'node', 'team', 'user')", name="kind"),
)
