"""What ranks report becomes progress and curves of bounded size; nonsense is told and harms nothing."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest

from service.db.tables import metric_buckets
from service.domain.metric_pyramid import KEPT_BUCKETS, MAX_POINTS, NUM_LEVELS
from service.operations.append_stream import MAX_METRIC_NAMES, MAX_REFUSALS_TOLD
from tests.integration.service.api_server import Api, Supervisor


def line(step: Any = None, at: Any = 1.0, **metrics: Any) -> bytes:
    """One reported line. JSON as Python writes it, NaN included: a job may do so too."""
    return json.dumps({"kind": "progress", "at": at, "step": step, "metrics": metrics}).encode() + b"\n"


class Reporter:
    """Rank 0 of a running job, which appends events."""

    def __init__(self, api: Api) -> None:
        self.api = api
        self.part: Supervisor = api.start(api.submit(), api.node())[0]
        self.job_id = int(self.part.plan["job_id"])
        self.offset = 0

    def send(self, *lines: bytes) -> None:
        """Append lines, in pieces under the limit of a body."""
        data = b"".join(lines)
        for start in range(0, len(data), 60_000):
            piece = data[start : start + 60_000]
            answer = self.part.append(piece, self.offset, kind="events")
            assert answer.status_code == 200, answer.text
            self.offset += len(piece)

    def curves(self, query: str = "") -> dict[str, Any]:
        found: dict[str, Any] = self.api.get(f"/jobs/{self.job_id}/metrics?{query}")["keys"]
        return found

    def progress(self) -> dict[str, Any]:
        found: dict[str, Any] = self.api.job(self.job_id, "ann")["progress"]
        return found

    def refusals(self) -> list[str]:
        events = self.api.get(f"/jobs/{self.job_id}/events?limit=1000")["items"]
        return [event["text"] for event in events if event["kind"] == "report_refused"]


@pytest.fixture
def reporter(api: Api) -> Reporter:
    return Reporter(api)


def test_a_few_points_come_back_as_they_were_reported(reporter: Reporter) -> None:
    reporter.send(line(1, loss=3.0, lr=0.1), line(2, loss=2.5), line(3, loss=2.75))
    assert reporter.curves() == {
        "loss": {"step": [1, 2, 3], "last": [3.0, 2.5, 2.75], "min": [3.0, 2.5, 2.75], "max": [3.0, 2.5, 2.75]},
        "lr": {"step": [1], "last": [0.1], "min": [0.1], "max": [0.1]},
    }
    assert list(reporter.curves("keys=lr")) == ["lr"]
    assert reporter.curves("keys=none") == {}


def test_a_line_that_comes_in_pieces_counts_once(reporter: Reporter) -> None:
    whole = line(1, loss=3.0) + line(2, loss=2.0)
    for start in range(0, len(whole), 7):
        reporter.send(whole[start : start + 7])
    assert reporter.curves()["loss"]["step"] == [1, 2]


def test_o40_values_that_are_no_numbers_are_kept_as_words_and_the_answer_is_valid_json(reporter: Reporter) -> None:
    values = [float("nan"), float("inf"), float("-inf"), 1.0]
    reporter.send(
        *(line(step, loss=value) for step, value in enumerate(values)),
        b'{"kind":"progress","at":1,"step":9,"metrics":{"loss":1e400}}\n',
    )

    assert reporter.curves()["loss"]["last"] == ["NaN", "Infinity", "-Infinity", 1.0, "Infinity"]
    assert reporter.curves("points=1")["loss"] == {"step": [9], "last": ["Infinity"], "min": [1.0], "max": [1.0]}
    assert reporter.progress()["metrics"] == {"loss": "Infinity"}
    answer = reporter.api.request("GET", f"/jobs/{reporter.job_id}/metrics")
    json.loads(answer.text, parse_constant=lambda word: pytest.fail(f"{word} is no JSON"))


def test_o40_too_much_is_refused_by_reason_and_the_job_goes_on(reporter: Reporter) -> None:
    reporter.send(
        b'{"kind":"progress","at":1,"metrics":{"' + b"n" * 1_000_000 + b'":1}}\n',
        line(1, **{f"m{number}": 1.0 for number in range(10_000)}),
        b"no json\n",
        b"[" * 5_000 + b"\n",
        b'{"kind":"progress","at":1,"metrics":{"a\\u0000b":1}}\n',
        b"\xff\xfe\n",
        line(2, loss=1.0),
    )
    assert list(reporter.curves()) == ["loss"]
    assert len(reporter.refusals()) >= 3
    assert any("cannot be stored" in text for text in reporter.refusals())
    assert reporter.part.ended().status_code == 200
    assert reporter.api.job(reporter.job_id)["state"] == "succeeded"


def test_o40_new_names_at_every_step_do_not_grow_without_bound(reporter: Reporter) -> None:
    reporter.send(*(line(step, **{f"m{step}-{number}": 1.0 for number in range(100)}) for step in range(15)))
    assert len(reporter.curves()) == len(reporter.progress()["metrics"]) == MAX_METRIC_NAMES
    assert any("different metric names" in text for text in reporter.refusals())


def test_o40_a_job_that_reports_nonsense_at_every_step_does_not_fill_its_history(reporter: Reporter) -> None:
    for step in range(MAX_REFUSALS_TOLD + 10):
        reporter.send(line(step, **{"loss": f"word {step}", "x" * (201 + step): 1}))
    assert len(reporter.refusals()) == MAX_REFUSALS_TOLD


@pytest.mark.parametrize("at", [1e300, -1e300, 1e18, float("nan"), float("inf"), "x", None, 0])
def test_a_time_that_is_none_breaks_no_page(reporter: Reporter, at: Any) -> None:
    reporter.send(line(1, at=at, loss=1.0), line(2, at=at, loss=1.0))
    assert reporter.progress()["step"] == 2
    assert reporter.api.get("/jobs")["items"][0]["progress"]["updated_at"].startswith(("19", "20"))


def test_a_clock_that_runs_ahead_does_not_put_progress_into_the_future(reporter: Reporter) -> None:
    reporter.send(line(1, at=4e9, loss=1.0))
    reporter.send(line(2, at=4e9 + 1, loss=1.0))
    assert reporter.progress()["step"] == 2
    assert reporter.progress()["updated_at"] < "2090", "4e9 is in 2096"


STEP_PATTERNS: dict[str, list[int]] = {
    "every step": list(range(6_000)),
    "every thousandth step, off the even ones": list(range(1, 4_000_000, 1_000)),
    "huge steps": [number * 8**6 for number in range(3_000)],
    "up to the largest step": [0, 1, 2, 2**53 - 2, 2**53 - 1],
}


@pytest.mark.parametrize("pattern", STEP_PATTERNS)
def test_curves_of_any_length_have_at_most_the_points_asked_for_and_bounded_rows(
    reporter: Reporter, pattern: str
) -> None:
    steps = STEP_PATTERNS[pattern]
    generator = random.Random(1)
    values = {step: generator.uniform(-1, 1) for step in steps}
    reporter.send(*(line(step, loss=value) for step, value in values.items()))

    with reporter.api.database.read() as connection:
        num_rows = len(connection.execute(metric_buckets.select()).all())
    assert num_rows <= NUM_LEVELS * (KEPT_BUCKETS + 1)
    for points in (1, 7, 500, MAX_POINTS):
        curve = reporter.curves(f"points={points}")["loss"]
        assert 1 <= len(curve["step"]) <= points
        assert len({len(column) for column in curve.values()}) == 1
        assert curve["step"][-1] == steps[-1]
        assert curve["last"] == [values[step] for step in curve["step"]]
        if curve["step"][0] < steps[len(steps) // 2]:  # the whole range is drawn
            assert min(curve["min"]) == min(values.values())
            assert max(curve["max"]) == max(values.values())


@pytest.mark.parametrize("query", ["points=0", "points=2001", "points=x", "first=-1", f"first={10**30}", "attempt=0"])
def test_a_question_that_is_none_is_refused(reporter: Reporter, query: str) -> None:
    answer = reporter.api.request("GET", f"/jobs/{reporter.job_id}/metrics?{query}")
    assert (answer.status_code, answer.json()["code"]) == (422, "invalid_request")


def test_a_waiting_job_has_no_curves(api: Api) -> None:
    assert api.get(f"/jobs/{api.submit()}/metrics") == {"attempt": None, "keys": {}}
