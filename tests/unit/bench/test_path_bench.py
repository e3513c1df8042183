"""The line of JSON of `make bench NAME=path`: every key the issue asks for, each computed from what was measured."""

from __future__ import annotations

import json
import os
import time

import pytest

from service.settings import Settings
from tests.bench import path
from tests.bench.support.cpu import cpu_seconds
from tests.bench.support.figures import Row, json_line, percentile, table
from tests.support.stack import Stack

KEYS = {
    "submissions_per_s_1",
    "submissions_per_s_8",
    "submissions_per_s_32",
    "submit_ratio_to_bare_insert",
    "start_p50_ms",
    "start_p99_ms",
    "true_jobs_per_s",
    "list_10k_p50_ms",
    "list_10k_p99_ms",
    "log_p50_ms",
    "log_p99_ms",
    "idle_cpu_s_per_min",
}


class FakeMeasurements:
    """Stands in for every measurement; each gives `scale` times a number of its own."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, scale: float) -> None:
        monkeypatch.setattr(path, "Stack", FakeStack)
        monkeypatch.setattr(path, "idle_cpu_seconds_per_minute", lambda *_: 0.5 * scale)
        monkeypatch.setattr(path.latencies, "start_seconds", lambda *_: self.spread(0.1 * scale))
        monkeypatch.setattr(path.latencies, "log_seconds", lambda *_: self.spread(0.02 * scale))
        monkeypatch.setattr(path.latencies, "true_jobs_per_second", lambda *_: 33.0 * scale)
        monkeypatch.setattr(path.latencies, "list_seconds", lambda *_: self.spread(0.003 * scale))
        monkeypatch.setattr(path.latencies, "fill_jobs", lambda *_: None)
        monkeypatch.setattr(path.submissions, "submissions_per_second", lambda _stack, _spec, n, _s: 100.0 * n * scale)
        monkeypatch.setattr(path.submissions, "bare_inserts_per_second", lambda *_: 64_000.0)
        monkeypatch.setattr(path.submissions, "survivors_of_kill", lambda *_: 1)

    @staticmethod
    def spread(seconds: float) -> list[float]:
        return [seconds * (1 + number / 100) for number in range(100)]


class FakeStack(Stack):
    """A pool of which nothing is started."""

    def __enter__(self) -> Stack:
        self.processes["server"] = FakeProcess()  # type: ignore[assignment]  # only ever signalled
        return self

    def __exit__(self, *_: object) -> None:
        self.processes.clear()
        self._end_everything()

    def submit(self, spec: object = None, /, **members: object) -> int:
        return 1

    def wait_state(self, job_id: int, *states: str, timeout: float = 60.0) -> dict[str, object]:
        return {"id": job_id}


class FakeProcess:
    """What is left of the server: a signal goes nowhere."""

    def send_signal(self, number: int) -> None:
        return


def measured(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scale: float) -> dict[str, float]:
    """The last line that the benchmark prints, when everything took `scale` times as long (or was as many)."""
    FakeMeasurements(monkeypatch, scale)
    assert path.main([]) == 0
    figures: dict[str, float] = json.loads(capsys.readouterr().out.splitlines()[-1])
    return figures


def test_the_last_line_has_exactly_the_keys_of_the_issue(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert measured(monkeypatch, capsys, 1.0).keys() == KEYS
    assert {row.key for row in path.ROWS} == KEYS


def test_every_figure_follows_its_measurement(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    once, doubled = measured(monkeypatch, capsys, 1.0), measured(monkeypatch, capsys, 2.0)

    assert {key: doubled[key] / once[key] for key in KEYS} == pytest.approx(dict.fromkeys(KEYS, 2.0))
    assert once["submit_ratio_to_bare_insert"] == pytest.approx(3_200 / 64_000)
    assert (once["start_p50_ms"], once["start_p99_ms"]) == pytest.approx((149.0, 198.0))


def test_a_figure_that_was_not_measured_is_an_error_not_a_guess() -> None:
    rows = (Row("a", "a", "ms"), Row("b", "b", "ms"))

    with pytest.raises(KeyError):
        json_line(rows, {"a": 1.0})
    with pytest.raises(ValueError):
        json_line(rows, {"a": 1.0, "b": float("nan")})


def test_percentiles_are_values_that_were_measured() -> None:
    values = [float(number) for number in range(1, 201)]

    assert percentile(values, 50) == 100.0
    assert percentile(values, 99) == 198.0
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError):
        percentile([], 50)


def test_the_table_says_where_a_peer_or_a_goal_is_missed() -> None:
    rows = (
        Row("fast", "fast", "/s", 10, "peer", 20, is_more_better=True),
        Row("slow", "slow", "ms", 10, "peer", 5),
        Row("behind", "behind", "ms", 10, "peer", 5),
        Row("easy", "easy", "ms", 0.2, "peer", 100),
    )

    told = table(rows, {"fast": 21.0, "slow": 8.0, "behind": 12.0, "easy": 50.0}).splitlines()

    assert "goal met, beats peer" in told[1]
    assert "MISSES goal: 1.60 × it, beats peer" in told[2]
    assert "MISSES goal: 2.40 × it, MISSES peer" in told[3]
    assert "goal met, MISSES peer" in told[4]


def test_it_measures_with_the_deadlines_of_production() -> None:
    assert path.PRODUCTION["HEARTBEAT_SECONDS"] == str(Settings().heartbeat_seconds)
    assert path.PRODUCTION["LOST_SECONDS"] == str(Settings().lost_seconds)
    Settings.from_environment({f"GANGLINE_SERVER_{name}": value for name, value in path.PRODUCTION.items()})


def test_cpu_seconds_are_those_of_the_process() -> None:
    first = time.process_time()
    before = cpu_seconds(os.getpid())
    began = time.process_time()
    while time.process_time() - began < 0.1:
        pass
    ended = time.process_time()
    used = cpu_seconds(os.getpid()) - before
    last = time.process_time()

    # Asking takes time of the processor too, and the kernel counts in ticks.
    assert ended - began - 0.05 <= used <= last - first + 0.05
