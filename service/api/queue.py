"""The route behind `gang queue`: the waiting jobs in the order of the policy, each with its reason and start range.

Not for: one job in full (`service.api.why`), jobs by submission (`service.api.jobs`).
"""

from __future__ import annotations

import json
from typing import Annotated, Any

from fastapi import APIRouter, Depends, Query
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import JOB_ROW, State, caller, json_response
from service.api.start_json import face, reason_json, start_json
from service.auth.permissions import Action
from service.auth.principals import Principal
from service.clock import rfc3339
from service.db.tables import jobs
from service.operations.explain_job import Waiting, queue_page
from service.operations.submit_job import SUBMITTED

router = APIRouter(prefix=API_PREFIX)
PAGE_LIMIT = 200


@router.get("/queue")
def get_queue(
    state: State,
    principal: Annotated[Principal, Depends(caller(Action.POOL_SEE))],
    limit: Annotated[int, Query(ge=1, le=PAGE_LIMIT)] = 50,
    after: Annotated[int, Query(ge=0, le=2**31 - 1)] = 0,
) -> Response:
    """The waiting jobs in the order of the policy, from after a position; `next`: the position to go on from."""
    page = queue_page(state.held, after, limit)
    with state.database.read() as connection:
        rows = {row.id: row for row in connection.execute(JOB_ROW.where(jobs.c.id.in_([one.id for one in page.jobs])))}
    items = [_item(rows[one.id], one, page.at, principal) for one in page.jobs if one.id in rows]
    return json_response(
        {
            "at": rfc3339(page.at),
            "policy": state.settings.policy,
            "count": page.count,
            "items": items,
            "next": after + limit if page.count > after + limit else None,
        }
    )


def _item(row: Any, one: Waiting, at: float, principal: Principal) -> dict[str, Any]:
    reason = json.loads(row.reason) if row.reason else SUBMITTED.to_json()
    return {
        **face(principal, row, None),
        "team": row.team,
        "position": one.position,
        "left_seconds": one.left_seconds,
        "waiting_since": rfc3339(row.wait_began_at),
        "reason": reason_json(principal, row, reason),
        "start": None if one.forecast is None else start_json(one.forecast, at),
    }
