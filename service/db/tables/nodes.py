"""Nodes and their GPUs (on a node without any: CPU slots)."""

from sqlalchemy import BigInteger, Column, Double, ForeignKey, Integer, Table, Text

from service.db.tables.base import METADATA, BigId, state_check, state_column, time_column
from service.domain.states import NodeState

nodes = Table(
    "nodes",
    METADATA,
    Column("id", BigId, primary_key=True),
    Column("name", Text, nullable=False, unique=True),
    Column("credential_hash", Text, nullable=False, unique=True),
    Column("address", Text, nullable=False),
    state_column(NodeState),
    Column("cpus", Double, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("incarnation", Text),
    Column("boot_id", Text),
    Column("agent_version", Text),
    Column("cordon_reason", Text),
    Column("inventory_hash", Text),
    # Nodes that tell the same id see the same folder.
    Column("shared_folder_id", Text),
    time_column("enrolled_at", nullable=False),
    time_column("last_heartbeat_at"),
    time_column("lost_at"),
    state_check(NodeState),
)

gpus = Table(
    "gpus",
    METADATA,
    Column("node_id", ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
    Column("gpu_index", Integer, primary_key=True),
    Column("uuid", Text, nullable=False),
    Column("kind", Text, nullable=False),
    Column("model", Text, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    Column("link_group", Text),
    Column("numa_node", Integer),
    Column("quarantine_reason", Text),
    time_column("removed_at"),
)
