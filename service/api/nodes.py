"""Routes of the pool: its nodes, their GPUs and who holds them; what an admin says of a node.

An admin cordons, drains, resumes and labels a node, or says that a silent one is off. Each is told in an event.
"""

from __future__ import annotations

import json
from collections import defaultdict
from typing import Annotated, Any

from fastapi import APIRouter, Depends
from sqlalchemy import Connection, Row, select
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import AppState, JsonBody, State, caller, json_response
from service.api.members import flag, only, reason_given
from service.api.times import end_given
from service.auth.permissions import Action
from service.auth.principals import Principal
from service.clock import rfc3339
from service.db.tables import allocations, attempt_nodes, attempts, gpu_use, gpus, jobs, nodes, users
from service.domain.gpu_use import idle_while_held
from service.domain.text import shown
from service.errors import InvalidRequest, NotFound
from service.operations.cordon_node import cordon_node, resume_node
from service.operations.drain_node import drain_node
from service.operations.label_node import label_node
from service.operations.release_node import release_node

router = APIRouter(prefix=f"{API_PREFIX}/nodes")
Admin = Annotated[Principal, Depends(caller(Action.ADMINISTER))]
MOST_IN_REASON = 500


@router.get("")
def list_nodes(state: State, principal: Annotated[Principal, Depends(caller(Action.POOL_SEE))]) -> Response:
    """All nodes. A GPU held by a private job of another team shows as held, without the job."""
    with state.database.read() as connection:
        return json_response({"items": nodes_json(connection, principal)})


def nodes_json(connection: Connection, principal: Principal) -> list[dict[str, Any]]:
    """All nodes by name, with what each GPU is used for and how much, as this principal may see it."""
    holders = {(row.node_id, row.gpu_index): row for row in connection.execute(_HOLDERS)}
    devices: defaultdict[int, list[dict[str, Any]]] = defaultdict(list)
    for gpu in connection.execute(_GPUS):
        devices[gpu.node_id].append(_gpu_json(gpu, holders.get((gpu.node_id, gpu.gpu_index)), principal))
    return [_node_json(node, devices[node.id]) for node in connection.execute(select(nodes).order_by(nodes.c.name))]


_HOLDERS = (
    select(
        allocations.c.node_id,
        allocations.c.gpu_index,
        jobs.c.id.label("job_id"),
        jobs.c.is_private,
        jobs.c.owner_id,
        jobs.c.team_id,
        attempts.c.running_at,
        users.c.name.label("owner"),
    )
    .join(attempt_nodes, attempt_nodes.c.id == allocations.c.attempt_node_id)
    .join(attempts, attempts.c.id == attempt_nodes.c.attempt_id)
    .join(jobs, jobs.c.id == attempts.c.job_id)
    .join(users, users.c.id == jobs.c.owner_id)
    .where(allocations.c.released_at.is_(None))
)
_GPUS = (
    select(gpus, gpu_use.c.utilisation, gpu_use.c.memory_bytes.label("memory_used_bytes"), gpu_use.c.idle_since)
    .join(gpu_use, (gpu_use.c.node_id == gpus.c.node_id) & (gpu_use.c.gpu_index == gpus.c.gpu_index), isouter=True)
    .where(gpus.c.removed_at.is_(None))
    .order_by(gpus.c.node_id, gpus.c.gpu_index)
)


def _gpu_json(gpu: Any, holder: Any | None, principal: Principal) -> dict[str, Any]:
    is_named = holder is not None and _may_name(principal, holder)
    idle = gpu.idle_since if holder is None else idle_while_held(gpu.idle_since, holder.running_at)
    return {
        "index": gpu.gpu_index,
        "uuid": gpu.uuid,
        "kind": gpu.kind,
        "model": gpu.model,
        "memory_bytes": gpu.memory_bytes,
        "link_group": gpu.link_group,
        "numa_node": gpu.numa_node,
        "job_id": holder.job_id if holder and is_named else None,
        "owner": holder.owner if holder and is_named else None,
        "held": holder is not None,
        "quarantined": gpu.quarantine_reason,
        "utilisation": gpu.utilisation,
        "memory_used_bytes": gpu.memory_used_bytes,
        "idle_since": rfc3339(idle),
    }


def _node_json(node: Row[Any], devices: list[dict[str, Any]]) -> dict[str, Any]:
    return {
        "name": node.name,
        "state": node.state,
        "address": node.address,
        "cpus": node.cpus,
        "memory_bytes": node.memory_bytes,
        "gpus": devices,
        "cordoned": node.cordon_reason,
        "cordon_until": rfc3339(node.cordon_until),
        "draining": node.is_draining,
        "labels": json.loads(node.labels),
        "shared_folder_id": node.shared_folder_id,
        "last_heartbeat_at": rfc3339(node.last_heartbeat_at),
        "version": node.agent_version,
    }


def _may_name(principal: Principal, holder: Any) -> bool:
    is_insider = principal.is_admin or principal.user_id == holder.owner_id or principal.is_member(holder.team_id)
    return is_insider or not holder.is_private


# --- What an admin says ----------------------------------------------------------------------------------------------


@router.post("/{name}/cordon")
def post_cordon(state: State, principal: Admin, name: str, body: JsonBody) -> Response:
    """Give a node no new work; what runs there runs on."""
    only(body, "reason", "until")
    reason, until = _needed_reason(body), _until(state, body)
    cordon_node(state.database, name=name, reason=reason, until=until, actor=principal.name)
    return json_response(_one(state, principal, name))


@router.post("/{name}/drain")
def post_drain(state: State, principal: Admin, name: str, body: JsonBody) -> Response:
    """Give a node no new work, and move the jobs that can go on elsewhere; with `now`, stop the others too."""
    only(body, "reason", "until", "now")
    is_now = flag(body, "now")
    drained = drain_node(
        state.database,
        state.settings,
        name=name,
        reason=_needed_reason(body),
        until=_until(state, body),
        is_now=is_now,
        actor=principal.name,
    )
    node = _one(state, principal, name)
    return json_response(
        {
            **node,
            "stopped": drained.stopped,
            "going_on": drained.going_on,
            "cannot_move": [{"job_id": job_id, "why": why} for job_id, why in drained.cannot_move],
        }
    )


@router.post("/{name}/resume")
def post_resume(state: State, principal: Admin, name: str) -> Response:
    """Let a cordoned or draining node take work again. One that does already stays as it is."""
    is_changed = resume_node(state.database, name=name, actor=principal.name)
    return json_response({**_one(state, principal, name), "changed": is_changed})


@router.post("/{name}/labels")
def post_labels(state: State, principal: Admin, name: str, body: JsonBody) -> Response:
    """Set labels of a node; null takes one away, those not named stay."""
    only(body, "labels", "reason")
    changes = body.get("labels")
    if not isinstance(changes, dict) or not changes:
        raise InvalidRequest(
            f"labels is {shown(changes) if changes else 'empty'}, not an object with labels",
            fix='Send it like {"switch": "leaf-3"}.',
        )
    label_node(state.database, name=name, changes=changes, reason=_reason(body), actor=principal.name)
    return json_response(_one(state, principal, name))


@router.post("/{name}/release")
def post_release(state: State, principal: Admin, name: str) -> Response:
    """Declare that nothing runs on a node that does not answer."""
    num_ended = release_node(state.database, name=name, actor=principal.name)
    return json_response({"name": name, "ended": num_ended})


def _one(state: AppState, principal: Principal, name: str) -> dict[str, Any]:
    with state.database.read() as connection:
        found = [node for node in nodes_json(connection, principal) if node["name"] == name]
    if not found:
        raise NotFound(f"there is no node {name}", fix="Look it up: gang node ls.")
    return found[0]


def _reason(body: dict[str, Any]) -> str:
    return reason_given(body, most=MOST_IN_REASON).removesuffix(".")


def _needed_reason(body: dict[str, Any]) -> str:
    if not (reason := _reason(body)):
        raise InvalidRequest("reason is missing", fix="Say why: everybody whose job waits for the node reads it.")
    return reason


def _until(state: AppState, body: dict[str, Any]) -> float | None:
    with state.database.read() as connection:
        now = state.database.now(connection)
    return end_given(body.get("until"), now)
