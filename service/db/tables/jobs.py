"""Jobs and what they wait for, the events that tell their history, and the outbox of hints that follow a commit."""

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    Table,
    Text,
    false,
)

from service.db.tables.base import METADATA, BigId, json_column, state_check, state_column, time_column
from service.domain.states import JobState

jobs = Table(
    "jobs",
    METADATA,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False),
    Column("owner_id", ForeignKey("users.id"), nullable=False),
    Column("team_id", ForeignKey("teams.id"), nullable=False),
    Column("is_private", Boolean, nullable=False),
    json_column("spec", nullable=False),
    # What the scheduler needs, resolved once at submission. With a range of GPUs: its largest layout, and in `layouts`
    # all that it may start on.
    Column("num_nodes", Integer, nullable=False),
    Column("gpus_per_node", Integer, nullable=False),
    Column("gpu_type", Text),
    # Least memory of each GPU; labels that its nodes must have, as {"label": "value"}; whole nodes to itself.
    Column("gpu_memory_bytes", BigInteger),
    json_column("node_labels"),
    Column("is_exclusive", Boolean, nullable=False, server_default=false()),
    Column("cpus_per_node", Double, nullable=False),
    Column("memory_bytes_per_node", BigInteger, nullable=False),
    Column("processes_per_node", Integer, nullable=False),
    json_column("layouts"),
    Column("priority", Integer, nullable=False),
    Column("is_preemptible", Boolean, nullable=False, server_default=false()),
    # Its present time limit: the spec's at first; the spec itself never changes. At its end: `fail` or `requeue`.
    Column("limit_seconds", Double),
    Column("on_time_limit", Text, nullable=False, server_default="fail"),
    # What its owner or an admin says of its turn: held (by whom and why), and not before a time (in which zone).
    Column("hold_reason", Text),
    time_column("start_after"),
    Column("start_zone", Text),
    json_column("tags", nullable=False),
    state_column(JobState),
    Column("version", BigInteger, nullable=False),
    Column("is_cancel_wished", Boolean, nullable=False),
    Column("cancel_detail", Text, nullable=False),
    json_column("reason"),
    Column("outcome", Text),
    json_column("cause"),
    Column("num_attempts", Integer, nullable=False),
    Column("num_charged_retries", Integer, nullable=False),
    Column("num_pool_retries", Integer, nullable=False),
    Column("start_reason", Text, nullable=False),
    time_column("not_before"),
    time_column("submitted_at", nullable=False),
    # Start of its present wait: submission, the end of the attempt before, or of the last job that it needed. Later by
    # the time in which it was held.
    time_column("wait_began_at", nullable=False),
    # How often it was preempted, the run that its ended attempts kept, the time left as measured when it was stopped
    # last, and since when it goes first for having waited too long.
    Column("num_stops", Integer, nullable=False, server_default="0"),
    Column("served_seconds", Double, nullable=False, server_default="0"),
    Column("measured_left_seconds", Double),
    time_column("promoted_at"),
    time_column("started_at"),
    time_column("ended_at"),
    Column("gpu_seconds", Double, nullable=False),
    state_check(JobState),
    Index("ix_jobs_submitted_at_id", "submitted_at", "id"),
    Index("ix_jobs_state_submitted_at_id", "state", "submitted_at", "id"),
    Index("ix_jobs_owner_id_submitted_at_id", "owner_id", "submitted_at", "id"),
    Index("ix_jobs_team_id_submitted_at_id", "team_id", "submitted_at", "id"),
)

job_dependencies = Table(
    "job_dependencies",
    METADATA,
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("needs_job_id", ForeignKey("jobs.id", ondelete="CASCADE"), primary_key=True),
    Column("condition", Text, nullable=False),
    CheckConstraint("condition IN ('ok', 'any', 'not_ok')", name="condition"),
    Index("ix_job_dependencies_needs_job_id", "needs_job_id"),
)

events = Table(
    "events",
    METADATA,
    Column("id", BigId, primary_key=True),
    time_column("at", nullable=False),
    Column("kind", Text, nullable=False),
    Column("actor", Text, nullable=False),
    Column("job_id", ForeignKey("jobs.id", ondelete="CASCADE")),
    Column("attempt_number", Integer),
    Column("node_name", Text),
    Column("text", Text, nullable=False),
    json_column("data", nullable=False),
    Index("ix_events_job_id_id", "job_id", "id"),
)

outbox = Table(
    "outbox",
    METADATA,
    Column("id", BigId, primary_key=True),
    Column("queue", Text, nullable=False),
    Column("attempt_id", BigInteger, nullable=False),
    time_column("created_at", nullable=False),
)
