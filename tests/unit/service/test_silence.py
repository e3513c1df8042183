"""Silence is counted only while somebody watches, and a silence of many is the network's, not the nodes'."""

from __future__ import annotations

import pytest

from service.domain.silence import SilenceWatch, Verdict

ALIVE, UNREACHABLE, LOST = Verdict.ALIVE, Verdict.UNREACHABLE, Verdict.LOST


class Watched:
    """A pool under watch: node `n` beats while it is not in `silent`; time passes by `pass_time`."""

    def __init__(self, num_nodes: int) -> None:
        self.watch = SilenceWatch(
            unreachable_seconds=15, lost_seconds=120, mass_silence_seconds=600, largest_gap_seconds=3
        )
        self.now = 0.0
        self.heartbeats = dict.fromkeys(range(num_nodes), 0.0)
        self.silent: set[int] = set()
        self.verdicts: dict[int, Verdict] = {}
        self.pass_time(2)

    def pass_time(self, seconds: float, step: float = 1.0) -> dict[int, Verdict]:
        """Sweep every `step` seconds for `seconds`."""
        for _ in range(round(seconds / step)):
            self.now += step
            for node in self.heartbeats.keys() - self.silent:
                self.heartbeats[node] = self.now
            self.verdicts = self.watch.observe(self.heartbeats, self.now)
        return self.verdicts


def test_a_silent_node_is_unreachable_first_and_lost_much_later() -> None:
    pool = Watched(2)
    pool.silent = {0}

    assert pool.pass_time(14)[0] is ALIVE
    assert pool.pass_time(1)[0] is UNREACHABLE
    assert pool.pass_time(104)[0] is UNREACHABLE
    assert pool.pass_time(1) == {0: LOST, 1: ALIVE}


def test_a_node_that_answers_again_is_alive_at_once_and_starts_from_zero() -> None:
    pool = Watched(1)
    pool.silent = {0}
    pool.pass_time(119)
    pool.silent = set()

    assert pool.pass_time(1)[0] is ALIVE
    pool.silent = {0}
    assert pool.pass_time(14)[0] is ALIVE


def test_the_downtime_of_the_service_is_held_against_nobody() -> None:
    pool = Watched(2)
    pool.silent = {0, 1}
    pool.pass_time(10)

    pool.now += 3600  # nobody swept, and no heartbeat could arrive

    assert pool.pass_time(1) == {0: ALIVE, 1: ALIVE}  # at most the largest gap is counted: 10 + 3 s


def test_downtime_again_and_again_adds_up_to_the_gaps_only() -> None:
    pool = Watched(1)
    pool.silent = {0}
    for _ in range(4):
        pool.now += 600
        pool.pass_time(1)
    assert pool.verdicts[0] is ALIVE  # 4 × 3 s


def test_time_without_the_database_is_not_counted() -> None:
    pool = Watched(1)
    pool.silent = {0}
    pool.pass_time(14)
    pool.watch.forget_time()
    pool.now += 100

    assert pool.pass_time(1)[0] is ALIVE
    assert pool.pass_time(1)[0] is UNREACHABLE


def test_a_new_sweeper_starts_to_count_from_nothing() -> None:
    pool = Watched(1)
    pool.silent = {0}
    pool.pass_time(200)
    assert pool.verdicts[0] is LOST

    after_restart = SilenceWatch(
        unreachable_seconds=15, lost_seconds=120, mass_silence_seconds=600, largest_gap_seconds=3
    )

    assert after_restart.observe(pool.heartbeats, pool.now) == {0: ALIVE}


def test_o57_a_clock_that_jumps_backwards_counts_nothing() -> None:
    pool = Watched(1)
    pool.silent = {0}
    pool.pass_time(14)
    pool.now -= 3600
    assert pool.pass_time(1)[0] is ALIVE


@pytest.mark.parametrize(
    ("num_nodes", "num_silent", "is_mass"),
    [(3, 2, False), (3, 3, True), (2, 2, False), (9, 3, False), (8, 3, True),
     (12, 4, False), (12, 5, True), (100, 33, False), (100, 34, True)],
)  # fmt: skip
def test_at_least_three_nodes_and_over_a_third_of_all_are_a_mass_silence(
    num_nodes: int, num_silent: int, is_mass: bool
) -> None:
    pool = Watched(num_nodes)
    pool.silent = set(range(num_silent))
    pool.pass_time(16)
    assert pool.watch.is_mass_silence() is is_mass


def test_a_mass_silence_waits_ten_minutes_before_it_calls_anybody_lost() -> None:
    pool = Watched(6)
    pool.silent = {0, 1, 2, 3}

    assert set(pool.pass_time(599).values()) == {UNREACHABLE, ALIVE}
    assert [pool.pass_time(1)[node] for node in range(4)] == [LOST] * 4


def test_nodes_that_fall_silent_over_many_minutes_are_no_mass_silence() -> None:
    pool = Watched(6)
    for node in range(4):
        pool.silent.add(node)
        pool.pass_time(61)

    assert not pool.watch.is_mass_silence()
    assert pool.verdicts[0] is LOST


def test_a_node_removed_from_the_pool_is_forgotten() -> None:
    pool = Watched(2)
    pool.silent = {0}
    pool.pass_time(130)
    del pool.heartbeats[0]
    assert pool.pass_time(1) == {1: ALIVE}
