"""Metadata with a naming convention, and the column types that both databases share.

Times are epoch seconds (double precision): SQLite has no time type with a zone. JSON is text written by us: what is
read back is byte for byte what was stored.
"""

from enum import StrEnum
from typing import Any

from sqlalchemy import BigInteger, CheckConstraint, Column, Double, Integer, MetaData, Text

METADATA = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_name)s_%(referred_table_name)s",
        "pk": "pk_%(table_name)s",
    }
)

# SQLite counts rows up only in a plain INTEGER primary key.
BigId = BigInteger().with_variant(Integer, "sqlite")


def time_column(name: str, *, nullable: bool = True) -> Column[float]:
    """Epoch seconds."""
    return Column(name, Double, nullable=nullable)


def json_column(name: str, *, nullable: bool = True, **options: Any) -> Column[str]:
    """JSON text."""
    return Column(name, Text, nullable=nullable, **options)


def state_column(states: type[StrEnum], name: str = "state", **options: Any) -> Column[str]:
    """A state as text."""
    return Column(name, Text, nullable=False, **options)


def state_check(states: type[StrEnum], name: str = "state") -> CheckConstraint:
    """Only the states of the enum can be stored."""
    listed = ", ".join(f"'{state}'" for state in states)
    return CheckConstraint(f"{name} IN ({listed})", name=name)
