"""The database: tables, transactions, migrations, and the only writer of a state (`transitions`)."""
