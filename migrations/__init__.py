"""Alembic migrations. Every revision goes up and down on both databases, under test, on tables with rows."""
