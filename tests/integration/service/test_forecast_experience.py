"""What forecasts taught the leader outlives it, is read by every server, and is written by nobody who leads no more."""

from __future__ import annotations

import pytest
from sqlalchemy import select, update

from service.db.leadership import LostLeadership, take_lease
from service.db.tables import forecast_experience
from service.scheduler.calibration import Calibration
from service.scheduler.cycle import Cycle
from service.scheduler.experience import WRITE_SECONDS, Learner, load_experience
from service.scheduler.held_world import HeldWorld
from service.scheduler.scheduling_pass import PolicyOptions
from tests.integration.service.api_server import Api

HOUR = 3600.0


def experienced() -> Calibration:
    """Of some that started and one that still waits."""
    calibration = Calibration()
    for number in range(6):
        calibration.foretold(number, number % 2, 2 * HOUR, 0.0)
    for number in range(5):
        calibration.started(number, HOUR * (number + 1))
    return calibration


def learner(api: Api) -> Learner:
    assert api.epoch is not None
    return Learner(api.database, api.epoch, "time-left", PolicyOptions())


def read(api: Api) -> Calibration:
    with api.database.read() as connection:
        return load_experience(connection)


def test_experience_is_the_same_after_it_was_written_and_read() -> None:
    before = experienced()

    after = Calibration.from_json(before.to_json())

    assert after.to_json() == before.to_json()
    for size in (0, 1):
        for kind in ("factors", "late_seconds"):
            one, other = (getattr(c, kind)(size, 2 * HOUR, (0.5, 0.94), 9 * HOUR) for c in (before, after))
            assert one == pytest.approx(other, rel=1e-3)


def test_the_next_leader_goes_on_with_what_the_last_one_learnt(api: Api) -> None:
    first = learner(api)
    first.calibration = experienced()

    first.write(WRITE_SECONDS)

    assert learner(api).calibration.to_json() == experienced().to_json()


def test_it_is_written_once_a_minute_and_only_if_there_is_news(api: Api) -> None:
    first = learner(api)
    first.write(WRITE_SECONDS)
    assert read(api).to_json() == Calibration().to_json()
    first.calibration = experienced()
    first.write(1.5 * WRITE_SECONDS)
    assert read(api).to_json() == Calibration().to_json(), "not yet"

    first.write(2 * WRITE_SECONDS)

    assert read(api).to_json() == experienced().to_json()


def test_one_that_leads_no_more_writes_nothing(api: Api) -> None:
    late = learner(api)
    late.calibration = experienced()
    assert take_lease(api.database, "another", lease_seconds=0.0) is not None

    with pytest.raises(LostLeadership):
        late.write(WRITE_SECONDS)

    assert read(api).to_json() == Calibration().to_json()


def test_a_leader_learns_in_its_turns_and_a_server_that_does_not_lead_reads_it(api: Api) -> None:
    api.node(slots=1)
    api.submit(name="holder", resources={"gpus": 1, "time": "2h"})
    api.place()
    job_id = api.submit(name="queued", resources={"gpus": 1, "time": "1h"})
    assert api.epoch is not None

    Cycle(api.database, api.state.settings, api.epoch).turn()
    elsewhere = HeldWorld(api.database, api.state.settings)
    with elsewhere.borrow():
        pass

    assert list(elsewhere.calibration.open_jobs) == [job_id]


def test_what_cannot_be_read_is_learnt_anew(api: Api) -> None:
    first = learner(api)
    first.calibration = experienced()
    first.write(WRITE_SECONDS)
    for text in ("{}", "no JSON", '{"ended": {"x": [1]}, "late": {}, "open": []}'):
        with api.database.write() as tx:
            tx.connection.execute(update(forecast_experience).values(experience=text))
        assert read(api).to_json() == Calibration().to_json()
    with api.database.read() as connection:
        assert len(connection.execute(select(forecast_experience)).all()) == 1
