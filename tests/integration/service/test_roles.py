"""Who may call what: every route of the app against every kind of caller, made from the app itself."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from typing import Any

import pytest

from gangline.protocol.names import API_PREFIX
from service.app import ROUTERS
from service.auth.permissions import Action, words_of
from service.auth.tokens import make_token
from tests.integration.service.api_server import Api

OPEN = {"/healthz", "/readyz", f"{API_PREFIX}/schemas/job.json"}
DIGEST = "sha256:" + "0" * 64
FILLED = {
    "job_id": "1", "attempt_id": "1", "node_rank": "0", "kind": "log", "rank": "0", "token_id": "1", "digest": DIGEST,
    "name": "ann", "team": "red", "user": "ann",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Route:
    """A method and a path of the app, and who it is for."""

    method: str
    template: str
    audience: str
    """`open`, `user`, `enrolment`, `node` or `part`."""
    action: Action | None
    calls: tuple[Any, ...] = field(default=(), repr=False)
    """All functions that it depends on."""

    @property
    def path(self) -> str:
        """The path with every parameter filled in."""
        return re.sub(r"{(\w+)}", lambda match: FILLED[match.group(1)], self.template)

    def call(self, api: Api, who: str | None, **options: Any) -> Any:
        """Call it; an upload gets the offset that it needs."""
        options.setdefault("params", {"offset": 0} if "/streams/" in self.template else {})
        return api.request(self.method, "/" + self.path, who, **options)


def dependencies_of(dependant: Any) -> list[Any]:
    """All functions that a route depends on."""
    found = [dependant.call]
    for inner in dependant.dependencies:
        found += dependencies_of(inner)
    return found


def all_routes() -> list[Route]:
    """Every route of the app, with the audience that its dependencies state."""
    routes = []
    for route in (route for router in ROUTERS for route in router.routes):
        calls = dependencies_of(route.dependant)  # type: ignore[attr-defined]  # every route here is FastAPI's
        actions = [call.gangline_action for call in calls if hasattr(call, "gangline_action")]
        names = {getattr(call, "__name__", "") for call in calls}
        audience = "open"
        if actions:
            audience = "enrolment" if Action.ENROL_NODE in actions else "user"
        elif "node_caller" in names:
            audience = "node"
        elif "part_caller" in names:
            audience = "part"
        for method in sorted(route.methods):  # type: ignore[attr-defined]
            routes.append(
                Route(
                    method=method,
                    template=route.path,  # type: ignore[attr-defined]
                    audience=audience,
                    action=actions[0] if actions else None,
                    calls=tuple(calls),
                )
            )
    return routes


ROUTES = [pytest.param(route, id=f"{route.method} {route.template}") for route in all_routes()]
GUARDED = [
    pytest.param(route, id=f"{route.method} {route.template}") for route in all_routes() if route.template not in OPEN
]


def test_only_health_readiness_and_the_schema_are_open() -> None:
    assert {route.template for route in all_routes() if route.audience == "open"} == OPEN
    assert len(all_routes()) > 30


@pytest.mark.parametrize("route", [route for route in ROUTES if route.values[0].template in OPEN])  # type: ignore[union-attr]
def test_an_open_route_asks_for_no_token(api: Api, route: Route) -> None:
    assert route.call(api, None).status_code == 200


@pytest.mark.parametrize("route", GUARDED)
def test_nobody_gets_in_without_a_token(api: Api, route: Route) -> None:
    before = api.snapshot()
    for headers in (
        {},
        {"Authorization": "Bearer"},
        {"Authorization": "Basic cm9vdDpyb290"},
        {"Authorization": "glu_x"},
    ):
        answer = route.call(api, None, headers=headers)
        assert answer.status_code == 401, (headers, answer.text)
        assert answer.headers["www-authenticate"] == "Bearer"
    assert api.snapshot() == before


@pytest.mark.parametrize("route", GUARDED)
@pytest.mark.parametrize("kind", ["user", "enrolment", "node", "attempt"])
def test_a_wrong_token_of_any_kind_gets_nobody_in(api: Api, route: Route, kind: str) -> None:
    before = api.snapshot()
    status = route.call(api, make_token(kind)).status_code
    # A claim token is looked at beside the part that it names, after the body was read.
    assert status in ((401, 404, 422) if kind == "attempt" else (401,))
    assert api.snapshot() == before


@pytest.mark.parametrize("route", GUARDED)
def test_a_token_in_the_address_or_a_cookie_is_never_taken(api: Api, route: Route) -> None:
    token = api.tokens["root"]
    for name in ("token", "access_token", "authorization", "Authorization", "api_key"):
        params = {name: f"Bearer {token}", "offset": "0"}
        assert route.call(api, None, params=params).status_code == 401
        assert route.call(api, None, headers={"Cookie": f"{name}={token}"}).status_code == 401


@pytest.mark.parametrize("route", GUARDED)
def test_each_kind_of_token_opens_only_its_own_routes(api: Api, route: Route) -> None:
    node = api.node()
    part = api.start(api.submit(), node)[0]
    tokens = {"user": "root", "enrolment": "enrolment", "node": node.credential, "part": part.token}
    for audience, token in tokens.items():
        if audience == route.audience:
            continue
        answer = route.call(api, token)
        # An enrolment token is known, but for one thing only; the others are not even looked up.
        is_known = {audience, route.audience} == {"enrolment", "user"}
        assert answer.status_code == (403 if is_known else 401), (audience, answer.text)


@pytest.mark.parametrize("route", [route for route in GUARDED if route.values[0].action is Action.ADMINISTER])  # type: ignore[union-attr]
def test_a_user_who_is_no_admin_may_not_administer(api: Api, route: Route) -> None:
    before = api.snapshot()
    answer = route.call(api, "ann", json={"name": "eve"})
    assert (answer.status_code, answer.json()["code"]) == (403, "forbidden")
    assert api.snapshot() == before


@pytest.mark.parametrize("action", Action)
def test_what_a_person_may_not_do_is_said_in_words_and_not_by_the_name_of_the_action(action: Action) -> None:
    said = words_of(action)
    assert said and not set(said) & set("_{}")


JOB_ROUTES = [route for route in GUARDED if "{job_id}" in route.values[0].template]  # type: ignore[union-attr]
OF_OWNER = (Action.JOB_CANCEL, Action.JOB_REQUEUE, Action.JOB_EXTEND, Action.JOB_TURN)
INSIDE = (Action.JOB_READ, *OF_OWNER)
NOT_ONCE_ENDED = ("/requeue", "/limit", "/hold", "/priority")
BODIES: dict[str, dict[str, Any]] = {"priority": {"priority": "low"}, "limit": {"seconds": 60}}


def with_job(route: Route, job_id: int) -> str:
    """The path of a route for this job, below the root."""
    return "/" + route.template.replace("{job_id}", str(job_id))


def running_job(api: Api, **members: Any) -> int:
    """A job of Ann's that has written a line, and has ended."""
    job_id = api.submit(tags={"secret": "tag"}, env={"SECRET": "env"}, **members)
    part = api.start(job_id, api.node())[0]
    part.append(b"secret line\n", 0)
    part.ended(1, error=("ValueError", "secret message"))
    return job_id


@pytest.mark.parametrize("route", JOB_ROUTES)
@pytest.mark.parametrize(
    ("who", "is_private", "expected"),
    [("ann", True, "in"), ("amy", True, "in"), ("root", True, "in"), ("bob", True, "hidden"), ("bob", False, "face")],
)
def test_a_job_of_another_team_shows_its_face_and_a_private_one_not_even_that(
    api: Api, route: Route, who: str, is_private: bool, expected: str
) -> None:
    job_id = running_job(api, private=is_private)

    body = BODIES.get(route.template.rpartition("/")[2], {})
    options = {"json": body} if route.method == "POST" else {}

    answer = api.request(route.method, with_job(route, job_id), who, **options)

    if expected == "hidden":
        unknown = api.request(route.method, with_job(route, 10**9), who, **options)
        assert (answer.status_code, unknown.status_code) == (404, 404)
        told, other = answer.json(), unknown.json()
        assert {**told, "detail": "", "request_id": ""} == {**other, "detail": "", "request_id": ""}
        assert told["detail"] == other["detail"].replace(str(10**9), str(job_id)), "as if it did not exist"
    elif expected == "face":
        assert answer.status_code == (403 if route.action in INSIDE else 200)
        assert "secret" not in answer.text.replace('"tags": {"secret": "tag"}', "")
    elif route.action in OF_OWNER and who == "amy":
        assert answer.status_code == 403, "a job is stopped, and its turn changed, by its owner or an admin"
    elif route.template.endswith(NOT_ONCE_ENDED):
        assert (answer.status_code, answer.json()["code"]) == (409, "conflict"), "it has ended"
    else:
        assert answer.status_code == 200


def test_another_teams_job_shows_name_owner_state_and_times_but_nothing_of_its_inside(api: Api) -> None:
    job_id = running_job(api)

    told = api.job(job_id, "bob")

    assert (told["name"], told["owner"], told["state"], told["resources"]["gpus"]) == ("test", "ann", "failed", 1)
    assert (told["spec"], told["progress"], told["cause"]["error"]) == (None, None, None)
    assert told["cause"]["sentence"] == "Ended as user_error."


def test_the_reason_of_a_retry_tells_outsiders_nothing_of_the_error(api: Api) -> None:
    job_id = running_job(api, retry={"max": 1})

    for told in (api.job(job_id, "bob"), api.get(f"/jobs/{job_id}/why", "bob")):
        assert "user_error" in told["reason"]["text"]
        assert "secret" not in str(told["reason"])


def test_a_private_job_is_in_no_list_of_another_team(api: Api) -> None:
    hidden, open_job = api.submit(private=True), api.submit()

    def listed(who: str, query: str = "") -> set[int]:
        return {item["id"] for item in api.get(f"/jobs?{query}", who)["items"]}

    assert listed("ann") == listed("amy") == listed("root") == {hidden, open_job}
    for query in ("", "owner=ann", "team=red", "name=test", "state=waiting"):
        assert listed("bob", query) == {open_job}


def test_a_private_job_ahead_or_on_a_node_is_seen_only_as_such(api: Api) -> None:
    api.node(slots=1)
    holder = api.submit(private=True, name="secret")
    api.place()
    ahead = api.submit(private=True, name="secret")
    behind = api.submit("bob")
    api.place()

    why = api.get(f"/jobs/{behind}/why", "bob")
    (gpu,) = api.get("/nodes", "bob")["items"][0]["gpus"]

    assert why["ahead"]["count"] == 1
    assert [(job["id"], job["name"], job["owner"]) for job in (*why["ahead"]["jobs"], *why["holders"])] == [
        (None, "a private job of team red", None)
    ] * 2
    assert (gpu["job_id"], gpu["held"]) == (None, True)
    assert "secret" not in str(why)
    assert api.get("/nodes", "amy")["items"][0]["gpus"][0]["job_id"] == holder
    assert api.get(f"/jobs/{behind}/why", "root")["ahead"]["jobs"][0]["id"] == ahead
