"""Routes of the pool: its nodes, their GPUs and who holds them; an admin's word that a silent node is off."""

from __future__ import annotations

from collections import defaultdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from sqlalchemy import select
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import State, caller, json_response
from service.auth.permissions import Action
from service.auth.principals import Principal
from service.clock import rfc3339
from service.db.tables import allocations, attempt_nodes, attempts, gpus, jobs, nodes
from service.operations.release_node import release_node

router = APIRouter(prefix=f"{API_PREFIX}/nodes")


@router.get("")
def list_nodes(state: State, principal: Annotated[Principal, Depends(caller(Action.POOL_SEE))]) -> Response:
    """All nodes. A GPU held by a private job of another team shows as held, without the job."""
    with state.database.read() as connection:
        holders = {
            (row.node_id, row.gpu_index): row
            for row in connection.execute(
                select(
                    allocations.c.node_id,
                    allocations.c.gpu_index,
                    jobs.c.id.label("job_id"),
                    jobs.c.is_private,
                    jobs.c.owner_id,
                    jobs.c.team_id,
                )
                .join(attempt_nodes, attempt_nodes.c.id == allocations.c.attempt_node_id)
                .join(attempts, attempts.c.id == attempt_nodes.c.attempt_id)
                .join(jobs, jobs.c.id == attempts.c.job_id)
                .where(allocations.c.released_at.is_(None))
            )
        }
        devices: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
        for gpu in connection.execute(select(gpus).where(gpus.c.removed_at.is_(None)).order_by(gpus.c.gpu_index)):
            holder = holders.get((gpu.node_id, gpu.gpu_index))
            devices[gpu.node_id].append(
                {
                    "index": gpu.gpu_index,
                    "uuid": gpu.uuid,
                    "kind": gpu.kind,
                    "model": gpu.model,
                    "memory_bytes": gpu.memory_bytes,
                    "job_id": holder.job_id if holder and _may_name(principal, holder) else None,
                    "held": holder is not None,
                    "quarantined": gpu.quarantine_reason,
                }
            )
        rows = connection.execute(select(nodes).order_by(nodes.c.name)).all()
    return json_response(
        {
            "items": [
                {
                    "name": node.name,
                    "state": node.state,
                    "address": node.address,
                    "cpus": node.cpus,
                    "memory_bytes": node.memory_bytes,
                    "gpus": devices[node.id],
                    "cordoned": node.cordon_reason,
                    "shared_folder_id": node.shared_folder_id,
                    "last_heartbeat_at": rfc3339(node.last_heartbeat_at),
                    "version": node.agent_version,
                }
                for node in rows
            ]
        }
    )


@router.post("/{name}/release")
def post_release(
    state: State, principal: Annotated[Principal, Depends(caller(Action.ADMINISTER))], name: str
) -> Response:
    """Declare that nothing runs on a node that does not answer."""
    num_ended = release_node(state.database, name=name, actor=principal.name)
    return json_response({"name": name, "ended": num_ended})


def _may_name(principal: Principal, holder: Any) -> bool:
    is_insider = principal.is_admin or principal.user_id == holder.owner_id or principal.is_member(holder.team_id)
    return is_insider or not holder.is_private
