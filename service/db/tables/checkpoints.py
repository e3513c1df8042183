"""Checkpoints that the API has accepted: what a job may resume from, and on which nodes it then must run.

The files belong to the trainer; a row says only that the attempt that held the job told of a complete checkpoint.
"""

from sqlalchemy import BigInteger, Column, ForeignKey, Index, Table, Text, UniqueConstraint, text

from service.db.tables.base import METADATA, BigId, json_column, time_column

checkpoints = Table(
    "checkpoints",
    METADATA,
    Column("id", BigId, primary_key=True),
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("attempt_id", ForeignKey("attempts.id", ondelete="CASCADE"), nullable=False),
    Column("step", BigInteger, nullable=False),
    # Relative to the folder of the job's checkpoints.
    Column("path", Text, nullable=False),
    Column("samples_seen", BigInteger, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    # Where it lies: in this shared folder, else on these nodes alone.
    Column("shared_folder_id", Text),
    json_column("node_names", nullable=False),
    time_column("accepted_at", nullable=False),
    time_column("removed_at"),
    UniqueConstraint("job_id", "path"),
    Index(
        "ix_checkpoints_kept_job",
        "job_id",
        "step",
        sqlite_where=text("removed_at IS NULL"),
        postgresql_where=text("removed_at IS NULL"),
    ),
)
