"""What samples of use add up to: seconds of work, idle since when, and which attempts hold GPUs without using them."""

from __future__ import annotations

from typing import Any

import pytest

from service.domain.gpu_use import GPUSample, HeldGPU, LastSample, busy_seconds, idle_holdings, idle_since

LONGEST = 6.0


def sample(utilisation: float) -> GPUSample:
    return GPUSample(index=0, utilisation=utilisation, memory_bytes=0)


def worked(utilisation: float, last_at: float | None, *, held_since: float = 0.0, now: float = 100.0) -> float:
    last = None if last_at is None else LastSample(at=last_at, idle_since=None)
    return busy_seconds(sample(utilisation), last, held_since=held_since, now=now, longest_seconds=LONGEST)


@pytest.mark.parametrize(
    ("sentence", "expected", "given"),
    [
        ("a sample counts for the time since the one before", 1.0, {"utilisation": 0.5, "last_at": 98.0}),
        ("the first sample counts for nothing", 0.0, {"utilisation": 1.0, "last_at": None}),
        ("after a gap it counts for three intervals", 6.0, {"utilisation": 1.0, "last_at": 10.0}),
        (
            "it counts for nothing before the GPU was held",
            1.0,
            {"utilisation": 1.0, "last_at": 98.0, "held_since": 99.0},
        ),
        ("a clock that went back takes nothing away", 0.0, {"utilisation": 1.0, "last_at": 105.0}),
    ],
)
def test_seconds_of_work(sentence: str, expected: float, given: dict[str, Any]) -> None:
    assert worked(**given) == pytest.approx(expected), sentence


@pytest.mark.parametrize(
    ("sentence", "expected", "utilisation", "last"),
    [
        ("work ends idleness", None, 0.05, LastSample(at=98.0, idle_since=50.0)),
        ("idleness goes on", 50.0, 0.049, LastSample(at=98.0, idle_since=50.0)),
        ("it begins with the first idle sample", 100.0, 0.0, LastSample(at=98.0, idle_since=None)),
        ("nobody knows what was before the first sample", 100.0, 0.0, None),
        ("nor in a gap", 100.0, 0.0, LastSample(at=93.9, idle_since=50.0)),
    ],
)
def test_idle_since_when(sentence: str, expected: float | None, utilisation: float, last: LastSample | None) -> None:
    assert idle_since(sample(utilisation), last, now=100.0, longest_seconds=LONGEST) == expected, sentence


def held(
    attempt_id: int = 1, *, since: float | None = 100.0, held_since: float = 0.0, at: float | None = 2_000.0
) -> HeldGPU:
    return HeldGPU(attempt_id=attempt_id, held_since=held_since, sampled_at=at, idle_since=since)


def test_an_attempt_is_idle_from_the_moment_its_last_gpu_was_up_to_the_last_look_at_all() -> None:
    (found,) = idle_holdings([held(since=100.0), held(since=150.0, at=1_990.0)], least_seconds=1_800)
    assert (found.num_gpus, found.since, found.idle_seconds) == (2, 150.0, 1_840.0)
    assert found.wasted_gpu_seconds == 3_680.0


@pytest.mark.parametrize(
    ("sentence", "gpu"),
    [
        ("one that works", held(since=None)),
        ("one of which nothing is known", held(since=None, at=None)),
        ("one that has not been idle for long", held(since=300.0)),
        ("one that the attempt has not held for long", held(held_since=300.0)),
    ],
)
def test_one_gpu_clears_the_whole_attempt(sentence: str, gpu: HeldGPU) -> None:
    assert idle_holdings([held(), gpu], least_seconds=1_800) == (), sentence


def test_those_that_waste_most_come_first() -> None:
    gpus = [held(1), held(2), held(2), held(3, since=0.0)]
    assert [found.attempt_id for found in idle_holdings(gpus, least_seconds=1_800)] == [2, 3, 1]
