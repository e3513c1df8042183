"""Once a cancel is acknowledged nothing wins over it, and at whatever step it comes the GPUs are free again."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from service.auth.tokens import make_token
from tests.integration.service.api_server import Api, FakeNode, Supervisor, in_every_order

GANG: dict[str, Any] = {"resources": {"nodes": 2, "gpus_per_node": 1}}


class Run:
    """A gang of two nodes on its way, step by step."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.nodes: list[FakeNode] = [api.node("node-1", slots=1), api.node("node-2", slots=1)]
        self.job_id = api.submit(**GANG)
        self.attempt_id = 0
        self.parts: list[Supervisor] = []

    def reserve(self) -> None:
        """The scheduler holds GPUs for it."""
        self.api.place()
        self.attempt_id = self.api.attempt_id(self.job_id)

    def hint(self) -> None:
        """The agents are told."""
        assert [node.beat()["launch"] for node in self.nodes] == [[self.attempt_id]] * 2

    def claim_first(self) -> None:
        self.parts.append(self.nodes[0].claim(self.attempt_id))

    def claim_second(self) -> None:
        self.parts.append(self.nodes[1].claim(self.attempt_id))

    def rendezvous(self) -> None:
        assert self.parts[0].call("POST", "rendezvous", json={"address": "127.0.0.1", "port": 4000}).status_code == 200

    def start_first(self) -> None:
        assert self.parts[0].started().status_code == 200

    def start_second(self) -> None:
        assert self.parts[1].started().status_code == 200

    def first_log_line(self) -> None:
        assert self.parts[0].append(b"hello\n", 0).json() == {"size": 6}

    def fail_first(self) -> None:
        assert self.parts[0].call("POST", "failing", json=self.parts[0].report(1)).status_code == 200

    def end_second(self) -> None:
        assert self.parts[1].ended(stopped=True, signal="SIGTERM").status_code == 200


STEPS: tuple[Callable[[Run], None], ...] = (
    Run.reserve, Run.hint, Run.claim_first, Run.claim_second, Run.rendezvous, Run.start_first, Run.start_second,
    Run.first_log_line, Run.fail_first, Run.end_second,
)  # fmt: skip


@pytest.mark.parametrize("num_done", range(len(STEPS) + 1), ids=["submitted", *(step.__name__ for step in STEPS)])
def test_o08_a_cancel_after_any_step_frees_everything_and_the_next_job_starts(api: Api, num_done: int) -> None:
    run = Run(api)
    for step in STEPS[:num_done]:
        step(run)

    assert api.cancel(run.job_id).status_code == 202
    for part in run.parts:
        if part.call("GET", "directive").status_code == 200:
            assert part.directive()["stop"]["intent"] == "cancel"
            part.ended(stopped=True, signal="SIGTERM")

    job = api.job(run.job_id)
    assert (job["state"], job["outcome"], job["attempt"]) == ("cancelled", "cancelled", None)
    assert (api.held_gpus(), api.quarantined_gpus()) == ([], [])
    assert [node.beat()["launch"] for node in run.nodes] == [[], []]
    assert api.submit(**GANG) and api.place() == 1


@pytest.mark.parametrize("num_done", range(1, len(STEPS) + 1), ids=[step.__name__ for step in STEPS])
def test_o08_a_cancelled_attempt_goes_no_step_further(api: Api, num_done: int) -> None:
    run = Run(api)
    for step in STEPS[:num_done]:
        step(run)
    api.cancel(run.job_id)
    state = api.job(run.job_id)["state"]

    for node in run.nodes[len(run.parts) :]:
        assert node.try_claim(run.attempt_id, make_token("attempt")).json()["code"] == "not_assigned"
    for part in run.parts:
        part.started()
    api.place()

    assert api.job(run.job_id)["state"] == state
    assert state in ("stopping", "cancelled")


EVENTS = ("cancel", "started-0", "started-1", "ended-0", "ended-1")


@pytest.mark.parametrize("order", in_every_order(EVENTS))
def test_o07_after_a_cancel_is_acknowledged_no_read_shows_anything_else(served: Api, order: tuple[str, ...]) -> None:
    """Held back reports arrive around the cancel in every order, successes among them."""
    api = served
    api.reset()
    run = Run(api)
    for step in STEPS[:4]:
        step(run)
    is_cancelled = was_over = False
    for event in order:
        if event == "cancel":
            was_over = api.job(run.job_id)["state"] == "succeeded"
            assert api.cancel(run.job_id).status_code == (200 if was_over else 202)
            is_cancelled = not was_over
        else:
            kind, _, number = event.partition("-")
            part = run.parts[int(number)]
            answer = part.started() if kind == "started" else part.ended(0)
            assert answer.status_code in (200, 409), answer.text
        state = api.job(run.job_id)["state"]
        assert not is_cancelled or state in ("stopping", "cancelled"), f"{state} after {event}"

    assert api.job(run.job_id)["state"] == ("succeeded" if was_over else "cancelled")
    assert api.held_gpus() == []


def test_cancelling_again_changes_nothing(api: Api) -> None:
    run = Run(api)
    for step in STEPS[:7]:
        step(run)
    assert api.cancel(run.job_id).status_code == 202
    before = api.snapshot()

    assert [api.cancel(run.job_id).status_code for _ in range(3)] == [202] * 3
    assert api.snapshot() == before


@pytest.mark.parametrize("code", [0, 1])
def test_a_job_that_has_ended_cannot_be_cancelled_any_more(api: Api, code: int) -> None:
    job_id = api.submit()
    api.start(job_id, api.node())[0].ended(code)
    before = api.snapshot()

    answer = api.cancel(job_id)

    assert (answer.status_code, answer.json()["state"]) == (200, "failed" if code else "succeeded")
    assert api.snapshot() == before


def test_a_cancel_says_who_and_why(api: Api) -> None:
    job_id = api.submit()
    api.cancel(job_id)
    assert api.job(job_id)["cause"]["sentence"] == "The job was cancelled by ann: enough."


def test_a_job_between_two_attempts_is_cancelled_without_a_further_one(api: Api) -> None:
    job_id = api.submit(retry={"max": 3})
    api.start(job_id, api.node())[0].ended(1)
    assert api.job(job_id)["state"] == "waiting"

    api.cancel(job_id)

    assert (api.place(), api.job(job_id)["state"], api.job(job_id)["attempts"]) == (0, "cancelled", 1)


def test_o17_a_cancel_waits_for_a_node_that_does_not_answer_and_says_so(api: Api) -> None:
    job_id = api.submit()
    node = api.node()
    part = api.start(job_id, node)[0]
    sweeper = api.sweeper()
    for now in range(0, 30, 2):
        sweeper.sweep(float(now))
    api.cancel(job_id)
    for now in range(30, 400, 2):
        sweeper.sweep(float(now))

    job = api.job(job_id)
    assert (job["state"], job["reason"]["code"]) == ("stopping", "stop_unconfirmed")
    assert "node-1" in job["reason"]["text"]
    assert api.held_gpus() != [], "its devices are not offered"
    node.beat(attempts=[part.attempt_id])
    part.ended(stopped=True, signal="SIGTERM")
    assert (api.job(job_id)["state"], api.held_gpus()) == ("cancelled", [])


def test_an_admin_may_say_that_a_silent_node_is_off(api: Api) -> None:
    job_id = api.submit()
    node = api.node()
    api.start(job_id, node)
    sweeper = api.sweeper()
    assert api.request("POST", "/nodes/node-1/release", "root").json()["code"] == "conflict"
    for now in range(0, 30, 2):
        sweeper.sweep(float(now))
    api.cancel(job_id)

    answer = api.request("POST", "/nodes/node-1/release", "root")

    assert (answer.status_code, answer.json()) == (200, {"name": "node-1", "ended": 1})
    assert (api.job(job_id)["state"], api.held_gpus(), api.quarantined_gpus()) == ("cancelled", [], [])
