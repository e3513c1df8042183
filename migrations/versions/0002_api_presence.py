"""When an API last said that it is there, so that a sweeper in another process does not count its downtime."""

import sqlalchemy as sa
from alembic import op

revision = "0002"
down_revision = "0001"
branch_labels = None
depends_on = None


def upgrade() -> None:
    with op.batch_alter_table("pool", schema=None) as batch_op:
        batch_op.add_column(sa.Column("api_seen_at", sa.Double(), nullable=True))


def downgrade() -> None:
    with op.batch_alter_table("pool", schema=None) as batch_op:
        batch_op.drop_column("api_seen_at")
