"""When ranks hang, and who is behind: the rule, over times and pulses that are given."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from gangline.protocol.pulse import Phase, PulseReading
from worker.watchdog import START_FLOOR_SECONDS, Watchdog, allowed_seconds, describe_hang, find_hang


def a_pulse(moves: int = 1, **changes: Any) -> PulseReading:
    values = {"step": 3, "phase": Phase.TRAINING, "floor_seconds": 10.0, "slowest_step_seconds": 0.5}
    return PulseReading(moves=moves, **{**values, **changes})


def hangs_at(looks: Mapping[float, Mapping[int, PulseReading | None]]) -> list[float]:
    """Times of the looks that find a hang; the watch begins at 0."""
    watchdog = Watchdog(0.0)
    return [now for now, readings in looks.items() if watchdog.look(readings, now)]


def every_second(until: int, *ranks: PulseReading | None) -> dict[float, dict[int, PulseReading | None]]:
    return {float(now): dict(enumerate(ranks)) for now in range(1, until + 1)}


def test_no_move_for_longer_than_the_floor_is_a_hang() -> None:
    assert hangs_at(every_second(13, a_pulse(), a_pulse(2))) == [12.0, 13.0]  # first seen at 1, 10 s allowed


def test_one_rank_that_moves_is_enough() -> None:
    looks = {float(now): {0: a_pulse(1), 1: a_pulse(now)} for now in range(1, 40)}

    assert hangs_at(looks) == []


def test_the_largest_floor_of_the_ranks_counts() -> None:
    assert hangs_at(every_second(60, a_pulse(), a_pulse(phase=Phase.COMPILING, floor_seconds=900.0))) == []


def test_five_of_the_slowest_recent_steps_may_pass() -> None:
    assert allowed_seconds({0: a_pulse(), 1: a_pulse(slowest_step_seconds=30.0)}) == 150.0
    assert allowed_seconds({0: a_pulse(slowest_step_seconds=1.9)}) == 10.0


def test_a_rank_that_still_imports_has_long() -> None:
    assert allowed_seconds({0: a_pulse(), 1: None}) == START_FLOOR_SECONDS
    assert hangs_at(every_second(int(START_FLOOR_SECONDS) + 1, None, None)) == [START_FLOOR_SECONDS + 1]


def test_time_in_which_nobody_looked_does_not_count() -> None:
    asleep = {1.0: {0: a_pulse()}, 2.0: {0: a_pulse()}, 500.0: {0: a_pulse()}, 501.0: {0: a_pulse()}}
    later = {float(now): {0: a_pulse()} for now in range(502, 520)}

    assert hangs_at(asleep) == []
    assert hangs_at(asleep | later)[0] == 509.0  # a second before the sleep, one for the look that came late


def test_the_end_of_a_rank_is_a_move() -> None:
    looks = every_second(8, a_pulse(), a_pulse()) | {float(now): {0: a_pulse()} for now in range(9, 18)}

    assert hangs_at(looks) == []


def test_without_living_ranks_nothing_hangs() -> None:
    assert hangs_at({float(now): {} for now in range(1, 2000)}) == []


BEHIND: dict[str, tuple[dict[int, PulseReading | None], dict[int, str], list[int]]] = {
    "the fewest moves": ({0: a_pulse(9), 1: a_pulse(8), 2: a_pulse(9)}, {}, [1]),
    "several": ({0: a_pulse(8), 1: a_pulse(9), 2: a_pulse(8)}, {}, [0, 2]),
    "a stopped one, whatever its moves": ({0: a_pulse(8), 1: a_pulse(9)}, {0: "S", 1: "T"}, [1]),
    "one in a debugger": ({0: a_pulse(8), 1: a_pulse(9)}, {0: "S", 1: "t"}, [1]),
    "one that never moved": ({0: a_pulse(1), 1: None}, {}, [1]),
    "one that waits in the kernel is only noted": ({0: a_pulse(9), 1: a_pulse(8)}, {0: "D", 1: "S"}, [1]),
}


@pytest.mark.parametrize("name", BEHIND)
def test_the_rank_that_the_others_wait_for_is_named(name: str) -> None:
    readings, states, expected = BEHIND[name]

    assert [one.rank for one in find_hang(readings, states, still_seconds=12.0).behind] == expected


def test_a_hang_is_told_in_a_sentence_with_its_values() -> None:
    readings: dict[int, PulseReading | None] = {4: a_pulse(9), 5: a_pulse(8, step=120, phase=Phase.EVALUATION)}
    one = describe_hang(find_hang(readings, {}, still_seconds=312.4))
    stopped = describe_hang(find_hang(readings, {4: "T"}, still_seconds=312.4))
    alone = describe_hang(find_hang({0: a_pulse(1)}, {}, still_seconds=12.0))

    assert one == (
        "No rank of this node moved on for 312 s in evaluation at step 120; 10 s were allowed. Behind: rank 5."
    )
    assert stopped.endswith("Behind: rank 4 (stopped by a signal).")
    assert "Behind" not in alone


def test_a_peers_hang_is_ours_when_we_stood_still_nearly_as_long() -> None:
    watchdog = Watchdog(0.0)
    for now in range(1, 10):
        watchdog.look({0: a_pulse(1)}, float(now))

    assert watchdog.is_nearly_hung({0: a_pulse(1)}, 9.5)  # 8.5 of 10 s
    assert not watchdog.is_nearly_hung({0: a_pulse(1)}, 8.5)
    assert not watchdog.is_nearly_hung({}, 9.5)
