"""Each attempt has a size of its own, and a job with a range of GPUs tells on which layouts it may start."""

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"
branch_labels = None
depends_on = None

SIZE = ("num_nodes", "gpus_per_node", "processes_per_node")
"""Columns that a job has had; until now each of its attempts had just that size."""


def upgrade() -> None:
    op.add_column("jobs", sa.Column("layouts", sa.Text(), nullable=True))
    for name in SIZE:
        # In place: rebuilding a table would lose the conditions of its partial indexes. So it takes a default at first.
        op.add_column("attempts", sa.Column(name, sa.Integer(), nullable=False, server_default="1"))
    of_job = ", ".join(f"{name} = (SELECT jobs.{name} FROM jobs WHERE jobs.id = attempts.job_id)" for name in SIZE)
    op.execute(f"UPDATE attempts SET {of_job}")
    if op.get_bind().dialect.name != "sqlite":  # which cannot drop one
        for name in SIZE:
            op.alter_column("attempts", name, server_default=None)


def downgrade() -> None:
    for name in reversed(SIZE):
        op.drop_column("attempts", name)
    op.drop_column("jobs", "layouts")
