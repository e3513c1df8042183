"""What a job file says of its turn: start time and zone, needed jobs, the end of its time, priority, its nodes."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from datetime import datetime
from typing import Any

import pytest

from service.domain.priority import TOP_PRIORITY
from service.domain.spec import Condition, Dependency, JobSpec
from service.domain.start_time import read_start_time, shown_in_zone
from service.errors import FieldProblem
from service.schemas.parse_spec import InvalidSpec, parse_spec

NEW_YORK = "America/New_York"
TRAINED = {"run": {"recipe": "mlp"}, "train": {"steps": 10}}


def parse(*overrides: str, **members: Any) -> JobSpec:
    document = {"name": "x", "run": {"command": ["true"]}, **members}
    return parse_spec(json.dumps(document).encode(), "application/json", overrides)


def problems_of(*overrides: str, **members: Any) -> dict[str, FieldProblem]:
    with pytest.raises(InvalidSpec) as caught:
        parse(*overrides, **members)
    return {problem.pointer: problem for problem in caught.value.problems}


# --- Start time ----------------------------------------------------------------------------------------------------


@pytest.fixture(params=["UTC", "Europe/Berlin", "Pacific/Kiritimati"])
def zone_of_server(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The process runs in another zone than the one that the job names."""
    monkeypatch.setenv("TZ", request.param)
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


@pytest.mark.parametrize(
    ("local", "utc"),
    [
        ("2026-03-08T01:59", "2026-03-08T06:59:00+00:00"),
        ("2026-03-08T03:00", "2026-03-08T07:00:00+00:00"),
        ("2026-03-09T02:30", "2026-03-09T06:30:00+00:00"),
        ("2026-10-31T02:30", "2026-10-31T06:30:00+00:00"),
        ("2026-11-01T00:59", "2026-11-01T04:59:00+00:00"),
        ("2026-11-01T02:30", "2026-11-01T07:30:00+00:00"),
    ],
)
def test_o57_a_local_start_time_is_the_same_instant_wherever_the_server_stands(
    zone_of_server: None, local: str, utc: str
) -> None:
    spec = parse(start_after=local, zone=NEW_YORK)

    assert spec.start_after is not None
    assert datetime.fromisoformat(spec.start_after).timestamp() == datetime.fromisoformat(utc).timestamp()
    assert spec.start_after.startswith(local), "shown as it was written, with the offset of that day"
    assert spec.zone == NEW_YORK


def test_o57_a_time_that_the_change_of_clocks_skips_is_refused_with_its_neighbours(zone_of_server: None) -> None:
    problem = problems_of(start_after="2026-03-08T02:30", zone=NEW_YORK)["start_after"]

    assert "does not exist in America/New_York" in problem.message
    assert "2026-03-08T01:30:00-05:00 or 2026-03-08T03:30:00-04:00" in problem.suggestion


def test_o57_a_time_that_comes_twice_is_refused_with_both_instants(zone_of_server: None) -> None:
    problem = problems_of(start_after="2026-11-01T01:30", zone=NEW_YORK)["start_after"]

    assert "happens twice in America/New_York" in problem.message
    assert "2026-11-01T01:30:00-04:00 for the first time or 2026-11-01T01:30:00-05:00" in problem.suggestion
    first, second = (parse(start_after=f"2026-11-01T01:30:00{offset}").start_after for offset in ("-04:00", "-05:00"))
    assert first is not None and second is not None
    assert datetime.fromisoformat(second).timestamp() - datetime.fromisoformat(first).timestamp() == 3_600


def test_o57_an_hour_of_elapsed_time_is_an_hour_over_the_change_of_clocks() -> None:
    """What is stored are seconds: the night of the change has 25 hours, and nothing of it is counted twice."""
    before, after = (read_start_time(f"2026-11-{day}T12:00", NEW_YORK) for day in ("01", "02"))
    night = read_start_time("2026-10-31T12:00", NEW_YORK)

    assert (before.at - night.at, after.at - before.at) == (25 * 3_600, 24 * 3_600)
    assert shown_in_zone(night.at + 14 * 3_600, NEW_YORK) == "2026-11-01T01:00:00-05:00"
    assert shown_in_zone(night.at + 13 * 3_600, NEW_YORK) == "2026-11-01T01:00:00-04:00"


@pytest.mark.parametrize(
    ("members", "pointer", "message"),
    [
        ({"start_after": "2026-11-01T02:30"}, "start_after", "does not say of which zone it is"),
        ({"start_after": "tomorrow", "zone": NEW_YORK}, "start_after", "is not a time"),
        ({"start_after": "2026-11-01T02:30Z", "zone": NEW_YORK}, "start_after", "has an offset already"),
        ({"start_after": "9999-12-31T23:59Z"}, "start_after", "is in the year 9999"),
        ({"start_after": "2026-11-01T02:30", "zone": "America/Nowhere"}, "zone", "is not a zone"),
        ({"start_after": "2026-11-01T02:30", "zone": "../../etc/passwd"}, "zone", "is not a zone"),
        ({"start_after": "2026-11-01T02:30", "zone": "localtime"}, "zone", "is not a zone"),
        ({"zone": NEW_YORK}, "zone", "there is no start_after"),
    ],
)
def test_a_start_time_that_means_nothing_definite_is_refused(
    members: dict[str, Any], pointer: str, message: str
) -> None:
    problem = problems_of(**members)[pointer]
    assert message in problem.message
    assert problem.suggestion


# --- Needed jobs, priority, the end of its time --------------------------------------------------------------------


def test_a_needed_job_is_named_by_its_id_or_with_a_condition() -> None:
    spec = parse(after=[12, {"job": 13}, {"job": 14, "condition": "not_ok"}])
    assert spec.after == (
        Dependency(job=12),
        Dependency(job=13, condition=Condition.OK),
        Dependency(job=14, condition=Condition.NOT_OK),
    )
    assert parse("after=[7, {job: 8, condition: any}]").after[1] == Dependency(job=8, condition=Condition.ANY)


def test_every_wrong_need_is_told_at_its_place() -> None:
    found = problems_of(after=[12, {"job": 12, "condition": "any"}, 0, "x", {"job": 3, "condition": "sometimes"}])
    assert "job 12 is named already, as after[0]" in found["after[1]"].message
    assert {"after[2]", "after[3]", "after[4].condition"} <= set(found)


@pytest.mark.parametrize(
    ("written", "priority"), [("low", -50), ("normal", 0), ("high", 50), ("top", TOP_PRIORITY), (7, 7), (-100, -100)]
)
def test_a_priority_is_a_word_or_a_number(written: Any, priority: int) -> None:
    assert parse(priority=written).priority == priority
    assert parse(f"priority={written}").priority == priority


@pytest.mark.parametrize(
    ("written", "told"), [("urgent", "low, normal, high, top"), (101, "at most 100"), (1.5, "whole")]
)
def test_another_priority_is_refused_with_what_there_is(written: Any, told: str) -> None:
    assert told in problems_of(priority=written)["priority"].message


def test_a_job_is_requeued_at_its_limit_only_if_it_has_one_and_resumes() -> None:
    assert parse(**TRAINED, on_time_limit="requeue", resources={"time": "1h"}).on_time_limit == "requeue"
    assert parse(preemptible=True, on_time_limit="requeue", resources={"time": "1h"}).on_time_limit == "requeue"
    assert "no time limit" in problems_of(**TRAINED, on_time_limit="requeue")["on_time_limit"].message
    alone = problems_of(on_time_limit="requeue", resources={"time": "1h"})["on_time_limit"]
    assert "from its beginning each time" in alone.message
    assert "preemptible: true" in alone.suggestion


# --- Its nodes -----------------------------------------------------------------------------------------------------


def test_labels_are_text_also_where_they_look_like_numbers_and_may_hold_dots() -> None:
    assert parse("resources.labels.rack.row=7").resources.labels == {"rack.row": "7"}
    assert "in quotes" in problems_of(resources={"labels": {"rack": 7}})["resources.labels.rack"].suggestion
    assert "resources.labels.a\nb" in problems_of(resources={"labels": {"a\nb": "x"}})


@pytest.mark.parametrize("resources", [{"gpus": 0}, {"nodes": 2, "gpus_per_node": 0}])
def test_memory_of_gpus_needs_gpus(resources: dict[str, Any]) -> None:
    found = problems_of(resources={**resources, "gpu_memory": "40GiB"})
    assert "asks for no GPU" in found["resources.gpu_memory"].message


@pytest.mark.parametrize(
    ("key", "means"), [("depends_on", "after"), ("vram", "resources.gpu_memory"), ("node_selector", "resources.labels")]
)
def test_words_of_other_systems_lead_to_the_key(key: str, means: str) -> None:
    assert problems_of(**{key: 1})[key].suggestion == f"Did you mean {means}?"
