"""A rank may write anything into its events: what counts is kept, what cannot be stored is refused by reason."""

from __future__ import annotations

import json
import math
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from service.domain.progress import (
    MAX_METRICS,
    MAX_NAME_LENGTH,
    Progress,
    ProgressEvent,
    advance,
    known_metrics,
    parse_event,
)


def event_of(line: str, rank: int = 0) -> ProgressEvent | str:
    return parse_event(rank, json.loads(line))


def metric(text: str) -> Any:
    """The stored form of a metric that stands as `text` in the line."""
    event = event_of(f'{{"kind": "progress", "at": 1.0, "metrics": {{"loss": {text}}}}}')
    assert isinstance(event, ProgressEvent), event
    return event.metrics["loss"]


def step_event(step: int | None, at: float, rank: int = 0, **metrics: float) -> ProgressEvent:
    return ProgressEvent(
        rank=rank, at=at, step=step, total_steps=None, phase=None, checkpoint=None, metrics=dict(metrics)
    )


@pytest.mark.parametrize(
    ("written", "stored"),
    [
        ("2.5", 2.5),
        ("-0.0", -0.0),
        ("3", 3.0),
        ("NaN", "NaN"),
        ('"NaN"', "NaN"),
        ("Infinity", "Infinity"),
        ("-Infinity", "-Infinity"),
        ("1e400", "Infinity"),
        ("-1e400", "-Infinity"),
        (str(10**400), "Infinity"),
        (str(-(10**400)), "-Infinity"),
        (str(2**63), float(2**63)),
        ("5e-324", 5e-324),
    ],
)
def test_o40_a_number_of_any_kind_has_a_stored_form_that_is_valid_json(written: str, stored: Any) -> None:
    assert metric(written) == stored
    assert json.loads(json.dumps(metric(written), allow_nan=False)) == stored


@pytest.mark.parametrize(
    ("metrics", "why"),
    [
        ({"n" * 1_000_000: 1.0}, "a metric name has 1000000 characters"),
        ({"n" * (MAX_NAME_LENGTH + 1): 1.0}, "a metric name has 201 characters"),
        ({"": 1.0}, "a metric name has 0 characters"),
        ({f"m{number}": 1.0 for number in range(10_000)}, f"at most {MAX_METRICS} names"),
        ({"loss": "low"}, "metric 'loss' is not a number"),
        ({"loss": True}, "not a number"),
        ({"loss": None}, "not a number"),
        ({"loss": [1.0]}, "not a number"),
        ({"a\0b": 1.0}, "cannot be stored"),
        ({"\udcff": 1.0}, "cannot be stored"),
        ([1.0], "must be an object"),
    ],
)
def test_o40_what_is_too_much_or_no_number_is_refused_by_reason(metrics: Any, why: str) -> None:
    refused = parse_event(0, {"kind": "progress", "at": 1.0, "metrics": metrics})
    assert isinstance(refused, str)
    assert why in refused
    assert len(refused) < 200


@pytest.mark.parametrize("data", [None, 1, "x", [], {}, {"kind": "other"}, {"kind": ["progress"]}])
def test_a_line_that_is_no_progress_record_is_refused(data: Any) -> None:
    assert parse_event(0, data) == "not a progress record"


@pytest.mark.parametrize("step", [-1, 2**53, 10**30, 1.5, True, "7", None, [1]])
def test_a_step_that_is_no_whole_number_in_range_is_not_taken(step: Any) -> None:
    event = parse_event(0, {"kind": "progress", "at": 1.0, "step": step, "metrics": {"loss": 1}})
    assert isinstance(event, ProgressEvent)
    assert (event.step, event.metrics) == (None, {"loss": 1.0})


@pytest.mark.parametrize("at", [None, "now", True, math.nan, math.inf, [1]])
def test_a_time_that_is_none_is_zero(at: Any) -> None:
    event = parse_event(0, {"kind": "progress", "at": at})
    assert isinstance(event, ProgressEvent)
    assert event.at == 0.0


def test_texts_are_cut_and_made_storable() -> None:
    event = parse_event(0, {"kind": "progress", "at": 1, "phase": "a\0b", "checkpoint": "\udcff" + "x" * 5_000})
    assert isinstance(event, ProgressEvent)
    assert event.phase == "a\ufffdb"
    assert event.checkpoint == "\ufffd" + "x" * 999


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)


@given(
    st.fixed_dictionaries({}, optional=dict.fromkeys(("at", "step", "total_steps", "phase", "metrics"), json_values))
)
def test_whatever_a_job_writes_is_an_event_or_a_reason_and_never_an_error(data: dict[str, Any]) -> None:
    found = parse_event(3, {"kind": "progress", **data})
    if isinstance(found, ProgressEvent):
        json.dumps(advance(None, found).to_json(), allow_nan=False).encode()


def test_the_step_never_goes_back_and_the_latest_metric_wins() -> None:
    progress = None
    for event in (step_event(5, 10.0, loss=3.0), step_event(4, 11.0, loss=2.0), step_event(None, 12.0, lr=0.1)):
        progress = advance(progress, event)
    assert progress is not None
    assert (progress.step, progress.metrics, progress.updated_at) == (5, {"loss": 2.0, "lr": 0.1}, 12.0)


def test_the_lowest_rank_that_reports_speaks_for_the_gang() -> None:
    progress = advance(None, step_event(9, 1.0, rank=2))
    progress = advance(progress, step_event(50, 2.0, rank=3))
    assert (progress.rank, progress.step) == (2, 9)
    progress = advance(progress, step_event(4, 3.0, rank=0))
    assert (progress.rank, progress.step) == (0, 4)


def test_the_estimate_follows_the_rate_and_the_time_since() -> None:
    progress: Progress | None = None
    for step in range(1, 11):
        progress = advance(progress, step_event(step, at=step * 2.0))
    assert progress is not None
    progress = Progress.from_json({**progress.to_json(), "total_steps": 20})

    assert progress.seconds_per_step == pytest.approx(2.0)
    assert progress.eta_seconds(now=20.0) == pytest.approx(20.0)
    assert progress.eta_seconds(now=25.0) == pytest.approx(15.0)
    assert progress.eta_seconds(now=1e9) == 0.0


def test_without_a_rate_or_a_total_there_is_no_estimate() -> None:
    assert advance(None, step_event(1, 1.0)).eta_seconds(2.0) is None
    assert advance(advance(None, step_event(1, 1.0)), step_event(2, 1.0)).eta_seconds(2.0) is None


def test_progress_is_stored_and_read_back_unchanged() -> None:
    progress = advance(None, step_event(7, 1.5, loss=2.25))
    assert Progress.from_json(json.loads(json.dumps(progress.to_json()))) == progress


def test_o40_beyond_the_limit_only_names_that_are_known_are_kept() -> None:
    progress = advance(None, step_event(1, 1.0, a=1.0, b=1.0))

    assert known_metrics(progress, step_event(2, 2.0, b=2.0, c=2.0), limit=3) == {"b": 2.0, "c": 2.0}
    assert known_metrics(progress, step_event(2, 2.0, b=2.0, c=2.0, d=2.0), limit=3) == {"b": 2.0}
    assert known_metrics(None, step_event(2, 2.0, a=1.0), limit=1) == {"a": 1.0}
