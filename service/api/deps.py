"""What routes share: the state of the app, who is calling, the body, the job that a path names."""

from __future__ import annotations

import json
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Annotated, Any, Final

from fastapi import Depends, Path, Query, Request
from sqlalchemy import Connection, Row, bindparam, select
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gangline.protocol.names import TOKEN_PREFIXES
from service.auth.permissions import Action, JobFacts, authorise
from service.auth.principals import Principal, PrincipalCache, load_node
from service.db.session import Database
from service.db.tables import jobs, teams, users
from service.domain.text import UNSTORABLE, shown
from service.errors import InvalidRequest, NotFound, Unauthorized
from service.events.bus import Bus
from service.events.dispatcher import HintHealth
from service.operations.commit_submissions import SubmissionCommitter
from service.operations.report_attempt import Part
from service.operations.submit_job import PoolShapes
from service.scheduler.held_world import HeldWorld
from service.settings import Settings
from service.storage.bundles import BundleFiles
from service.storage.streams import StreamFiles


@dataclass(frozen=True, kw_only=True)
class AppState:
    """What the app is made of; built once in `service.app`."""

    settings: Settings
    database: Database
    bus: Bus
    principals: PrincipalCache
    shapes: PoolShapes
    committer: SubmissionCommitter
    streams: StreamFiles
    bundles: BundleFiles
    hints: HintHealth
    held: HeldWorld
    pool_id: str
    version: str


def state_of(request: Request) -> AppState:
    """The app's state."""
    state: AppState = request.app.state.gangline
    return state


async def _state(request: Request) -> AppState:
    return state_of(request)


State = Annotated[AppState, Depends(_state)]


def bearer_token(request: Request) -> str:
    """The token of the Authorization header. Raises Unauthorized."""
    header = request.headers.get("authorization", "")
    scheme, _, token = header.partition(" ")
    if scheme.lower() != "bearer" or not token:
        raise Unauthorized("the request has no Authorization: Bearer token")
    return token.strip()


def caller(action: Action) -> Callable[[Request], Coroutine[Any, Any, Principal]]:
    """A dependency: the logged-in principal, allowed to do `action` in general. Every user route has one."""

    async def dependency(request: Request) -> Principal:
        token = bearer_token(request)
        principals = state_of(request).principals
        principal = principals.known(token)
        if principal is None:
            principal = await run_in_threadpool(principals.load, token)
        if principal is None:
            raise Unauthorized("this token is not valid (unknown, expired or revoked)")
        if action not in _JOB_ACTIONS:
            authorise(principal, action)
        elif principal.token_kind == "enrolment":
            authorise(principal, Action.JOB_SEE)
        request.scope["gangline_action"] = action
        return principal

    dependency.gangline_action = action  # type: ignore[attr-defined]  # read by the test that walks all routes
    return dependency


_JOB_ACTIONS = frozenset(
    {Action.JOB_SEE, Action.JOB_READ, Action.JOB_CANCEL, Action.JOB_REQUEUE, Action.JOB_EXTEND, Action.JOB_TURN}
)


async def node_caller(request: Request) -> Row[Any]:
    """A dependency: the node that this credential belongs to."""
    token = bearer_token(request)
    if not token.startswith(TOKEN_PREFIXES["node"]):
        raise Unauthorized("this route needs a node's credential")
    database = state_of(request).database

    def load() -> Row[Any] | None:
        with database.read() as connection:
            return load_node(connection, token)

    node = await run_in_threadpool(load)
    if node is None:
        raise Unauthorized("this node credential is not valid", fix="Enrol the node again with an enrolment token.")
    return node


async def part_caller(
    request: Request,
    attempt_id: RowId,
    node_rank: Annotated[int, Path(ge=0, le=2**31 - 1)],
) -> Part:
    """A dependency: the part of an attempt that the path names; its token is checked in the operation."""
    token = bearer_token(request)
    if not token.startswith(TOKEN_PREFIXES["attempt"]):
        raise Unauthorized("this route needs the token of a claim")
    return Part(attempt_id=attempt_id, node_rank=node_rank, token=token)


async def raw_body(request: Request) -> bytes:
    """A dependency: the body; the middleware holds it to the limit."""
    return await request.body()


async def json_body(request: Request) -> dict[str, Any]:
    """A dependency: the body as a JSON object. Raises InvalidRequest."""
    data, is_storable = _json_object(await request.body())
    if not is_storable:
        raise InvalidRequest(
            "the body holds a NUL character or half of a character (a lone surrogate)",
            fix="Send it without: no database stores such text.",
        )
    return data


async def report_body(request: Request) -> dict[str, Any]:
    """A dependency: what a node reports, as a JSON object. Raises InvalidRequest.

    Its texts quote what a job raised: what no database stores is replaced, so that the report itself is never refused.
    """
    data, _ = _json_object(await request.body())
    return data


def _json_object(body: bytes) -> tuple[dict[str, Any], bool]:
    """The object, without what no database stores, and whether it came like that."""
    try:
        data = json.loads(body, parse_constant=_refuse_constant) if body else {}
        cleaned = _cleaned(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequest(f"the body is not JSON: {error}", fix='Send a JSON object, such as {"a": 1}.') from error
    if not isinstance(data, dict):
        raise InvalidRequest(
            f"the body is {shown(data)}, not a JSON object", fix='Send a JSON object, such as {"a": 1}.'
        )
    return cleaned, cleaned == data


def _refuse_constant(word: str) -> float:
    raise ValueError(f"{word} is not a number in JSON")


def _cleaned(value: Any) -> Any:
    """`value` without characters that no database stores."""
    if isinstance(value, str):
        return UNSTORABLE.sub("\ufffd", value)
    if isinstance(value, dict):
        return {_cleaned(key): _cleaned(item) for key, item in value.items()}
    return [_cleaned(item) for item in value] if isinstance(value, list) else value


Body = Annotated[bytes, Depends(raw_body)]
JsonBody = Annotated[dict[str, Any], Depends(json_body)]
ReportBody = Annotated[dict[str, Any], Depends(report_body)]
MAX_ID: Final = 2**63 - 1
"""The largest whole number that a database can hold."""
RowId = Annotated[int, Path(ge=0, le=MAX_ID)]
"""An id in a path."""
AttemptNumber = Annotated[int | None, Query(ge=1, le=2**31 - 1)]
Node = Annotated[Row[Any], Depends(node_caller)]
CallingPart = Annotated[Part, Depends(part_caller)]

JOB_ROW = (
    select(jobs, users.c.name.label("owner"), teams.c.name.label("team"))
    .join(users, users.c.id == jobs.c.owner_id)
    .join(teams, teams.c.id == jobs.c.team_id)
)
_ONE_JOB = JOB_ROW.where(jobs.c.id == bindparam("job_id"))


def job_facts(row: Row[Any]) -> JobFacts:
    """What authorisation needs of a job's row."""
    return JobFacts(job_id=row.id, owner_id=row.owner_id, team_id=row.team_id, is_private=row.is_private)


def allowed_job(connection: Connection, principal: Principal, job_id: int, action: Action) -> Row[Any]:
    """The job's row, if `principal` may do `action` on it. Raises NotFound, Forbidden."""
    is_id = 0 <= job_id < 2**63
    row = connection.execute(_ONE_JOB, {"job_id": job_id}).one_or_none() if is_id else None
    if row is None:
        raise NotFound(f"there is no job {job_id}")
    authorise(principal, action, job_facts(row))
    return row


def json_response(data: Any, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON that is made by us and needs no response model."""
    return json_text_response(json.dumps(data, ensure_ascii=False, allow_nan=False), status, headers)


def json_text_response(text: str, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """JSON text as it is. Text that is not valid Unicode (a lone surrogate) is shown escaped."""
    return Response(text.encode("utf-8", "backslashreplace"), status, headers, media_type="application/json")
