"""One plain ASGI layer around every request: request id, version header, what no route should have to look at."""

from __future__ import annotations

import secrets

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from gangline.protocol.names import API_PREFIX, VERSION_HEADER
from service.api.problems import service_problem
from service.errors import BodyTooLarge, InvalidRequest


class Envelope:
    """Wraps the app. Bodies over the limit end as 413 before they are parsed; bundles have a limit of their own."""

    def __init__(self, app: ASGIApp, *, body_limit_bytes: int, bundle_limit_bytes: int, version: str):
        self._app = app
        self._body_limit = body_limit_bytes
        self._bundle_limit = bundle_limit_bytes
        self._version = version.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serve one request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        identifier = secrets.token_hex(8)
        scope["gangline_request_id"] = identifier
        is_bundle = scope["path"].startswith(f"{API_PREFIX}/bundles/")
        limit = self._bundle_limit if is_bundle else self._body_limit
        has_started = False

        async def send_with_headers(message: Message) -> None:
            nonlocal has_started
            if message["type"] == "http.response.start":
                has_started = True
                message["headers"] = [
                    *message["headers"],
                    (VERSION_HEADER.lower().encode(), self._version),
                    (b"x-request-id", identifier.encode()),
                    (b"x-content-type-options", b"nosniff"),
                ]
            await send(message)

        received = 0

        async def receive_limited() -> Message:
            nonlocal received
            message = await receive()
            if message["type"] == "http.request":
                received += len(message.get("body", b""))
                if received > limit:
                    raise BodyTooLarge(f"the body has over {limit:,} bytes", limit=limit)
            return message

        try:
            if "\0" in scope["path"] or b"%00" in scope["query_string"]:
                raise InvalidRequest(
                    "the address of the request holds a NUL character (%00)", fix="Send it without that character."
                )
            declared = next((value for name, value in scope["headers"] if name == b"content-length"), b"0")
            if declared.isdigit() and int(declared) > limit:
                raise BodyTooLarge(f"the body has {int(declared):,} bytes; the limit is {limit:,}", limit=limit)
            await self._app(scope, receive_limited, send_with_headers)
        except (BodyTooLarge, InvalidRequest) as error:
            if has_started:
                raise
            response = service_problem(error, identifier)
            response.headers["Connection"] = "close"
            await response(scope, receive, send_with_headers)
