"""All tables. Importing this module registers every table on `METADATA`."""

from service.db.tables.attempts import allocations, attempt_nodes, attempts
from service.db.tables.base import METADATA
from service.db.tables.checkpoints import checkpoints
from service.db.tables.identity import bundles, idempotency_keys, memberships, teams, tokens, users
from service.db.tables.jobs import events, job_dependencies, jobs, outbox
from service.db.tables.nodes import gpu_use, gpus, nodes
from service.db.tables.plumbing import forecast_experience, leader_lease, pool
from service.db.tables.scheduling import nominations, world_changes
from service.db.tables.streams import metric_buckets, streams

__all__ = [
    "METADATA",
    "allocations",
    "attempt_nodes",
    "attempts",
    "bundles",
    "checkpoints",
    "events",
    "forecast_experience",
    "gpu_use",
    "gpus",
    "idempotency_keys",
    "job_dependencies",
    "jobs",
    "leader_lease",
    "memberships",
    "metric_buckets",
    "nodes",
    "nominations",
    "outbox",
    "pool",
    "streams",
    "teams",
    "tokens",
    "users",
    "world_changes",
]
