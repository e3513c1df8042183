"""What past forecasts taught outlives the process that learnt it, and every server reads the same."""

import sqlalchemy as sa
from alembic import op

revision = "0006"
down_revision = "0005"
branch_labels = None
depends_on = None


def upgrade() -> None:
    op.create_table(
        "forecast_experience",
        sa.Column("id", sa.Integer(), primary_key=True),
        sa.Column("experience", sa.Text(), nullable=False),
        sa.Column("written_at", sa.Double(), nullable=False),
    )


def downgrade() -> None:
    op.drop_table("forecast_experience")
