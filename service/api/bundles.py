"""Routes of code bundles: is it here, and upload by content."""

from __future__ import annotations

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from sqlalchemy import insert, select
from sqlalchemy.exc import IntegrityError
from starlette.concurrency import run_in_threadpool
from starlette.responses import Response

from gangline.protocol.names import API_PREFIX
from service.api.deps import AppState, State, caller, json_response
from service.auth.permissions import Action
from service.auth.principals import Principal
from service.db.tables import bundles
from service.errors import NotFound

router = APIRouter(prefix=f"{API_PREFIX}/bundles")
Uploader = Annotated[Principal, Depends(caller(Action.BUNDLE_WRITE))]


@router.head("/{digest}")
def head_bundle(state: State, principal: Uploader, digest: str) -> Response:
    """200 when the bundle is stored, else 404."""
    state.bundles.path(digest)
    if not _is_known(state, digest):
        raise NotFound(f"bundle {digest} is not stored", fix="Upload it: PUT /api/v1/bundles/{digest}.")
    return Response(status_code=200)


@router.put("/{digest}")
async def put_bundle(request: Request, state: State, principal: Uploader, digest: str) -> Response:
    """Store a bundle under the digest of its bytes; again changes nothing."""
    state.bundles.path(digest)
    if await run_in_threadpool(_is_known, state, digest):
        return json_response({"digest": digest}, 200)
    upload = await run_in_threadpool(state.bundles.begin)
    try:
        async for chunk in request.stream():
            await run_in_threadpool(upload.write, chunk)
        hides_trainer = await run_in_threadpool(upload.keep, digest)
        await run_in_threadpool(_remember, state, principal, digest, upload.num_bytes, hides_trainer)
    finally:
        await run_in_threadpool(upload.drop)
    return json_response({"digest": digest, "bytes": upload.num_bytes}, 201)


def _is_known(state: AppState, digest: str) -> bool:
    with state.database.read() as connection:
        return connection.execute(select(bundles.c.digest).where(bundles.c.digest == digest)).first() is not None


def _remember(state: AppState, principal: Principal, digest: str, num_bytes: int, hides_trainer: bool) -> None:
    try:
        with state.database.write() as tx:
            tx.connection.execute(
                insert(bundles).values(
                    digest=digest,
                    num_bytes=num_bytes,
                    created_by=principal.user_id,
                    created_at=tx.now,
                    hides_trainer=hides_trainer,
                )
            )
    except IntegrityError:
        # Somebody else uploaded the same bytes at the same time; theirs and ours are one.
        return
