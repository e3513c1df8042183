"""Routes of nodes (enrol, heartbeat, claim) and of supervisors (directive, rendezvous, streams, reports)."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Depends, Path, Query
from sqlalchemy import select
from starlette.concurrency import run_in_threadpool
from starlette.responses import FileResponse, Response

from gangline.protocol.launch import Directive, NodeReport, decode, encode
from gangline.protocol.names import API_PREFIX, TOKEN_PREFIXES
from service import clock
from service.api.deps import (
    MAX_ID,
    AppState,
    Body,
    CallingPart,
    JsonBody,
    Node,
    ReportBody,
    RowId,
    State,
    caller,
    json_response,
)
from service.auth.permissions import Action
from service.auth.principals import Principal
from service.db.tables import attempts, jobs
from service.domain.gpu_use import GPUSample
from service.domain.spec import JobSpec
from service.domain.text import shown
from service.errors import InvalidRequest, NotFound
from service.operations import report_attempt
from service.operations.append_stream import append_stream
from service.operations.claim_attempt import claim_attempt
from service.operations.enrol_node import enrol_node
from service.operations.heartbeat_node import GPUFacts, Heartbeat, heartbeat_node
from service.operations.manage_identity import check_name
from service.operations.report_attempt import Part, open_part, read_directive

router = APIRouter(prefix=f"{API_PREFIX}/agent")
DIRECTIVE_WAIT_SECONDS = 60.0
MAX_FOLDER_ID_LENGTH = 200
_SAME_VERSION = "Run the agent in the version of the server: an agent of another one may tell something else."
_PART = "/attempts/{attempt_id}/nodes/{node_rank}"


@router.post("/enrol")
def post_enrol(
    state: State, principal: Annotated[Principal, Depends(caller(Action.ENROL_NODE))], body: JsonBody
) -> Response:
    """A node joins the pool and gets a credential of its own."""
    name = check_name(str(body.get("name", "")), "node name")
    address = str(body.get("address", ""))
    if not address or len(address) > 255 or any(c.isspace() for c in address):
        raise InvalidRequest(
            f"address {shown(address)} is not an address that peers can reach",
            fix="Give the host name or IP address of the node, of at most 255 characters and without spaces.",
        )
    credential = enrol_node(state.database, name=name, address=address, actor=principal.name)
    return json_response({"node_name": name, "pool_id": state.pool_id, "credential": credential})


@router.post("/heartbeat")
def post_heartbeat(state: State, node: Node, body: ReportBody) -> Response:
    """The node lives; the answer says what to start and what to forget."""
    answer = heartbeat_node(state.database, state.settings, state.pool_id, node.id, _heartbeat(body))
    return json_response(vars(answer))


def _heartbeat(body: dict[str, Any]) -> Heartbeat:
    try:
        inventory = body["inventory"]
        return Heartbeat(
            incarnation=str(body["incarnation"]),
            boot_id=str(body["boot_id"]),
            version=str(body["version"]),
            cpus=float(inventory["cpus"]),
            memory_bytes=int(inventory["memory_bytes"]),
            gpus=tuple(
                GPUFacts(
                    index=int(gpu["index"]),
                    uuid=str(gpu["uuid"]),
                    kind=str(gpu["kind"]),
                    model=str(gpu["model"]),
                    memory_bytes=int(gpu["memory_bytes"]),
                    link_group=None if gpu.get("link_group") is None else str(gpu["link_group"]),
                    numa_node=None if gpu.get("numa_node") is None else int(gpu["numa_node"]),
                )
                for gpu in inventory["gpus"]
            ),
            attempts=frozenset(int(attempt) for attempt in body["attempts"]),
            process_sets=frozenset(int(attempt) for attempt in body["process_sets"]),
            shared_folder_id=_folder_id(inventory.get("shared_folder_id")),
            gpu_use=tuple(
                GPUSample(
                    index=int(use["index"]),
                    utilisation=min(1.0, max(0.0, float(use["utilisation"]))),
                    memory_bytes=_memory(use["memory_bytes"]),
                )
                for use in body.get("gpu_use") or ()
            ),
            quarantined={str(uuid): str(why) for uuid, why in dict(body.get("quarantined") or {}).items()},
        )
    except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
        raise InvalidRequest(f"not a heartbeat: {type(error).__name__} {error}", fix=_SAME_VERSION) from error


def _memory(value: Any) -> int:
    if not 0 <= int(value) <= MAX_ID:
        raise ValueError(f"memory_bytes {str(value)[:50]}")
    return int(value)


def _folder_id(value: Any) -> str | None:
    if value is not None and (not isinstance(value, str) or not 0 < len(value) <= MAX_FOLDER_ID_LENGTH):
        raise ValueError(f"shared_folder_id {str(value)[:50]!r}")
    return value


@router.post("/attempts/{attempt_id}/claim")
def post_claim(state: State, node: Node, attempt_id: RowId, body: JsonBody) -> Response:
    """The node claims its part with a token that it made; the same token gets the same answer."""
    token = body.get("token")
    if not isinstance(token, str) or not token.startswith(TOKEN_PREFIXES["attempt"]) or len(token) < 36:
        raise InvalidRequest(
            "the token of the claim is not a fresh random token of at least 36 characters with the prefix "
            f"{TOKEN_PREFIXES['attempt']}",
            fix=_SAME_VERSION,
        )
    plan = claim_attempt(
        state.database,
        state.settings,
        state.pool_id,
        node,
        attempt_id,
        token=token,
        incarnation=str(body.get("incarnation", "")),
    )
    return json_response(encode(plan))


@router.get(f"{_PART}/directive")
async def get_directive(
    state: State,
    part: CallingPart,
    version: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    wait: Annotated[float, Query(ge=0)] = 0.0,
) -> Response:
    """What is wanted of the supervisor; with `wait`, as soon as that is newer than `version`."""
    deadline = clock.monotonic() + min(wait, DIRECTIVE_WAIT_SECONDS)
    with state.bus.subscribe(f"directive:{part.attempt_id}") as subscription:
        while True:
            directive = await run_in_threadpool(_read_directive, state, part)
            left = deadline - clock.monotonic()
            if directive.version > version or left <= 0 or state.bus.is_closed:
                return json_response(encode(directive))
            await subscription.wait(left if state.database.is_sqlite else min(left, 0.5))


def _read_directive(state: AppState, part: Part) -> Directive:
    with state.database.read() as connection:
        return read_directive(connection, part)


@router.post(f"{_PART}/rendezvous")
def post_rendezvous(state: State, part: CallingPart, body: JsonBody) -> Response:
    """Node rank 0 tells where rank 0 listens."""
    address, port = body.get("address"), body.get("port")
    if not isinstance(address, str) or not isinstance(port, int) or not 0 < port < 65536 or part.node_rank != 0:
        raise InvalidRequest(
            f"node rank {part.node_rank} gives the address {shown(address)} and the port {shown(port)}",
            fix="Node rank 0 alone gives them: the address is a text, the port a number from 1 to 65535.",
        )
    return json_response(encode(report_attempt.report_rendezvous(state.database, part, address=address, port=port)))


@router.post(f"{_PART}/started")
def post_started(state: State, part: CallingPart, body: JsonBody) -> Response:
    """All ranks of the node run."""
    sent_at = body.get("sent_at", 0.0)
    if isinstance(sent_at, bool) or not isinstance(sent_at, int | float):
        raise InvalidRequest(f"sent_at is {shown(sent_at)}, not a number", fix="Send epoch seconds, or leave it out.")
    return json_response(encode(report_attempt.report_started(state.database, part, sent_at=float(sent_at))))


@router.put(f"{_PART}/streams/{{kind}}/{{rank}}")
def put_stream(
    state: State,
    part: CallingPart,
    kind: str,
    rank: Annotated[int, Path(ge=0, le=2**31 - 1)],
    offset: Annotated[int, Query(ge=0, le=MAX_ID)],
    body: Body,
) -> Response:
    """Bytes of a rank's log or events, at their offset."""
    size = append_stream(state.database, state.streams, part, kind, rank, offset, body)
    return json_response({"size": size})


@router.post(f"{_PART}/failing")
def post_failing(state: State, part: CallingPart, body: ReportBody) -> Response:
    """The first failure on the node."""
    directive = report_attempt.report_failing(state.database, state.settings, part, _report(body))
    return json_response(encode(directive))


@router.post(f"{_PART}/ended")
def post_ended(state: State, part: CallingPart, body: ReportBody) -> Response:
    """The attempt has ended on the node."""
    report_attempt.report_ended(state.database, state.settings, part, _report(body))
    return json_response({})


def _report(body: dict[str, Any]) -> NodeReport:
    try:
        return decode(NodeReport, body)
    except ValueError as error:
        raise InvalidRequest(f"not a node report: {error}", fix=_SAME_VERSION) from error


@router.get(f"{_PART}/bundle")
def get_bundle(state: State, part: CallingPart) -> Response:
    """The job's code."""
    with state.database.read() as connection:
        open_part(connection, part)
        spec = connection.execute(
            select(jobs.c.spec).join(attempts, attempts.c.job_id == jobs.c.id).where(attempts.c.id == part.attempt_id)
        ).scalar_one()
    digest = JobSpec.from_json(spec).code.bundle
    path = state.bundles.path(digest) if digest else None
    if path is None or not path.is_file():
        raise NotFound(f"attempt {part.attempt_id} has no stored bundle")
    return FileResponse(path, media_type="application/gzip")
