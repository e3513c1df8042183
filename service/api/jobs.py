"""Routes of jobs: submit, dry run, list, show (conditional, long-poll), why, events."""

from __future__ import annotations

import base64
import binascii
import json
import math
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Header, Query, Request
from sqlalchemy import ColumnElement, Row, func, or_, select, tuple_
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX, IDEMPOTENCY_HEADER, REPLAYED_HEADER
from gangline.protocol.outcomes import JobState
from service import clock
from service.api.deps import (
    JOB_ROW,
    MAX_ID,
    AppState,
    Body,
    State,
    allowed_job,
    caller,
    job_facts,
    json_response,
    json_text_response,
)
from service.api.job_json import (
    Latest,
    job_json,
    load_attempts,
    load_newest_checkpoints,
    plan_json,
    resources_json,
)
from service.api.start_json import dry_run_json
from service.auth.permissions import Action, may_read
from service.auth.principals import Principal
from service.clock import rfc3339
from service.db.tables import events, jobs, teams, users
from service.domain.spec import JobSpec, ResolvedGang
from service.domain.text import shown
from service.errors import InvalidRequest
from service.operations.submit_job import (
    check_submission,
    replay,
    request_hash,
    submit_job,
)
from service.schemas.parse_spec import parse_spec

router = APIRouter(prefix=f"{API_PREFIX}/jobs")
PAGE_LIMIT = 200
WAIT_LIMIT_SECONDS = 60.0
KEY_LIMIT = 200


@router.post("", status_code=201)
def post_job(
    request: Request,
    state: State,
    body: Body,
    principal: Annotated[Principal, Depends(caller(Action.JOB_SUBMIT))],
    dry_run: bool = False,
    key: Annotated[str | None, Header(alias=IDEMPOTENCY_HEADER)] = None,
) -> Response:
    """Submit a job, or with `dry_run` only check it."""
    overrides = request.query_params.getlist("set")
    hashed = ""
    if key is not None and not dry_run:
        if not 0 < len(key) <= KEY_LIMIT:
            raise InvalidRequest(
                f"{IDEMPOTENCY_HEADER} {shown(key)} has {len(key)} characters; 1 to {KEY_LIMIT} are allowed",
                fix="Send a fresh random key of about 32 characters, or none.",
            )
        hashed = request_hash(body, request.url.query)
        first = replay(state.database, principal, key, hashed)
        if first is not None:
            return _created(first, is_replay=True)
    spec = parse_spec(body, request.headers.get("content-type", "application/json"), overrides)
    submission = check_submission(state.database, state.settings, state.shapes, principal, spec, is_dry_run=dry_run)
    gang = submission.gang
    if dry_run:
        return json_response(
            {
                "valid": True,
                "spec": json.loads(spec.to_json()),
                "team": submission.team,
                "resources": _resolved_json(spec, gang),
                "processes_per_node": gang.processes_per_node,
                "plan": None if submission.training is None else plan_json(submission.training),
                **dry_run_json(state, principal, submission),
            }
        )

    def describe(job_id: int, columns: Mapping[str, Any]) -> str:
        row = SimpleNamespace(
            **columns,
            id=job_id,
            owner=principal.name,
            team=submission.team,
            started_at=None,
            ended_at=None,
            outcome=None,
            cause=None,
        )
        now = columns["submitted_at"]
        told = job_json(row, latest=Latest(), checkpoint=None, now=now, is_insider=True, is_whole=True)
        return json.dumps(told, ensure_ascii=False)

    text, is_replay = submit_job(
        state.database, state.committer, principal, submission, key=key, hashed=hashed, describe=describe
    )
    return _created(text, is_replay=is_replay)


def _created(text: str, *, is_replay: bool) -> Response:
    # The id is the first member that job_json writes, so the text need not be parsed again.
    job_id = text[len('{"id": ') : text.index(",")]
    headers = {"Location": f"{API_PREFIX}/jobs/{job_id}"}
    if is_replay:
        headers[REPLAYED_HEADER] = "true"
    return json_text_response(text, 201, headers)


def _resolved_json(spec: JobSpec, gang: ResolvedGang) -> dict[str, Any]:
    """What was asked, resolved; with a range of GPUs also the numbers that it may start on, the largest first."""
    sizes = list(dict.fromkeys(layout.num_gpus for layout in gang.layouts))
    least = sizes[-1] if sizes else None
    told = resources_json(gang.num_nodes, gang.gpus_per_node, least, spec.resources.gpu_type)
    return {**told, "sizes": sizes or None}


@router.get("")
def list_jobs(
    state: State,
    principal: Annotated[Principal, Depends(caller(Action.JOB_LIST))],
    state_filter: Annotated[str | None, Query(alias="state")] = None,
    owner: str | None = None,
    team: str | None = None,
    name: str | None = None,
    tag: str | None = None,
    limit: Annotated[int, Query(ge=1, le=PAGE_LIMIT)] = 50,
    cursor: str | None = None,
) -> Response:
    """A page of jobs, newest first, by keyset cursor."""
    query = JOB_ROW.order_by(jobs.c.submitted_at.desc(), jobs.c.id.desc()).limit(limit + 1)
    if not principal.is_admin:
        mine = [team_id for team_id, _ in principal.teams]
        is_inside = or_(jobs.c.owner_id == principal.user_id, jobs.c.team_id.in_(mine))
        # Tags belong to the inside of a job, so filtering by them must not tell others' either.
        query = query.where(is_inside if tag else or_(~jobs.c.is_private, is_inside))
    if state_filter:
        wanted = state_filter.split(",")
        unknown = [word for word in wanted if word not in list(JobState)]
        if unknown:
            raise InvalidRequest(f"unknown state {', '.join(unknown)}", fix=f"States: {', '.join(JobState)}.")
        query = query.where(jobs.c.state.in_(wanted))
    if owner:
        query = query.where(users.c.name == (principal.name if owner == "me" else owner))
    if team:
        query = query.where(teams.c.name == team)
    if name:
        query = query.where(jobs.c.name == name)
    if tag:
        query = query.where(_has_tag(tag, state.database.is_sqlite))
    if cursor:
        query = query.where(tuple_(jobs.c.submitted_at, jobs.c.id) < tuple_(*_read_cursor(cursor)))
    with state.database.read() as connection:
        now = state.database.now(connection)
        rows = connection.execute(query).all()
        page = rows[:limit]
        tried = [row.id for row in page if row.num_attempts]
        latest, newest = load_attempts(connection, tried, now), load_newest_checkpoints(connection, tried)
    items = [_brief(row, latest.get(row.id, Latest()), newest.get(row.id), principal, now) for row in page]
    following = _write_cursor(page[-1]) if len(rows) > limit else None
    return json_response({"items": items, "next": following})


def _has_tag(tag: str, is_sqlite: bool) -> ColumnElement[bool]:
    """Whether a job's tags hold `key` or `key=value`. They are JSON text of ours: a member follows `{` or `, `."""
    key, _, value = tag.partition("=")
    member = json.dumps(key, ensure_ascii=False) + ": " + (json.dumps(value, ensure_ascii=False) if value else "")
    # Not LIKE: it knows no case on SQLite.
    position = func.instr if is_sqlite else func.strpos
    return or_(position(jobs.c.tags, "{" + member) > 0, position(jobs.c.tags, ", " + member) > 0)


def _brief(
    row: Row[Any], latest: Latest, checkpoint: Row[Any] | None, principal: Principal, now: float
) -> dict[str, Any]:
    told = job_json(
        row,
        latest=latest,
        checkpoint=checkpoint,
        now=now,
        is_insider=may_read(principal, job_facts(row)),
        is_whole=False,
    )
    del told["spec"]
    return told


def _write_cursor(row: Row[Any]) -> str:
    return base64.urlsafe_b64encode(f"{row.submitted_at!r} {row.id}".encode()).decode()


def _read_cursor(cursor: str) -> tuple[float, int]:
    try:
        submitted_at, job_id = base64.urlsafe_b64decode(cursor).decode().split(" ")
        place = (float(submitted_at), int(job_id))
        if not math.isfinite(place[0]) or not 0 <= place[1] <= MAX_ID:
            raise ValueError(place)
        return place
    except (binascii.Error, ValueError) as error:
        raise InvalidRequest(
            f"cursor {shown(cursor)} is not one that a list gave", fix="Use `next` as it came."
        ) from error


@router.get("/{job_id}")
async def get_job(
    request: Request,
    state: State,
    principal: Annotated[Principal, Depends(caller(Action.JOB_SEE))],
    job_id: int,
    wait: Annotated[float, Query(ge=0)] = 0.0,
    if_none_match: Annotated[str | None, Header()] = None,
) -> Response:
    """One job. With If-None-Match: 304 while unchanged; with `wait` too: answer once it changes."""
    deadline = clock.monotonic() + min(wait, WAIT_LIMIT_SECONDS)
    with state.bus.subscribe(f"job:{job_id}") as subscription:
        while True:
            told = await run_in_threadpool(show_job, state, principal, job_id)
            etag = f'"{told["version"]}"'
            if if_none_match is None or etag not in [part.strip() for part in if_none_match.split(",")]:
                return json_response(told, headers={"ETag": etag})
            left = deadline - clock.monotonic()
            if left <= 0 or state.bus.is_closed:
                return Response(status_code=304, headers={"ETag": etag})
            # Other processes' changes are not published here: on PostgreSQL, look again by oneself.
            await subscription.wait(left if state.database.is_sqlite else min(left, 0.5))


def show_job(state: AppState, principal: Principal, job_id: int) -> dict[str, Any]:
    """The whole job as this principal may see it. Raises NotFound."""
    with state.database.read() as connection:
        row = allowed_job(connection, principal, job_id, Action.JOB_SEE)
        now = state.database.now(connection)
        return job_json(
            row,
            latest=load_attempts(connection, [job_id], now).get(job_id, Latest()),
            checkpoint=load_newest_checkpoints(connection, [job_id]).get(job_id),
            now=now,
            is_insider=may_read(principal, job_facts(row)),
            is_whole=True,
        )


@router.get("/{job_id}/events")
def get_events(
    state: State,
    principal: Annotated[Principal, Depends(caller(Action.JOB_SEE))],
    job_id: int,
    after: Annotated[int, Query(ge=0, le=MAX_ID)] = 0,
    limit: Annotated[int, Query(ge=1, le=1000)] = 100,
) -> Response:
    """The job's history, oldest first, from after an event id."""
    with state.database.read() as connection:
        row = allowed_job(connection, principal, job_id, Action.JOB_SEE)
        is_insider = may_read(principal, job_facts(row))
        found = connection.execute(
            select(events).where(events.c.job_id == job_id, events.c.id > after).order_by(events.c.id).limit(limit + 1)
        ).all()
    items = [
        {
            "id": event.id,
            "at": rfc3339(event.at),
            "kind": event.kind,
            "actor": event.actor,
            "attempt": event.attempt_number,
            "node": event.node_name,
            "text": event.text if is_insider else "",
            "data": json.loads(event.data) if is_insider else {},
        }
        for event in found[:limit]
    ]
    return json_response({"items": items, "next": items[-1]["id"] if len(found) > limit else None})
