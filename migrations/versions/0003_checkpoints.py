"""Accepted checkpoints, what an attempt resumes from, and which shared folder a node sees."""

from typing import Any

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"
branch_labels = None
depends_on = None

NEW_COLUMNS: tuple[tuple[str, str, sa.types.TypeEngine[Any]], ...] = (
    ("attempts", "resume_from", sa.Text()),
    ("attempts", "shared_folder_id", sa.Text()),
    ("attempts", "forgotten_at", sa.Double()),
    ("nodes", "shared_folder_id", sa.Text()),
    ("bundles", "hides_trainer", sa.Boolean()),
)


def upgrade() -> None:
    for table, name, kind in NEW_COLUMNS:
        op.add_column(table, sa.Column(name, kind, nullable=True))
    op.create_table(
        "checkpoints",
        sa.Column("id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("job_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("attempt_id", sa.BigInteger().with_variant(sa.Integer(), "sqlite"), nullable=False),
        sa.Column("step", sa.BigInteger(), nullable=False),
        sa.Column("path", sa.Text(), nullable=False),
        sa.Column("samples_seen", sa.BigInteger(), nullable=False),
        sa.Column("num_bytes", sa.BigInteger(), nullable=False),
        sa.Column("shared_folder_id", sa.Text(), nullable=True),
        sa.Column("node_names", sa.Text(), nullable=False),
        sa.Column("accepted_at", sa.Double(), nullable=False),
        sa.Column("removed_at", sa.Double(), nullable=True),
        sa.ForeignKeyConstraint(
            ["attempt_id"], ["attempts.id"], name=op.f("fk_checkpoints_attempt_id_attempts"), ondelete="CASCADE"
        ),
        sa.ForeignKeyConstraint(["job_id"], ["jobs.id"], name=op.f("fk_checkpoints_job_id_jobs"), ondelete="CASCADE"),
        sa.PrimaryKeyConstraint("id", name=op.f("pk_checkpoints")),
        sa.UniqueConstraint("job_id", "path", name=op.f("uq_checkpoints_job_id_path")),
    )
    op.create_index(
        "ix_checkpoints_kept_job",
        "checkpoints",
        ["job_id", "step"],
        unique=False,
        sqlite_where=sa.text("removed_at IS NULL"),
        postgresql_where=sa.text("removed_at IS NULL"),
    )


def downgrade() -> None:
    op.drop_table("checkpoints")
    for table, name, _ in reversed(NEW_COLUMNS):
        op.drop_column(table, name)  # in place: rebuilding a table would lose the conditions of its partial indexes
