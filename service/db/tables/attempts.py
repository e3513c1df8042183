"""Attempts, their nodes, and the allocation of GPUs.

Two partial unique indexes state what must never be: two open attempts of one job, two open allocations of one GPU.
"""

from sqlalchemy import (
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    UniqueConstraint,
    text,
)

from service.db.tables.base import METADATA, BigId, json_column, state_check, state_column, time_column
from service.domain.states import AttemptNodeState, AttemptState

attempts = Table(
    "attempts",
    METADATA,
    Column("id", BigId, primary_key=True),
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), nullable=False),
    Column("number", Integer, nullable=False),
    state_column(AttemptState),
    # Its size: each attempt of a job with a range of GPUs may have another.
    Column("num_nodes", Integer, nullable=False),
    Column("gpus_per_node", Integer, nullable=False),
    Column("processes_per_node", Integer, nullable=False),
    Column("start_reason", Text, nullable=False),
    Column("leader_epoch", BigInteger, nullable=False),
    Column("stop_intent", Text),
    Column("stop_detail", Text, nullable=False),
    Column("stop_grace_seconds", Double, nullable=False),
    Column("directive_version", BigInteger, nullable=False),
    Column("rendezvous_address", Text),
    Column("rendezvous_port", Integer),
    Column("outcome", Text),
    json_column("cause"),
    json_column("progress"),
    # Chosen at the first claim, so that all nodes are told the same.
    json_column("resume_from"),
    Column("shared_folder_id", Text),
    # When its checkpoints were given up: those that still come do not count.
    time_column("forgotten_at"),
    # Stopped for this job, which gets its GPUs.
    Column("nominated_for", BigInteger),
    # Its last durable checkpoint.
    time_column("checkpointed_at"),
    # GPU-seconds in which its GPUs worked; and of a preempted one, those whose work was lost, and the restore.
    Column("busy_gpu_seconds", Double, nullable=False, server_default="0"),
    Column("lost_gpu_seconds", Double, nullable=False, server_default="0"),
    time_column("created_at", nullable=False),
    time_column("running_at"),
    time_column("stop_requested_at"),
    time_column("settle_at"),
    time_column("ended_at"),
    state_check(AttemptState),
    UniqueConstraint("job_id", "number"),
    Index(
        "ux_attempts_open_job",
        "job_id",
        unique=True,
        sqlite_where=text("state <> 'ended'"),
        postgresql_where=text("state <> 'ended'"),
    ),
    Index(
        "ix_attempts_open",
        "id",
        sqlite_where=text("state <> 'ended'"),
        postgresql_where=text("state <> 'ended'"),
    ),
)

attempt_nodes = Table(
    "attempt_nodes",
    METADATA,
    Column("id", BigId, primary_key=True),
    Column("attempt_id", ForeignKey("attempts.id", ondelete="CASCADE"), nullable=False),
    Column("node_id", ForeignKey("nodes.id"), nullable=False),
    Column("node_rank", Integer, nullable=False),
    state_column(AttemptNodeState),
    Column("token_hash", Text),
    Column("incarnation", Text),
    json_column("report"),
    Column("is_lost", Boolean, nullable=False),
    Column("clock_offset_seconds", Double, nullable=False),
    Column("cpus", Double, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    time_column("created_at", nullable=False),
    time_column("claimed_at"),
    time_column("started_at"),
    time_column("missing_since"),
    time_column("ended_at"),
    state_check(AttemptNodeState),
    UniqueConstraint("attempt_id", "node_rank"),
    UniqueConstraint("attempt_id", "node_id"),
    Index(
        "ix_attempt_nodes_open_node",
        "node_id",
        sqlite_where=text("state <> 'ended'"),
        postgresql_where=text("state <> 'ended'"),
    ),
)

allocations = Table(
    "allocations",
    METADATA,
    Column("id", BigId, primary_key=True),
    Column("attempt_node_id", ForeignKey("attempt_nodes.id", ondelete="CASCADE"), nullable=False),
    Column("node_id", ForeignKey("nodes.id"), nullable=False),
    Column("gpu_index", Integer, nullable=False),
    time_column("allocated_at", nullable=False),
    time_column("released_at"),
    Index("ix_allocations_attempt_node_id", "attempt_node_id"),
    Index(
        "ux_allocations_open_gpu",
        "node_id",
        "gpu_index",
        unique=True,
        sqlite_where=text("released_at IS NULL"),
        postgresql_where=text("released_at IS NULL"),
    ),
)
