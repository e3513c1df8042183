"""A stale token changes nothing, on no route; an old report changes nothing, in no order (I: effects never overlap)."""

from __future__ import annotations

from typing import Any

import pytest

from service.app import ROUTERS
from service.auth.tokens import make_token
from tests.integration.service.api_server import Api, Supervisor, in_every_order
from tests.unit.service.endings import failure

GANG: dict[str, Any] = {"resources": {"nodes": 2, "gpus_per_node": 1}}
ROUTES: dict[str, tuple[str, str, dict[str, Any]]] = {
    "directive": ("GET", "directive?version=0&wait=0", {}),
    "rendezvous": ("POST", "rendezvous", {"json": {"address": "10.6.6.6", "port": 666}}),
    "started": ("POST", "started", {"json": {"ranks": [], "sent_at": 1.0}}),
    "log bytes": ("PUT", "streams/log/0?offset=3", {"content": b"stale"}),
    "log bytes from the start": ("PUT", "streams/log/0?offset=0", {"content": b"STALE"}),
    "events": ("PUT", "streams/events/0?offset=0", {"content": b'{"kind": "progress", "at": 1, "step": 9}\n'}),
    "failing": ("POST", "failing", {}),
    "ended": ("POST", "ended", {}),
    "bundle": ("GET", "bundle", {}),
}
"""Every route of a supervisor. The bodies of reports are made by the part itself."""


def send(part: Supervisor, route: str, token: str | None = None) -> Any:
    """Call a route of a supervisor as an old one would."""
    method, path, options = ROUTES[route]
    if route in ("failing", "ended"):
        options = {"json": part.report(9)}
    return part.call(method, path, token=token or part.token, **options)


def supervisor_routes(api: Api) -> set[str]:
    """The last part of every route below `/attempts/…/nodes/…`."""
    paths = (getattr(route, "path", "") for route in api_routes(api))
    return {path.split("/nodes/{node_rank}/")[1] for path in paths if "/nodes/{node_rank}/" in path}


def api_routes(api: Api) -> list[Any]:
    return [route for router in ROUTERS for route in router.routes]


def test_every_route_of_a_supervisor_is_in_this_test(api: Api) -> None:
    tested = {path.split("?")[0].split("/")[0] for _, path, _ in ROUTES.values()}
    assert tested == {path.split("/")[0] for path in supervisor_routes(api)}


def lost_and_replaced(api: Api) -> Supervisor:
    """A part of an attempt that was lost with its node, whose job now runs again elsewhere."""
    old = api.node("node-1")
    job_id = api.submit()
    part = api.start(job_id, old)[0]
    part.append(b"abc", 0)
    sweeper = api.sweeper()
    for now in range(0, 200, 2):
        sweeper.sweep(float(now))
    assert api.job(job_id)["state"] == "waiting"
    new = api.node("node-2")
    assert api.start(job_id, new)[0].attempt_id != part.attempt_id
    return part


@pytest.mark.parametrize("route", ROUTES)
def test_a_stale_token_changes_nothing(api: Api, route: str) -> None:
    part = lost_and_replaced(api)
    before = api.snapshot()

    answer = send(part, route)

    assert (answer.status_code, answer.json()["code"]) == (409, "attempt_fenced")
    assert api.snapshot() == before
    assert api.state.streams.read_at(part.attempt_id, "log", 0, 0, 99) == b"abc", "not even a byte on disk"


@pytest.mark.parametrize("route", ROUTES)
@pytest.mark.parametrize("kind", ["another claim", "a node", "a user", "an enrolment", "nobody"])
def test_a_token_that_did_not_claim_the_part_changes_nothing(api: Api, route: str, kind: str) -> None:
    nodes = [api.node("node-1"), api.node("node-2")]
    first, second = api.start(api.submit(**GANG), *nodes)
    token = {
        "another claim": second.token,
        "a node": nodes[0].credential,
        "a user": api.tokens["root"],
        "an enrolment": api.tokens["enrolment"],
        "nobody": make_token("attempt"),
    }[kind]
    before = api.snapshot()

    answer = send(first, route, token)

    assert (answer.status_code, answer.json()["code"]) == (401, "unauthorized")
    assert api.snapshot() == before


@pytest.mark.parametrize("route", [route for route in ROUTES if route != "ended"])
def test_after_its_own_end_a_part_is_fenced(api: Api, route: str) -> None:
    part = api.start(api.submit(), api.node())[0]
    part.ended()
    before = api.snapshot()

    answer = send(part, route)

    assert (answer.status_code, answer.json()["code"]) == (409, "attempt_fenced")
    assert api.snapshot() == before


def test_the_end_told_again_is_accepted_and_changes_nothing(api: Api) -> None:
    part = api.start(api.submit(), api.node())[0]
    assert part.ended(3).status_code == 200
    before = api.snapshot()

    assert [part.ended(code).status_code for code in (3, 0, 9)] == [200] * 3
    assert api.snapshot() == before


def test_a_part_that_was_lost_may_not_report_its_end_afterwards(api: Api) -> None:
    part = lost_and_replaced(api)
    assert part.ended(0).json()["code"] == "attempt_fenced"


def test_a_fenced_attempt_is_named_to_its_agent_until_it_has_forgotten_it(api: Api) -> None:
    node = api.node()
    part = api.start(api.submit(), node)[0]
    part.ended()

    assert node.beat(attempts=[part.attempt_id, 999])["fenced"] == [part.attempt_id, 999]
    assert node.beat(process_sets=[part.attempt_id])["fenced"] == [part.attempt_id]
    assert node.beat()["fenced"] == []


def test_a_started_that_is_told_again_changes_nothing(api: Api) -> None:
    part = api.start(api.submit(), api.node())[0]
    before = api.snapshot()
    assert part.started().status_code == 200
    assert api.snapshot() == before


REPORTS = ("started-0", "started-1", "failing-1", "ended-1", "ended-0")


@pytest.mark.parametrize("order", in_every_order(REPORTS))
def test_reports_in_any_order_and_twice_end_the_same_way(served: Api, order: tuple[str, ...]) -> None:
    """Rank 1 fails with 7: in whatever order the reports arrive, it is the cause, and all is free again."""
    api = served
    api.reset()
    nodes = [api.node("node-1", slots=1), api.node("node-2", slots=1)]
    job_id = api.submit(**GANG)
    api.place()
    parts = [node.claim(api.attempt_id(job_id)) for node in nodes]
    for report in order:
        kind, _, number = report.partition("-")
        part = parts[int(number)]
        for _ in range(2):
            if kind == "started":
                part.started()
            elif kind == "failing":
                part.call("POST", "failing", json=part.report(7, at=50.0))
            elif number == "1":
                part.ended(7, at=50.0)
            else:
                part.ended(signal="SIGTERM", stopped=True, at=60.0)

    job = api.job(job_id)
    assert (job["state"], job["outcome"], job["cause"]["rank"], job["cause"]["exit_code"]) == (
        "failed", "user_error", 1, 7,
    )  # fmt: skip
    assert (job["attempts"], api.held_gpus()) == (1, [])


def test_a_report_that_is_none_is_refused_and_changes_nothing(api: Api) -> None:
    part = api.start(api.submit(), api.node())[0]
    before = api.snapshot()
    broken: list[Any] = [{}, {"ranks": 1}, {**part.report(), "ranks": [{}]}, [], {**part.report(), "failure": 1}]
    for body in broken:
        answer = part.call("POST", "ended", json=body)
        assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")
    assert api.snapshot() == before


def test_a_report_that_quotes_what_no_database_stores_is_kept(api: Api) -> None:
    job_id = api.submit()
    part = api.start(job_id, api.node())[0]

    assert part.ended(1, error=("OSError", "cannot open '/data/\udcff\0'")).status_code == 200

    job = api.job(job_id)
    assert (job["state"], job["cause"]["error"]["message"]) == ("failed", "cannot open '/data/\ufffd\ufffd'")


def test_an_outcome_that_only_a_newer_node_knows_ends_the_attempt_all_the_same(api: Api) -> None:
    job_id = api.submit()
    part = api.start(job_id, api.node())[0]

    assert part.ended(0, failure=failure("gpu_on_fire", "the GPU burns")).status_code == 200

    job = api.job(job_id)
    assert job["state"] == "failed"
    assert "the GPU burns" in job["cause"]["sentence"]


def test_what_could_not_be_ended_keeps_its_gpus_aside_until_the_node_says_they_are_clean(api: Api) -> None:
    node = api.node(slots=1)
    part = api.start(api.submit(), node)[0]
    part.ended(1, leftovers=("17 python train.py",))

    assert "17 python train.py" in api.quarantined_gpus()[0]
    node.beat(process_sets=[part.attempt_id])
    waiting = api.submit()
    assert (api.place(), api.job(waiting)["reason"]["code"]) == (0, "needs_gpus")
    node.beat()
    assert (api.quarantined_gpus(), api.place()) == ([], 1)
