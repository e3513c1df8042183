"""Every error is a problem document with code and fix; no value of any parameter gets anything else."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from service.api.deps import json_body
from service.api.problems import install_problem_handlers
from service.errors import DatabaseUnavailable, FieldProblem, ServiceError
from tests.contracts.documents import OTHER_CODES, error_classes
from tests.integration.service.api_server import Api
from tests.integration.service.test_roles import Route, all_routes

MEMBERS = {"type", "title", "status", "detail", "code", "fix", "errors", "request_id"}


def answer_of(app: FastAPI) -> httpx.Response:
    """The answer of an app's only route."""

    async def get() -> httpx.Response:
        transport = httpx.ASGITransport(app, raise_app_exceptions=False)
        async with httpx.AsyncClient(transport=transport, base_url="http://test") as client:
            return await client.get("/")

    return asyncio.run(get())


def check_problem(answer: Any) -> dict[str, Any]:
    """The problem document of an answer, which must be one."""
    assert answer.headers["content-type"] == "application/problem+json", answer.text
    problem: dict[str, Any] = answer.json()
    assert problem.keys() >= MEMBERS
    assert problem["status"] == answer.status_code
    assert problem["fix"]
    assert problem["title"]
    return problem


@pytest.mark.parametrize("error", error_classes(), ids=lambda error: error.__name__)
def test_each_error_becomes_its_problem_document(error: type[ServiceError]) -> None:
    app = FastAPI()
    install_problem_handlers(app)

    @app.get("/")
    def fail() -> None:
        raise error("what happened", errors=[FieldProblem(pointer="a.b", message="is wrong", line=3)], size=7)

    answer = answer_of(app)
    problem = check_problem(answer)

    assert (problem["code"], problem["status"], problem["title"]) == (error.code, error.status, error.title)
    assert (problem["detail"], problem["fix"], problem["size"]) == ("what happened", error.default_fix, 7)
    assert problem["errors"] == [{"pointer": "a.b", "message": "is wrong", "line": 3}]
    assert ("retry-after" in answer.headers) is (error.status in (503, 507))


def test_an_unexpected_error_hides_its_text_behind_the_request_id() -> None:
    app = FastAPI()
    install_problem_handlers(app)

    @app.get("/")
    def fail() -> None:
        raise RuntimeError("the password is hunter2")

    problem = check_problem(answer_of(app))
    assert (problem["status"], problem["code"]) == (500, "error")
    assert "hunter2" not in json.dumps(problem)


@pytest.mark.parametrize(
    ("method", "path", "code"),
    [("GET", "/none", "not_found"), ("GET", "//none", "not_found"), ("PATCH", "/jobs", "method_not_allowed")],
)
def test_an_unknown_route_or_method_is_a_problem_too(api: Api, method: str, path: str, code: str) -> None:
    assert check_problem(api.request(method, path))["code"] == code
    assert code in {"not_found", *(known for known, *_ in OTHER_CODES)}


def test_an_answer_names_the_version_and_the_request(api: Api) -> None:
    first, second = api.request("GET", "/me"), api.request("GET", "/jobs/9")
    assert first.headers["x-gangline-version"] == api.state.version
    assert first.headers["x-request-id"] != second.headers["x-request-id"] == second.json()["request_id"]


ODD = [
    str(10**30),
    str(-(10**30)),
    str(2**63),
    "-1",
    "0",
    "x",
    "%00",
    "a%00b",
    "%ff",
    "%F0%9F%9A%80",
    "..",
    "%2e%2e",
    "'",
    "a" * 3_000,
]
WITH_PARAMETER = [route for route in all_routes() if "{" in route.template]


def tokens_of(api: Api) -> dict[str, str]:
    """A valid token for each audience."""
    node = api.node()
    part = api.start(api.submit(), node)[0]
    return {"user": "root", "enrolment": "enrolment", "node": node.credential, "part": part.token}


@pytest.mark.parametrize("route", WITH_PARAMETER, ids=lambda route: f"{route.method} {route.template}")
def test_no_value_of_a_path_parameter_is_an_unexpected_error(api: Api, route: Route) -> None:
    token = tokens_of(api)[route.audience]
    path = route.template
    names = [part[1:-1] for part in path.split("/") if part.startswith("{")]
    for name in names:
        for value in ODD:
            odd = Route(method=route.method, template=path.replace(f"{{{name}}}", value), audience="", action=None)
            answer = odd.call(api, token, json={} if route.method in ("POST", "PUT") else None)
            assert answer.status_code < 500, (odd.path, answer.text)
            if answer.status_code >= 400 and route.method != "HEAD":
                check_problem(answer)


REFUSED: list[tuple[str, dict[str, Any], str]] = [
    ("/jobs/{job}/priority", {"priority": "foo"}, 'priority "foo"'),
    ("/jobs/{job}/priority", {"priority": 101}, "priority 101"),
    ("/jobs/{job}/priority", {}, "priority null"),
    ("/jobs/{job}/limit", {"seconds": -5}, "seconds is -5"),
    ("/jobs/{job}/hold", {"reason": 7}, "reason 7"),
    ("/jobs/{job}/hold", {"reason": "two\nlines"}, '"two\\nlines"'),
    ("/jobs/{job}/requeue", {"from_start": "yes"}, 'from_start is "yes"'),
    ("/jobs/{job}/cancel", {"reason": ["x"]}, "reason a list"),
    ("/teams/red/quota", {"quota_gpus": -1}, "quota_gpus is -1"),
    ("/teams/red/quota", {"gpus": 3}, "unknown members: gpus"),
    ("/teams/red/quota", {}, "the body is empty"),
    ("/users/ann/cap", {"cap_gpus": "x"}, 'cap_gpus is "x"'),
    ("/users/ann/cap", {}, "cap_gpus is missing"),
    ("/users/ann/cap", {"cap": 3}, "unknown members: cap"),
    ("/users", {"name": "eve", "admin": "yes"}, 'admin is "yes"'),
    ("/users", {"name": 7}, "name is 7"),
    ("/users", {"name": "a b"}, "'a b'"),
    ("/teams", {}, "name is missing"),
    ("/tokens", {"expires_in_seconds": "soon"}, 'expires_in_seconds is "soon"'),
    ("/tokens", {"kind": "root"}, "'root'"),
    ("/nodes/node-1/drain", {"reason": "x", "now": 1}, "now is 1"),
    ("/nodes/node-1/drain", {"reason": "x", "until": 7}, "until is 7"),
    ("/nodes/node-1/cordon", {"reason": 7}, "reason 7"),
    ("/nodes/node-1/labels", {"labels": "switch"}, 'labels is "switch"'),
]


@pytest.mark.parametrize(("path", "body", "named"), REFUSED, ids=[f"{path} {body}" for path, body, _ in REFUSED])
def test_a_refused_value_is_named_with_what_to_send_instead(
    api: Api, path: str, body: dict[str, Any], named: str
) -> None:
    api.node()
    answer = api.request("POST", path.replace("{job}", str(api.submit())), "root", json=body)
    problem = check_problem(answer)
    assert (answer.status_code, problem["code"]) == (422, "invalid_request")
    assert named in problem["detail"]
    assert "named in errors" not in problem["fix"]


def test_a_refused_value_of_a_query_is_named_among_the_errors(api: Api) -> None:
    problem = check_problem(api.request("GET", "/jobs?limit=many"))
    (field,) = problem["errors"]
    assert (field["pointer"], field["message"].endswith('not "many"')) == ("query.limit", True)


QUERIES = {
    "/jobs": ["state", "owner", "team", "name", "tag", "limit", "cursor"],
    "/jobs/{job}": ["wait"],
    "/jobs/{job}/events": ["after", "limit"],
    "/jobs/{job}/logs": ["rank", "attempt", "from", "limit", "tail"],
    "/jobs/{job}/logs/raw": ["rank", "attempt"],
    "/jobs/{job}/logs/stream": ["ranks", "attempt", "from", "tail"],
    "/jobs/{job}/metrics": ["keys", "attempt", "first", "points"],
}


@pytest.mark.parametrize("path", QUERIES)
def test_no_value_of_a_query_parameter_is_an_unexpected_error(api: Api, path: str) -> None:
    job_id = api.submit()
    api.start(job_id, api.node())[0].ended()
    for name in QUERIES[path]:
        for value in ODD:
            answer = api.request("GET", f"{path.replace('{job}', str(job_id))}?{name}={value}")
            assert answer.status_code < 500, (name, value, answer.text)
            if answer.status_code >= 400:
                check_problem(answer)


BODIES: dict[str, tuple[str, str, list[str]]] = {
    "a user": ("/users", "root", ["name", "admin"]),
    "a team": ("/teams", "root", ["name"]),
    "a token": ("/tokens", "root", ["user", "label", "kind", "expires_in_seconds"]),
    "a cancel": ("/jobs/{job}/cancel", "root", ["reason"]),
    "an enrolment": ("/agent/enrol", "enrolment", ["name", "address"]),
    "a rendezvous": ("{part}/rendezvous", "part", ["address", "port"]),
    "a start": ("{part}/started", "part", ["ranks", "sent_at"]),
    "a heartbeat": (
        "/agent/heartbeat",
        "node",
        ["incarnation", "boot_id", "version", "inventory", "attempts", "process_sets"],
    ),
}
ODD_JSON = [
    "null",
    "1",
    "-1",
    "1e400",
    "NaN",
    "true",
    '""',
    '"x"',
    '"a\\u0000b"',
    '"\\udcff"',
    "[]",
    "{}",
    "[[]]",
    '"' + "x" * 5_000 + '"',
    "9" * 30,
]


@pytest.mark.parametrize("what", BODIES)
def test_no_value_in_a_body_is_an_unexpected_error(api: Api, what: str) -> None:
    path, who, names = BODIES[what]
    node = api.node()
    job_id = api.submit()
    part = api.start(job_id, node)[0]
    token = {"node": node.credential, "part": part.token}.get(who, who)
    whole: dict[str, Any] = {
        "a heartbeat": node.heartbeat(), "a rendezvous": {"address": "a", "port": 1},
        "an enrolment": {"name": "a", "address": "b"},
    }.get(what, {})  # fmt: skip
    where = path.replace("{job}", str(job_id)).replace("{part}", part.base)
    bodies = ["", "{", "[]", "null", "[" * 3_000, '{"a":' * 900 + "1" + "}" * 900, "\x00"]
    for name in names:
        bodies += [json.dumps({**whole, name: "@"}).replace('"@"', value) for value in ODD_JSON]
    for body in bodies:
        answer = api.request("POST", where, token, content=body.encode())
        assert answer.status_code < 500, (body[:200], answer.text)
        if answer.status_code >= 400:
            check_problem(answer)


def test_readiness_says_no_while_the_database_is_away(api: Api, monkeypatch: pytest.MonkeyPatch) -> None:
    def away() -> None:
        raise DatabaseUnavailable("the server closed the connection")

    monkeypatch.setattr(api.state.database, "read", away)
    answer = api.request("GET", "//readyz", None)
    assert (answer.status_code, check_problem(answer)["code"]) == (503, "database_unavailable")
    assert api.request("GET", "//healthz", None).status_code == 200


READS_A_BODY = [
    pytest.param(route, id=f"{route.method} {route.template}")
    for route in all_routes()
    if route.audience == "user" and json_body in route.calls
]


@pytest.mark.parametrize("route", READS_A_BODY)
def test_a_misspelt_member_is_refused_by_name_and_changes_nothing(api: Api, route: Route) -> None:
    api.node("node-1")
    api.submit()
    before = api.snapshot()

    problem = check_problem(route.call(api, "root", json={"raeson": "new driver"}))

    assert (problem["code"], problem["detail"]) == ("invalid_request", "unknown members: raeson")
    assert problem["fix"].startswith("Known: ")
    assert api.snapshot() == before


@pytest.mark.parametrize("verb", ["cancel", "requeue", "hold"])
@pytest.mark.parametrize("reason", ["a\nb", "\x1b[2J", "\u202egnp", 5, "x" * 1001])
def test_a_reason_that_others_could_not_read_on_one_line_is_refused_with_its_value(
    api: Api, verb: str, reason: object
) -> None:
    job_id = api.submit()
    before = api.snapshot()

    problem = check_problem(api.request("POST", f"/jobs/{job_id}/{verb}", "ann", json={"reason": reason}))

    assert problem["code"] == "invalid_request"
    assert problem["detail"].startswith("reason ")
    assert api.snapshot() == before
