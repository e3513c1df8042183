"""First schema: identity, jobs, attempts, nodes, allocations, streams, events, outbox.

Terminal states of jobs and attempts are final in the database too: a trigger refuses to leave them.
"""

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None
branch_labels = None
depends_on = None


TERMINAL = {"jobs": ("succeeded", "failed", "cancelled"), "attempts": ("ended",)}


def upgrade() -> None:
    op.create_table(
        "leader_lease",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("epoch", sa.BigInteger(), nullable=False),
        sa.Column("holder", sa.Text(), nullable=False),
        sa.Column("renewed_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_leader_lease")),
    )
    op.create_table(
        "nodes",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("credential_hash", sa.Text(), nullable=False),
        sa.Column("address", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("cpus", sa.Double(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("incarnation", sa.Text(), nullable=True),
        sa.Column("boot_id", sa.Text(), nullable=True),
        sa.Column("agent_version", sa.Text(), nullable=True),
        sa.Column("cordon_reason", sa.Text(), nullable=True),
        sa.Column("inventory_hash", sa.Text(), nullable=True),
        sa.Column("enrolled_at", sa.Double(), nullable=False),
        sa.Column("last_heartbeat_at", sa.Double(), nullable=True),
        sa.Column("lost_at", sa.Double(), nullable=True),
        sa.CheckConstraint("state IN ('ready', 'unreachable', 'lost')", name=op.f("ck_nodes_state")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_nodes")),
        sa.UniqueConstraint("credential_hash", name=op.f("uq_nodes_credential_hash")),
        sa.UniqueConstraint("name", name=op.f("uq_nodes_name")),
    )
    op.create_table(
        "outbox",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("queue", sa.Text(), nullable=False),
        sa.Column("attempt_id", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_outbox")),
    )
    op.create_table(
        "pool",
        sa.Column("id", sa.Integer(), nullable=False),
        sa.Column("pool_id", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_pool")),
    )
    op.create_table(
        "teams",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_teams")),
        sa.UniqueConstraint("name", name=op.f("uq_teams_name")),
    )
    op.create_table(
        "users",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("is_admin", sa.Boolean(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("disabled_at", sa.Double(), nullable=True),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_users")),
        sa.UniqueConstraint("name", name=op.f("uq_users_name")),
    )
    op.create_table(
        "bundles",
        sa.Column("digest", sa.Text(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_by", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["created_by"], ["users.id"], name=op.f("fk_bundles_created_by_users")),
        sa.PrimaryKeyConstraint("digest", name=op.f("pk_bundles")),
    )
    op.create_table(
        "gpus",
        sa.Column("node_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("gpu_index", sa.Integer(), nullable=False),
        sa.Column("uuid", sa.Text(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("model", sa.Text(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("link_group", sa.Text(), nullable=True),
        sa.Column("numa_node", sa.Integer(), nullable=True),
        sa.Column("quarantine_reason", sa.Text(), nullable=True),
        sa.Column("removed_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_gpus_node_id_nodes"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node_id", "gpu_index", name=op.f("pk_gpus")),
    )
    op.create_table(
        "idempotency_keys",
        sa.Column("user_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("request_hash", sa.Text(), nullable=False),
        sa.Column("status", sa.Integer(), nullable=False),
        sa.Column("response", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["user_id"], ["users.id"], name=op.f("fk_idempotency_keys_user_id_users"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("user_id", "key", name=op.f("pk_idempotency_keys")),
    )
    op.create_table(
        "jobs",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("name", sa.Text(), nullable=False),
        sa.Column("owner_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("team_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("is_private", sa.Boolean(), nullable=False),
        sa.Column("spec", sa.Text(), nullable=False),
        sa.Column("num_nodes", sa.Integer(), nullable=False),
        sa.Column("gpus_per_node", sa.Integer(), nullable=False),
        sa.Column("gpu_type", sa.Text(), nullable=True),
        sa.Column("cpus_per_node", sa.Double(), nullable=False),
        sa.Column("memory_bytes_per_node", sa.BigInteger(), nullable=False),
        sa.Column("processes_per_node", sa.Integer(), nullable=False),
        sa.Column("priority", sa.Integer(), nullable=False),
        sa.Column("tags", sa.Text(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("version", sa.BigInteger(), nullable=False),
        sa.Column("is_cancel_wished", sa.Boolean(), nullable=False),
        sa.Column("cancel_detail", sa.Text(), nullable=False),
        sa.Column("reason", sa.Text(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("num_attempts", sa.Integer(), nullable=False),
        sa.Column("num_charged_retries", sa.Integer(), nullable=False),
        sa.Column("num_pool_retries", sa.Integer(), nullable=False),
        sa.Column("start_reason", sa.Text(), nullable=False),
        sa.Column("not_before", sa.Double(), nullable=True),
        sa.Column("submitted_at", sa.Double(), nullable=False),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.Column("gpu_seconds", sa.Double(), nullable=False),
        sa.CheckConstraint(
            "state IN ('waiting', 'starting', 'running', 'stopping', 'succeeded', 'failed', 'cancelled')",
            name=op.f("ck_jobs_state"),
        ),
        sa.ForeignKeyConstraint(["owner_id"], ["users.id"], name=op.f("fk_jobs_owner_id_users")),
        sa.ForeignKeyConstraint(["team_id"], ["teams.id"], name=op.f("fk_jobs_team_id_teams")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_jobs")),
    )
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.create_index("ix_jobs_owner_id_submitted_at_id", ["owner_id", "submitted_at", "id"], unique=False)
        batch_op.create_index("ix_jobs_state_submitted_at_id", ["state", "submitted_at", "id"], unique=False)
        batch_op.create_index("ix_jobs_submitted_at_id", ["submitted_at", "id"], unique=False)
        batch_op.create_index("ix_jobs_team_id_submitted_at_id", ["team_id", "submitted_at", "id"], unique=False)

    op.create_table(
        "memberships",
        sa.Column("team_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("user_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["team_id"], ["teams.id"], name=op.f("fk_memberships_team_id_teams"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["user_id"], ["users.id"], name=op.f("fk_memberships_user_id_users"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("team_id", "user_id", name=op.f("pk_memberships")),
    )
    with op.batch_alter_table("memberships", schema=None) as batch_op:
        batch_op.create_index("ix_memberships_user_id", ["user_id"], unique=False)

    op.create_table(
        "tokens",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("hash", sa.Text(), nullable=False),
        sa.Column("user_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("label", sa.Text(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=True),
        sa.Column("revoked_at", sa.Double(), nullable=True),
        sa.Column("last_used_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["user_id"], ["users.id"], name=op.f("fk_tokens_user_id_users"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_tokens")),
        sa.UniqueConstraint("hash", name=op.f("uq_tokens_hash")),
    )
    with op.batch_alter_table("tokens", schema=None) as batch_op:
        batch_op.create_index("ix_tokens_user_id", ["user_id"], unique=False)

    op.create_table(
        "attempts",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("number", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("start_reason", sa.Text(), nullable=False),
        sa.Column("leader_epoch", sa.BigInteger(), nullable=False),
        sa.Column("stop_intent", sa.Text(), nullable=True),
        sa.Column("stop_detail", sa.Text(), nullable=False),
        sa.Column("stop_grace_seconds", sa.Double(), nullable=False),
        sa.Column("directive_version", sa.BigInteger(), nullable=False),
        sa.Column("rendezvous_address", sa.Text(), nullable=True),
        sa.Column("rendezvous_port", sa.Integer(), nullable=True),
        sa.Column("outcome", sa.Text(), nullable=True),
        sa.Column("cause", sa.Text(), nullable=True),
        sa.Column("progress", sa.Text(), nullable=True),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("running_at", sa.Double(), nullable=True),
        sa.Column("stop_requested_at", sa.Double(), nullable=True),
        sa.Column("settle_at", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.CheckConstraint(
            "state IN ('allocated', 'launching', 'running', 'stopping', 'ended')", name=op.f("ck_attempts_state")
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_attempts_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempts")),
        sa.UniqueConstraint("job_id", "number", name=op.f("uq_attempts_job_id_number")),
    )
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        batch_op.create_index(
            "ix_attempts_open",
            ["id"],
            unique=False,
            sqlite_where=sa.text("state <> 'ended'"),
            postgresql_where=sa.text("state <> 'ended'"),
        )
        batch_op.create_index(
            "ux_attempts_open_job",
            ["job_id"],
            unique=True,
            sqlite_where=sa.text("state <> 'ended'"),
            postgresql_where=sa.text("state <> 'ended'"),
        )

    op.create_table(
        "events",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("actor", sa.Text(), nullable=False),
        sa.Column("job_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=True),
        sa.Column("attempt_number", sa.Integer(), nullable=True),
        sa.Column("node_name", sa.Text(), nullable=True),
        sa.Column("text", sa.Text(), nullable=False),
        sa.Column("data", sa.Text(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_events_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_events")),
    )
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.create_index("ix_events_job_id_id", ["job_id", "id"], unique=False)

    op.create_table(
        "attempt_nodes",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("attempt_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("node_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("node_rank", sa.Integer(), nullable=False),
        sa.Column("state", sa.Text(), nullable=False),
        sa.Column("token_hash", sa.Text(), nullable=True),
        sa.Column("incarnation", sa.Text(), nullable=True),
        sa.Column("report", sa.Text(), nullable=True),
        sa.Column("is_lost", sa.Boolean(), nullable=False),
        sa.Column("clock_offset_seconds", sa.Double(), nullable=False),
        sa.Column("cpus", sa.Double(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("claimed_at", sa.Double(), nullable=True),
        sa.Column("started_at", sa.Double(), nullable=True),
        sa.Column("missing_since", sa.Double(), nullable=True),
        sa.Column("ended_at", sa.Double(), nullable=True),
        sa.CheckConstraint(
            "state IN ('allocated', 'claimed', 'started', 'ended')", name=op.f("ck_attempt_nodes_state")
        ),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_attempt_nodes_attempt_id_attempts"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_attempt_nodes_node_id_nodes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_attempt_nodes")),
        sa.UniqueConstraint("attempt_id", "node_id", name=op.f("uq_attempt_nodes_attempt_id_node_id")),
        sa.UniqueConstraint("attempt_id", "node_rank", name=op.f("uq_attempt_nodes_attempt_id_node_rank")),
    )
    with op.batch_alter_table("attempt_nodes", schema=None) as batch_op:
        batch_op.create_index(
            "ix_attempt_nodes_open_node",
            ["node_id"],
            unique=False,
            sqlite_where=sa.text("state <> 'ended'"),
            postgresql_where=sa.text("state <> 'ended'"),
        )

    op.create_table(
        "metric_buckets",
        sa.Column("attempt_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("key", sa.Text(), nullable=False),
        sa.Column("level", sa.Integer(), nullable=False),
        sa.Column("bucket", sa.BigInteger(), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("minimum", sa.Double(), nullable=True),
        sa.Column("maximum", sa.Double(), nullable=True),
        sa.Column("last", sa.Double(), nullable=True),
        sa.Column("last_text", sa.Text(), nullable=True),
        sa.Column("count", sa.BigInteger(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_metric_buckets_attempt_id_attempts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("attempt_id", "key", "level", "bucket", name=op.f("pk_metric_buckets")),
    )
    op.create_table(
        "streams",
        sa.Column("attempt_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("rank", sa.Integer(), nullable=False),
        sa.Column("node_rank", sa.Integer(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("parsed_bytes", sa.BigInteger(), nullable=False),
        sa.Column("is_complete", sa.Boolean(), nullable=False),
        sa.Column("updated_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_streams_attempt_id_attempts"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("attempt_id", "kind", "rank", name=op.f("pk_streams")),
    )
    op.create_table(
        "allocations",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("attempt_node_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("node_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("gpu_index", sa.Integer(), nullable=False),
        sa.Column("allocated_at", sa.Double(), nullable=False),
        sa.Column("released_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt_node_id"],
            ["attempt_nodes.id"],
            name=op.f("fk_allocations_attempt_node_id_attempt_nodes"),
            ondelete="CASCADE",
        ),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_allocations_node_id_nodes")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_allocations")),
    )
    with op.batch_alter_table("allocations", schema=None) as batch_op:
        batch_op.create_index("ix_allocations_attempt_node_id", ["attempt_node_id"], unique=False)
        batch_op.create_index(
            "ux_allocations_open_gpu",
            ["node_id", "gpu_index"],
            unique=True,
            sqlite_where=sa.text("released_at IS NULL"),
            postgresql_where=sa.text("released_at IS NULL"),
        )
    for table, states in TERMINAL.items():
        _make_final(table, states)


def _make_final(table: str, states: tuple[str, ...]) -> None:
    listed = ", ".join(f"'{state}'" for state in states)
    if op.get_bind().dialect.name == "sqlite":
        op.execute(
            f"CREATE TRIGGER {table}_final BEFORE UPDATE OF state ON {table} "
            f"WHEN OLD.state IN ({listed}) AND NEW.state <> OLD.state "
            f"BEGIN SELECT RAISE(ABORT, '{table}: a terminal state is final'); END"
        )
        return
    op.execute(
        f"CREATE FUNCTION {table}_final() RETURNS trigger LANGUAGE plpgsql AS $$ BEGIN "
        f"RAISE EXCEPTION '{table}: a terminal state is final' USING ERRCODE = 'integrity_constraint_violation'; "
        f"END $$"
    )
    op.execute(
        f"CREATE TRIGGER {table}_final BEFORE UPDATE OF state ON {table} FOR EACH ROW "
        f"WHEN (OLD.state IN ({listed}) AND NEW.state <> OLD.state) EXECUTE FUNCTION {table}_final()"
    )


def downgrade() -> None:
    for table in TERMINAL:
        if op.get_bind().dialect.name == "sqlite":
            op.execute(f"DROP TRIGGER {table}_final")
        else:
            op.execute(f"DROP TRIGGER {table}_final ON {table}")
            op.execute(f"DROP FUNCTION {table}_final()")
    with op.batch_alter_table("allocations", schema=None) as batch_op:
        batch_op.drop_index(
            "ux_allocations_open_gpu",
            sqlite_where=sa.text("released_at IS NULL"),
            postgresql_where=sa.text("released_at IS NULL"),
        )
        batch_op.drop_index("ix_allocations_attempt_node_id")

    op.drop_table("allocations")
    op.drop_table("streams")
    op.drop_table("metric_buckets")
    with op.batch_alter_table("attempt_nodes", schema=None) as batch_op:
        batch_op.drop_index(
            "ix_attempt_nodes_open_node",
            sqlite_where=sa.text("state <> 'ended'"),
            postgresql_where=sa.text("state <> 'ended'"),
        )

    op.drop_table("attempt_nodes")
    with op.batch_alter_table("events", schema=None) as batch_op:
        batch_op.drop_index("ix_events_job_id_id")

    op.drop_table("events")
    with op.batch_alter_table("attempts", schema=None) as batch_op:
        batch_op.drop_index(
            "ux_attempts_open_job",
            sqlite_where=sa.text("state <> 'ended'"),
            postgresql_where=sa.text("state <> 'ended'"),
        )
        batch_op.drop_index(
            "ix_attempts_open", sqlite_where=sa.text("state <> 'ended'"), postgresql_where=sa.text("state <> 'ended'")
        )

    op.drop_table("attempts")
    with op.batch_alter_table("tokens", schema=None) as batch_op:
        batch_op.drop_index("ix_tokens_user_id")

    op.drop_table("tokens")
    with op.batch_alter_table("memberships", schema=None) as batch_op:
        batch_op.drop_index("ix_memberships_user_id")

    op.drop_table("memberships")
    with op.batch_alter_table("jobs", schema=None) as batch_op:
        batch_op.drop_index("ix_jobs_team_id_submitted_at_id")
        batch_op.drop_index("ix_jobs_submitted_at_id")
        batch_op.drop_index("ix_jobs_state_submitted_at_id")
        batch_op.drop_index("ix_jobs_owner_id_submitted_at_id")

    op.drop_table("jobs")
    op.drop_table("idempotency_keys")
    op.drop_table("gpus")
    op.drop_table("bundles")
    op.drop_table("users")
    op.drop_table("teams")
    op.drop_table("pool")
    op.drop_table("outbox")
    op.drop_table("nodes")
    op.drop_table("leader_lease")
