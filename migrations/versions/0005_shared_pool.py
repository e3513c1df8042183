"""The shared pool: quotas and caps, what a job asks of its nodes and its turn, nominations, and world changes."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0005"
down_revision = "0004"
branch_labels = None
depends_on = None

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")

NULLABLE_COLUMNS: tuple[tuple[str, str, sa.types.TypeEngine[Any]], ...] = (
    ("teams", "quota_gpus", sa.Integer()),
    ("teams", "quota_nodes", sa.Integer()),
    ("teams", "cap_gpus", sa.Integer()),
    ("users", "cap_gpus", sa.Integer()),
    ("jobs", "gpu_memory_bytes", sa.BigInteger()),
    ("jobs", "node_labels", sa.Text()),
    ("jobs", "limit_seconds", sa.Double()),
    ("jobs", "hold_reason", sa.Text()),
    ("jobs", "start_after", sa.Double()),
    ("jobs", "start_zone", sa.Text()),
    ("jobs", "measured_left_seconds", sa.Double()),
    ("jobs", "promoted_at", sa.Double()),
    ("nodes", "cordon_until", sa.Double()),
    ("attempts", "nominated_for", sa.BigInteger()),
    ("attempts", "checkpointed_at", sa.Double()),
)
DEFAULTED_COLUMNS: tuple[tuple[str, str, sa.types.TypeEngine[Any], Any], ...] = (
    ("users", "may_use_top_priority", sa.Boolean(), sa.false()),
    ("jobs", "is_exclusive", sa.Boolean(), sa.false()),
    ("jobs", "is_preemptible", sa.Boolean(), sa.false()),
    ("jobs", "on_time_limit", sa.Text(), "fail"),
    ("jobs", "num_stops", sa.Integer(), "0"),
    ("jobs", "served_seconds", sa.Double(), "0"),
    ("jobs", "wait_began_at", sa.Double(), "0"),
    ("nodes", "labels", sa.Text(), "{}"),
    ("nodes", "is_draining", sa.Boolean(), sa.false()),
    ("attempts", "busy_gpu_seconds", sa.Double(), "0"),
    ("attempts", "lost_gpu_seconds", sa.Double(), "0"),
)
"""The last is what each row of before has; `wait_began_at` is then filled from the job itself."""

FILL_FROM_SPEC = {
    "sqlite": (
        "UPDATE jobs SET wait_began_at = submitted_at, "
        "limit_seconds = json_extract(spec, '$.resources.time_limit_seconds'), "
        "is_preemptible = coalesce(json_extract(spec, '$.preemptible'), 0)"
    ),
    "postgresql": (
        "UPDATE jobs SET wait_began_at = submitted_at, "
        "limit_seconds = (spec::json #>> '{resources,time_limit_seconds}')::double precision, "
        "is_preemptible = coalesce((spec::json #>> '{preemptible}')::boolean, false)"
    ),
}
"""What a job of before said in its spec alone."""
FILL_FROM_LAST_ATTEMPT = (
    "UPDATE jobs SET served_seconds = coalesce(("
    "SELECT CASE WHEN attempts.ended_at > attempts.running_at THEN attempts.ended_at - attempts.running_at END "
    "FROM attempts WHERE attempts.job_id = jobs.id ORDER BY attempts.number DESC LIMIT 1), 0) "
    "WHERE state IN ('succeeded', 'failed', 'cancelled')"
)
"""For how long a job that has ended ran in the end. What is not known stays 0, which says nothing of its limit."""


def upgrade() -> None:
    # In place, as in 0004: rebuilding a table would lose the conditions of its partial indexes.
    for table, name, kind in NULLABLE_COLUMNS:
        op.add_column(table, sa.Column(name, kind, nullable=True))
    for table, name, kind, default in DEFAULTED_COLUMNS:
        op.add_column(table, sa.Column(name, kind, nullable=False, server_default=default))
    dialect = op.get_bind().dialect.name
    op.execute(FILL_FROM_SPEC[dialect])
    op.execute(FILL_FROM_LAST_ATTEMPT)
    if dialect != "sqlite":  # which cannot drop one
        op.alter_column("jobs", "wait_began_at", server_default=None)
    _create_tables()


def _create_tables() -> None:
    op.create_table(
        "job_dependencies",
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("needs_job_id", BIG_ID, nullable=False),
        sa.Column("condition", sa.Text(), nullable=False),
        sa.CheckConstraint("condition IN ('ok', 'any', 'not_ok')", name=op.f("ck_job_dependencies_condition")),
        sa.ForeignKeyConstraint(
            ["job_id"], ["jobs.id"], name=op.f("fk_job_dependencies_job_id_jobs"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(
            ["needs_job_id"], ["jobs.id"], name=op.f("fk_job_dependencies_needs_job_id_jobs"), ondelete="CASCADE"
        ),
        sa.PrimaryKeyConstraint("job_id", "needs_job_id", name=op.f("pk_job_dependencies")),
    )
    op.create_index("ix_job_dependencies_needs_job_id", "job_dependencies", ["needs_job_id"], unique=False)
    op.create_table(
        "nominations",
        sa.Column("job_id", BIG_ID, nullable=False),
        sa.Column("layout", sa.Text(), nullable=False),
        sa.Column("shares", sa.Text(), nullable=False),
        sa.Column("victims", sa.Text(), nullable=False),
        sa.Column("leader_epoch", sa.BigInteger(), nullable=False),
        sa.Column("created_at", sa.Double(), nullable=False),
        sa.Column("expires_at", sa.Double(), nullable=False),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_nominations_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("job_id", name=op.f("pk_nominations")),
    )
    op.create_table(
        "world_changes",
        sa.Column("id", BIG_ID, nullable=False),
        sa.Column("kind", sa.Text(), nullable=False),
        sa.Column("key", sa.BigInteger(), nullable=False),
        sa.CheckConstraint("kind IN ('job', 'node', 'team', 'user')", name=op.f("ck_world_changes_kind")),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_world_changes")),
    )
    op.create_table(
        "gpu_use",
        sa.Column("node_id", BIG_ID, nullable=False),
        sa.Column("gpu_index", sa.Integer(), nullable=False),
        sa.Column("at", sa.Double(), nullable=False),
        sa.Column("utilisation", sa.Double(), nullable=False),
        sa.Column("memory_bytes", sa.BigInteger(), nullable=False),
        sa.Column("idle_since", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(["node_id"], ["nodes.id"], name=op.f("fk_gpu_use_node_id_nodes"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("node_id", "gpu_index", name=op.f("pk_gpu_use")),
    )


def downgrade() -> None:
    for table in ("gpu_use", "world_changes", "nominations", "job_dependencies"):
        op.drop_table(table)
    for table, name, *_ in (*reversed(DEFAULTED_COLUMNS), *reversed(NULLABLE_COLUMNS)):
        op.drop_column(table, name)
