"""The route behind `gang admin log`: who changed what of nodes, teams, users and tokens, and what befell the nodes.

Not for: the history of a job (`service.api.jobs`).
"""

from __future__ import annotations

import json
from typing import Annotated

from fastapi import APIRouter, Depends, Query
from sqlalchemy import select
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import MAX_ID, State, caller, json_response
from service.auth.permissions import Action
from service.auth.principals import Principal
from service.clock import rfc3339
from service.db.tables import events

router = APIRouter(prefix=API_PREFIX)


@router.get("/events")
def get_pool_events(
    state: State,
    principal: Annotated[Principal, Depends(caller(Action.ADMINISTER))],
    before: Annotated[int | None, Query(ge=1, le=MAX_ID)] = None,
    node: Annotated[str | None, Query(max_length=200)] = None,
    limit: Annotated[int, Query(ge=1, le=1000)] = 50,
) -> Response:
    """Who changed what of the pool (nodes, teams, users, tokens), newest first, from before an event id."""
    query = select(events).where(events.c.job_id.is_(None))
    if before is not None:
        query = query.where(events.c.id < before)
    if node is not None:
        query = query.where(events.c.node_name == node)
    with state.database.read() as connection:
        found = connection.execute(query.order_by(events.c.id.desc()).limit(limit + 1)).all()
    items = [
        {
            "id": event.id,
            "at": rfc3339(event.at),
            "kind": event.kind,
            "actor": event.actor,
            "node": event.node_name,
            "text": event.text,
            "data": json.loads(event.data),
        }
        for event in found[:limit]
    ]
    return json_response({"items": items, "next": items[-1]["id"] if len(found) > limit else None})
