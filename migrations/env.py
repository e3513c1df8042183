"""Alembic's entry: runs the revisions on the connection that `service.db.migrate` gives it."""

from alembic import context
from sqlalchemy import create_engine

from service.db.tables import METADATA


def run(connection) -> None:  # type: ignore[no-untyped-def]  # Alembic's own calling convention
    """Run the revisions in one transaction."""
    context.configure(
        connection=connection, target_metadata=METADATA, render_as_batch=True, transaction_per_migration=False
    )
    with context.begin_transaction():
        context.run_migrations()


given = context.config.attributes.get("connection")
if given is not None:
    run(given)
else:
    with create_engine(context.config.attributes["url"]).connect() as own:
        run(own)
        own.commit()
