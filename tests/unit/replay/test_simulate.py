"""The event loop: order within an instant, preemption and what it costs, reports; and what it refuses to believe."""

from __future__ import annotations

import dataclasses

import pytest

from service.replay.audit import faults_of
from service.replay.limits import Assumptions
from service.replay.simulate import SimulationFault
from service.scheduler.facts import WaitingJob
from service.scheduler.plan import Place, Plan, Stop
from tests.unit.replay.small_traces import Fifo, gang, run, trace

REPORTING = Assumptions(limits="true", report_error=0.0)


def test_a_job_runs_for_its_duration_and_the_next_starts_when_it_ends() -> None:
    record = run(trace((0, 100, 8), (10, 50, 8)))
    assert record.first_started_at == [0, 100]
    assert record.ended_at == [100, 150]
    assert faults_of(record) == []


def test_within_an_instant_ends_come_first_then_arrivals_in_file_order() -> None:
    engine = Fifo()
    run(trace((0, 100, 4), (0, 100, 4), (100, 10, 1), (100, 10, 1)), engine)
    at_100 = [(what, row) for now, what, row, *_ in engine.told if now == 100]
    assert at_100 == [("ended", 0), ("ended", 1), ("arrived", 2), ("arrived", 3)]


def test_ends_of_an_instant_come_in_the_order_of_the_starts() -> None:
    engine = Fifo()
    run(trace((0, 100, 8), (1, 50, 4), (2, 50, 4)), engine)
    assert [row for _, what, row, *_ in engine.told if what == "ended"] == [0, 1, 2]
    engine = Fifo(stops={60: [0]})
    run(trace((0, 100, 4), (0, 160, 4)), engine)  # row 0 starts anew at 60, restores until 120 and ends at 160 as well
    assert [row for _, what, row, *_ in engine.told if what == "ended"] == [1, 0]


def test_the_ratio_of_real_time_to_limit_is_told_at_the_end() -> None:
    engine = Fifo()
    run(trace((0, 100, 8)), engine, assumptions=Assumptions(limits="x5", reporting_share=0.0))
    assert engine.told[-1] == (100, "ended", 0, 0.2)


def test_a_preempted_job_keeps_its_work_and_pays_the_restore() -> None:
    record = run(trace((0, 100, 8)), Fifo(stops={40: [0]}))
    assert record.ended_at == [40 + 60 + 60]
    assert record.num_stops == [1]
    assert faults_of(record) == []


def test_what_was_still_restoring_when_it_was_stopped_has_got_nothing_done() -> None:
    record = run(trace((0, 100, 8)), Fifo(stops={40: [0], 70: [0]}))
    assert record.ended_at == [70 + 60 + 60]
    assert faults_of(record) == []


def test_a_stopped_job_waits_again_with_what_is_known_of_it() -> None:
    engine = Fifo(stops={400: [0]})
    waits: list[WaitingJob] = []
    engine.stopped = lambda job_id, job, now: (waits.append(job), Fifo.stopped(engine, job_id, job, now))  # type: ignore[assignment,func-returns-value]
    run(trace((0, 1000, 8)), engine, assumptions=dataclasses.replace(REPORTING, report_error=0.2))
    (again,) = waits
    reported = next(told for told in engine.told if told[1] == "measured")
    _, _, _, left_seconds, rate = reported
    assert left_seconds == pytest.approx(880 * rate)
    assert (again.served_seconds, again.num_stops, again.wait_began_at) == (400, 1, 400)
    assert again.measured_left == pytest.approx(600 * rate), "as off as its last report was"


def test_a_stopped_job_that_never_reported_has_nothing_measured() -> None:
    engine = Fifo(stops={100: [0]})
    run(trace((0, 1000, 8)), engine, assumptions=REPORTING)
    assert [told[:2] for told in engine.told if told[1] in ("stopped", "measured")] == [
        (100, "stopped"),
        (100 + 60 + 120, "measured"),
    ]


def test_a_report_comes_after_two_minutes_of_useful_run_of_each_start() -> None:
    engine = Fifo(stops={500: [0]})
    run(trace((0, 1000, 4), (0, 120, 4)), engine, assumptions=REPORTING)
    told = [told for told in engine.told if told[1] == "measured"]
    assert told == [(120, "measured", 0, 880, 1.0), (680, "measured", 0, 380, 1.0)], "row 1 ends before it could"


def test_silent_jobs_never_report() -> None:
    engine = Fifo()
    run(trace((0, 1000, 8)), engine, assumptions=dataclasses.replace(REPORTING, reporting_share=0.0))
    assert not [told for told in engine.told if told[1] == "measured"]


def test_with_a_grace_the_job_runs_on_its_work_counts_and_the_gpus_come_free_after_it() -> None:
    engine = Fifo(stops={40: [0]})
    record = run(trace((0, 100, 8), (10, 500, 8)), engine, grace_seconds=30)
    assert (70, "stopped", 0) in engine.told
    assert record.ended_at[0] == 70 + 60 + 30
    assert faults_of(record) == []


def test_a_job_that_ends_within_its_grace_was_not_preempted() -> None:
    record = run(trace((0, 100, 8)), Fifo(stops={90: [0]}), grace_seconds=30)
    assert (record.ended_at, record.num_stops) == ([100], [0])


def test_passes_go_on_within_an_instant_as_long_as_they_free_gpus() -> None:
    """With no grace, what was stopped at 40 starts again at 40 on the GPUs that it left."""
    record = run(trace((0, 100, 8)), Fifo(stops={40: [0]}))
    assert [one.started_at for one in record.runs] == [0, 40]


class Circling(Fifo):
    """Stops the job that it has just started, for ever."""

    def decide(self, now: float) -> Plan:
        plan = super().decide(now)
        stops = [Stop(job_id=job_id, for_job_id=0, why="circle") for job_id in self.running]
        return dataclasses.replace(plan, stops=stops)


class Lazy(Fifo):
    """Starts nothing."""

    def decide(self, now: float) -> Plan:
        return Plan(stops=(), places=(), nominations=())


class Twice(Fifo):
    """Starts the same job at each pass."""

    def decide(self, now: float) -> Plan:
        return Plan(stops=(), places=[Place(job_id=1, gang=gang((1, (0,))))], nominations=())


class Stuck(Fifo):
    """Its timer never moves on."""

    def next_timer(self, now: float) -> float | None:
        return now


@pytest.mark.parametrize(
    ("engine", "said"),
    [
        (Circling(), "still stops jobs"),
        (Lazy(), "2 jobs wait for ever, with 8 of 8 GPUs free: a, b"),
        (Twice(), "starts job 1, which does not wait"),
        (Fifo(stops={5: [1]}), "stops job 2, which does not run"),
        (Stuck(), "the next timer is 0 at 0"),
    ],
)
def test_a_scheduler_that_does_what_it_must_not_is_found_out(engine: Fifo, said: str) -> None:
    with pytest.raises(SimulationFault, match=said):
        run(trace((0, 100, 1), (10, 100, 1)), engine)


def test_the_record_knows_what_stood_idle_while_jobs_waited() -> None:
    """From 10 to 100 a job of 8 waits beside 4 free GPUs; the window ends with the last submission, at 60."""
    record = run(trace((0, 100, 4), (10, 50, 8), (60, 1, 8)))
    assert (record.waiting_seconds, record.idle_gpu_seconds) == (50, 4 * 50)
    assert record.window_gpu_seconds == 4 * 60
