"""Users, teams, tokens, bundles and idempotency keys."""

from sqlalchemy import BigInteger, Boolean, Column, ForeignKey, Index, Integer, Table, Text, false

from service.db.tables.base import METADATA, BigId, time_column

users = Table(
    "users",
    METADATA,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("is_admin", Boolean, nullable=False),
    time_column("created_at", nullable=False),
    time_column("disabled_at"),
    # Most GPUs that the user's jobs hold at once; null: no cap.
    Column("cap_gpus", Integer),
    Column("may_use_top_priority", Boolean, nullable=False, server_default=false()),
)

teams = Table(
    "teams",
    METADATA,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    time_column("created_at", nullable=False),
    # Guaranteed GPUs and whole nodes, and the most GPUs that its jobs hold at once; null: none of it.
    Column("quota_gpus", Integer),
    Column("quota_nodes", Integer),
    Column("cap_gpus", Integer),
)

memberships = Table(
    "memberships",
    METADATA,
    Column("team_id", ForeignKey("teams.id", ondelete="CASCADE"), primary_key=True),
    Column("user_id", ForeignKey("users.id", ondelete="CASCADE"), primary_key=True),
    time_column("created_at", nullable=False),
    Index("ix_memberships_user_id", "user_id"),
)

tokens = Table(
    "tokens",
    METADATA,
    Column("id", BigId, primary_key=True),
    Column("kind", Text, nullable=False),
    Column("hash", Text, nullable=False, unique=True),
    Column("user_id", ForeignKey("users.id", ondelete="CASCADE"), nullable=False),
    Column("label", Text, nullable=False),
    time_column("created_at", nullable=False),
    time_column("expires_at"),
    time_column("revoked_at"),
    time_column("last_used_at"),
    Index("ix_tokens_user_id", "user_id"),
)

bundles = Table(
    "bundles",
    METADATA,
    Column("digest", Text, primary_key=True),
    Column("num_bytes", BigInteger, nullable=False),
    Column("created_by", ForeignKey("users.id"), nullable=False),
    time_column("created_at", nullable=False),
    # Whether its top level would hide the trainer package; null: stored before this was looked at.
    Column("hides_trainer", Boolean),
)

idempotency_keys = Table(
    "idempotency_keys",
    METADATA,
    Column("user_id", ForeignKey("users.id", ondelete="CASCADE"), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("request_hash", Text, nullable=False),
    Column("status", Integer, nullable=False),
    Column("response", Text, nullable=False),
    time_column("created_at", nullable=False),
)
