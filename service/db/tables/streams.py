"""Sizes of stored streams (log and events of a rank), and the pyramid of metrics.

A stream's bytes lie in a file; readers stop at the size stored here, so bytes beyond it do not exist.
"""

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Integer, Table, Text

from service.db.tables.base import METADATA, time_column

streams = Table(
    "streams",
    METADATA,
    Column("attempt_id", ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True),
    Column("kind", Text, primary_key=True),
    Column("rank", Integer, primary_key=True),
    Column("node_rank", Integer, nullable=False),
    Column("num_bytes", BigInteger, nullable=False),
    Column("parsed_bytes", BigInteger, nullable=False),
    Column("is_complete", Boolean, nullable=False),
    time_column("updated_at", nullable=False),
)

metric_buckets = Table(
    "metric_buckets",
    METADATA,
    Column("attempt_id", ForeignKey("attempts.id", ondelete="CASCADE"), primary_key=True),
    Column("key", Text, primary_key=True),
    Column("level", Integer, primary_key=True),
    Column("bucket", BigInteger, primary_key=True),
    Column("step", BigInteger, nullable=False),
    Column("minimum", Double),
    Column("maximum", Double),
    Column("last", Double),
    Column("last_text", Text),
    Column("count", BigInteger, nullable=False),
)
