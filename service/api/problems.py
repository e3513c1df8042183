"""Errors as `application/problem+json` (RFC 9457) with `code`, `fix` and `request_id`, for every route."""

from __future__ import annotations

import dataclasses
import json
import logging
from collections.abc import Sequence
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from service.domain.text import shown
from service.errors import FieldProblem, ServiceError
from service.schemas.parse_spec import InvalidSpec

log = logging.getLogger("gangline.api")
_RETRY_AFTER = {503: "2", 507: "10", 429: "1"}


def problem_response(
    *,
    code: str,
    status: int,
    title: str,
    detail: str,
    fix: str,
    request_id: str,
    errors: Sequence[dict[str, Any]] = (),
    extra: dict[str, Any] | None = None,
) -> Response:
    """One problem document."""
    body = {
        "type": f"/help/errors#{code}",
        "title": title,
        "status": status,
        "detail": detail,
        "code": code,
        "fix": fix,
        "errors": list(errors),
        "request_id": request_id,
        **(extra or {}),
    }
    headers = {"Retry-After": _RETRY_AFTER[status]} if status in _RETRY_AFTER else {}
    if status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return Response(
        json.dumps(body, ensure_ascii=False).encode("utf-8", "backslashreplace"),
        status,
        headers,
        media_type="application/problem+json",
    )


def install_problem_handlers(app: FastAPI) -> None:
    """Every error of `app` becomes a problem document; unexpected ones hide their text behind the request_id."""

    @app.exception_handler(ServiceError)
    def _service(request: Request, error: ServiceError) -> Response:
        return service_problem(error, request_id(request))

    @app.exception_handler(InvalidSpec)
    def _spec(request: Request, error: InvalidSpec) -> Response:
        problems = [_field(FieldProblem(**vars(problem))) for problem in error.problems]
        return problem_response(
            code="invalid_spec",
            status=422,
            title="The job file is not valid",
            detail=f"{len(problems)} problem{'' if len(problems) == 1 else 's'}",
            fix="Correct the lines named in errors; the schema is at /api/v1/schemas/job.json.",
            request_id=request_id(request),
            errors=problems,
        )

    @app.exception_handler(RequestValidationError)
    def _validation(request: Request, error: RequestValidationError) -> Response:
        problems = [
            _field(FieldProblem(pointer=".".join(map(str, item["loc"])), message=_message(item)))
            for item in error.errors()
        ]
        return problem_response(
            code="invalid_request",
            status=422,
            title="The request is not valid",
            detail=f"{len(problems)} problem{'' if len(problems) == 1 else 's'}",
            fix="Correct the fields named in errors.",
            request_id=request_id(request),
            errors=problems,
        )

    @app.exception_handler(HTTPException)
    def _http(request: Request, error: HTTPException) -> Response:
        titles = {404: "not_found", 405: "method_not_allowed"}
        return problem_response(
            code=titles.get(error.status_code, "http_error"),
            status=error.status_code,
            title=str(error.detail),
            detail=f"{request.method} {request.url.path}: {error.detail}",
            fix="Look at the routes in the README.",
            request_id=request_id(request),
        )

    @app.exception_handler(Exception)
    def _unexpected(request: Request, error: Exception) -> Response:
        log.exception("unexpected_error request_id=%s", request_id(request), exc_info=error)
        return service_problem(ServiceError("an unexpected error; the server's log has it"), request_id(request))


def service_problem(error: ServiceError, request_id: str) -> Response:
    """The document of an error of the tree."""
    return problem_response(
        code=error.code,
        status=error.status,
        title=error.title,
        detail=error.detail,
        fix=error.fix,
        request_id=request_id,
        errors=[_field(problem) for problem in error.errors],
        extra=error.extra,
    )


def _message(item: Any) -> str:
    """What the framework says of a field, with the value that it read."""
    message = str(item["msg"])
    return message if item["type"] == "missing" else f"{message}, not {shown(item['input'])}"


def request_id(request: Request) -> str:
    """The id that the middleware gave this request."""
    return str(request.scope.get("gangline_request_id", ""))


def _field(problem: FieldProblem) -> dict[str, Any]:
    return {key: value for key, value in dataclasses.asdict(problem).items() if value not in (None, "")}
