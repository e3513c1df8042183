"""A steady clock goes on with the machine's, leaves its pauses out and never goes back."""

from __future__ import annotations

import pytest

from service import clock
from service.db.session import Database
from tests.support.steady_clock import LARGEST_STEP_SECONDS, SteadyClock, steady_time


def test_a_pause_between_two_readings_counts_for_a_small_step() -> None:
    steady = SteadyClock()
    read = clock.epoch() + 1.0
    shown = steady.show(read)

    assert steady.show(read + 0.002) == pytest.approx(shown + 0.002, abs=1e-4)
    assert steady.show(read + 60.0) == pytest.approx(shown + 0.002 + LARGEST_STEP_SECONDS, abs=1e-4)


def test_a_machine_whose_clock_is_set_back_stops_it_and_no_more() -> None:
    steady = SteadyClock()
    read = clock.epoch() + 1.0
    shown = steady.show(read)

    assert [steady.show(read - 30.0), steady.show(read)] == [shown, shown]
    assert steady.show(read + 0.002) > shown


def test_the_process_and_its_database_read_it_until_it_is_given_up(
    database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    database = Database(database_url)
    real = clock.epoch
    with steady_time(database), database.read() as connection:
        first = database.now(connection)
        monkeypatch.setattr("time.time", lambda at=real(): at + 3600.0)
        assert clock.epoch() - first < 1.0
        assert database.now(connection) - first < 1.0
    assert clock.epoch is real
    database.dispose()
