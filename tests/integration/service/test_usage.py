"""`GET /usage`: what is counted of the window, who sees what, and the forms of the answer."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest
from sqlalchemy import select, update

from service.clock import rfc3339
from service.db.tables import allocations, attempt_nodes, attempts
from tests.integration.service.api_server import Api

HOUR = 3600.0
MONDAY = datetime(2026, 11, 23, tzinfo=UTC).timestamp()
WINDOW = "since=2026-11-16&until=2026-11-30"


def ran(api: Api, who: str, since: float, until: float | None, *, gpus: int = 2, busy: float = 0.0, **more: Any) -> int:
    """A job that held GPUs over these hours after that Monday; None: it still does. `busy` and `lost` in GPU-hours."""
    lost = more.pop("lost", 0.0)
    node = api.node(f"node-{who}-{since:g}".replace(".", "-").replace("--", "-m"), slots=gpus)
    job_id = api.submit(who, resources={"gpus": gpus}, **more)
    part = api.start(job_id, node)[0]
    if until is not None:
        part.ended(0)
    with api.database.write() as tx:
        attempt_id = tx.connection.execute(select(attempts.c.id).where(attempts.c.job_id == job_id)).scalar_one()
        parts = select(attempt_nodes.c.id).where(attempt_nodes.c.attempt_id == attempt_id)
        tx.connection.execute(
            update(allocations)
            .where(allocations.c.attempt_node_id.in_(parts))
            .values(allocated_at=_at(since), released_at=_at(until))
        )
        tx.connection.execute(
            update(attempts)
            .where(attempts.c.id == attempt_id)
            .values(ended_at=_at(until), busy_gpu_seconds=busy * HOUR, lost_gpu_seconds=lost * HOUR)
        )
    return job_id


def _at(hours: float | None) -> float | None:
    return None if hours is None else MONDAY + hours * HOUR


def usage(api: Api, by: str, who: str = "root", window: str = WINDOW) -> dict[tuple[str, ...], Any]:
    """(held, busy, lost, jobs) by key."""
    told = api.get(f"/usage?by={by}&{window}", who)
    numbers = ("held_gpu_hours", "busy_gpu_hours", "lost_gpu_hours", "jobs")
    return {tuple(row[axis] for axis in by.split(",")): tuple(row[n] for n in numbers) for row in told["items"]}


@pytest.fixture
def used(api: Api) -> Iterator[Api]:
    """Ann (red) over two weeks, Amy (red), Bob (blue) and a private job of his; all ended."""
    ran(api, "ann", -1, 3, busy=6.0)
    ran(api, "amy", 10, 11, gpus=1, busy=0.5, lost=0.25)
    ran(api, "bob", 20, 22, private=True)
    yield api


def test_gpu_hours_held_busy_and_lost_by_team_user_and_week(used: Api) -> None:
    assert usage(used, "team") == {("blue",): (4.0, 0.0, 0.0, 1), ("red",): (9.0, 6.5, 0.25, 2)}
    assert usage(used, "week,user") == {
        ("2026-W47", "ann"): (2.0, 1.5, 0.0, 1),
        ("2026-W48", "amy"): (1.0, 0.5, 0.25, 1),
        ("2026-W48", "ann"): (6.0, 4.5, 0.0, 1),
        ("2026-W48", "bob"): (4.0, 0.0, 0.0, 1),
    }
    total = used.get(f"/usage?by=user&{WINDOW}", "root")["total"]
    assert total == {"held_gpu_hours": 13.0, "busy_gpu_hours": 6.5, "lost_gpu_hours": 0.25, "jobs": 3}


def test_a_team_sees_its_own_and_a_user_what_is_theirs(used: Api) -> None:
    assert set(usage(used, "user", "amy")) == {("ann",), ("amy",)}
    assert set(usage(used, "user", "bob")) == {("bob",)}
    assert used.get(f"/usage?{WINDOW}", "bob")["total"]["held_gpu_hours"] == 4.0


def test_the_window_cuts_what_is_counted(used: Api) -> None:
    assert usage(used, "user", window="since=2026-11-23T02:00:00Z&until=2026-11-23T20:30:00%2B00:00") == {
        ("ann",): (2.0, 1.5, 0.0, 1),
        ("amy",): (1.0, 0.5, 0.25, 1),
        ("bob",): (1.0, 0.0, 0.0, 1),
    }


def test_what_is_still_held_counts_up_to_now(api: Api) -> None:
    with api.database.read() as connection:
        now = api.database.now(connection)
    ran(api, "ann", (now - MONDAY) / HOUR - 30, None)
    held = usage(api, "user", window=f"since={rfc3339(now - 48 * HOUR)}")[("ann",)][0]
    assert held == pytest.approx(2 * 30, abs=0.1)


def test_csv_has_the_axes_and_the_numbers(used: Api) -> None:
    answer = used.request("GET", f"/usage?by=team,week&format=csv&{WINDOW}", "root")
    assert answer.headers["content-type"].startswith("text/csv")
    rows = list(csv.DictReader(io.StringIO(answer.text)))
    assert rows[0] == {
        "team": "blue", "week": "2026-W48", "held_gpu_hours": "4.0", "busy_gpu_hours": "0.0", "lost_gpu_hours": "0.0",
        "jobs": "1",
    }  # fmt: skip


@pytest.mark.parametrize(
    ("query", "problem"),
    [
        ("by=users", "by='users'"),
        ("by=user,user", "by='user,user'"),
        ("since=soon", "since 'soon' is no time"),
        ("since=2026-11-23T00:00:00", "has no zone"),
        ("since=2026-11-23&until=2026-11-23", "must lie before until"),
        ("since=2024-01-01&until=2026-01-01", "731 days, but at most 366"),
        ("since=2024-01-01", "days, but at most 366"),
        ("format=xml", ""),
    ],
)
def test_a_question_that_makes_no_sense_is_refused_with_a_fix(api: Api, query: str, problem: str) -> None:
    answer = api.request("GET", f"/usage?{query}", "ann")
    assert (answer.status_code, problem in answer.json()["detail"]) == (422, True), answer.text
    assert answer.json()["fix"]


def test_without_a_window_it_is_the_last_four_weeks(api: Api) -> None:
    told = api.get("/usage", "ann")
    since, until = (datetime.fromisoformat(told[name]) for name in ("since", "until"))
    assert (until - since).days == 28
    assert told["items"] == []
    assert rfc3339(until.timestamp()) == told["until"]
