"""Nodes, their GPUs (on a node without any: CPU slots), and how much each GPU was last seen to do."""

from sqlalchemy import BigInteger, Boolean, Column, Double, ForeignKey, Integer, Table, Text, false

from service.db.tables.base import METADATA, BigId, json_column, state_check, state_column, time_column
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
    # Gets no new work: why, until when (null: until somebody says so), and whether what runs there is moved away.
    Column("cordon_reason", Text),
    time_column("cordon_until"),
    Column("is_draining", Boolean, nullable=False, server_default=false()),
    # {"label": "value"}, as the admin and the agent say; `switch` names the network switch.
    json_column("labels", nullable=False, server_default="{}"),
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

gpu_use = Table(
    "gpu_use",
    METADATA,
    Column("node_id", ForeignKey("nodes.id", ondelete="CASCADE"), primary_key=True),
    Column("gpu_index", Integer, primary_key=True),
    time_column("at", nullable=False),
    # Share of the time in which it worked, 0 to 1.
    Column("utilisation", Double, nullable=False),
    Column("memory_bytes", BigInteger, nullable=False),
    time_column("idle_since"),
)
