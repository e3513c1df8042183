"""Routes for machines, open to anybody: is the process alive, can it work; and the schema of a job file."""

from __future__ import annotations

from fastapi import APIRouter
from sqlalchemy import text
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import State, json_response
from service.errors import ShuttingDown
from service.schemas.job_spec import job_schema

router = APIRouter()


@router.get("/healthz")
def get_health() -> Response:
    """The process answers."""
    return json_response({"status": "ok"})


@router.get("/readyz")
def get_ready(state: State) -> Response:
    """The database answers. `hints: failing` does not make it unready: jobs start by heartbeat then, later."""
    if state.bus.is_closed:
        raise ShuttingDown("the server is stopping")
    with state.database.read() as connection:
        connection.execute(text("SELECT 1"))
    return json_response({"status": "ready", "hints": state.hints.state, "version": state.version})


@router.get(f"{API_PREFIX}/schemas/job.json")
def get_schema() -> Response:
    """The JSON schema of a job file."""
    return json_response(job_schema())
