"""The oracle: shortest remaining time first, packed anew at every event, against a plain version of the same rules."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from service.replay.files import read_trace
from service.replay.metrics import figures_of
from service.replay.oracle import run_oracle
from service.replay.pool_size import default_nodes
from service.replay.run_record import Surroundings
from service.replay.traces import Trace
from tests.unit.replay.small_traces import trace

TRACES = Path(__file__).resolve().parents[2] / "data" / "traces"


def ends(jobs: Trace, nodes: int = 1) -> list[float | None]:
    return run_oracle(jobs, Surroundings(nodes=nodes)).ended_at


def test_a_shorter_job_takes_the_place_of_a_longer_one_which_goes_on_later() -> None:
    assert ends(trace((0, 100, 8), (10, 20, 8))) == [120, 30]


def test_a_job_with_less_left_is_not_stopped() -> None:
    assert ends(trace((0, 100, 8), (90, 20, 8))) == [100, 120]


def test_a_gang_that_does_not_fit_blocks_nobody() -> None:
    assert ends(trace((0, 100, 4), (0, 100, 8), (0, 300, 4))) == [100, 200, 400]


def test_equal_jobs_go_by_submission() -> None:
    assert ends(trace((0, 50, 8), (0, 50, 8))) == [50, 100]


def test_a_job_whose_place_is_taken_goes_on_elsewhere_at_once() -> None:
    """The gang takes the node that the three share; they go to the other one, and nothing waits."""
    jobs = trace((0, 500, 1), (0, 400, 6), (0, 600, 1), (10, 20, 8))
    assert ends(jobs, nodes=2) == [500, 400, 600, 30]


def test_what_is_left_over_of_a_gang_goes_to_another_node() -> None:
    assert ends(trace((0, 100, 4), (0, 100, 12)), nodes=2) == [100, 100]
    assert ends(trace((0, 100, 5), (0, 100, 12)), nodes=2) == [100, 200]


def test_a_job_larger_than_the_pool_is_refused() -> None:
    with pytest.raises(ValueError, match="1 jobs of small are larger than the pool"):
        ends(trace((0, 100, 9)))


@pytest.mark.parametrize("seed", range(20))
def test_it_does_what_a_plain_version_of_its_rules_does(seed: int) -> None:
    draw = random.Random(seed)
    jobs = trace(
        *(
            (draw.randint(0, 400), draw.randint(1, 300), draw.choice((1, 1, 1, 2, 4, 7, 8, 8, 12, 16)))
            for _ in range(60)
        )
    )
    assert ends(jobs, nodes=2) == plain_ends(jobs, nodes=2)


def plain_ends(jobs: Trace, nodes: int, size: int = 8) -> list[float | None]:
    """The same by the words of the rules: everything anew at each event."""
    left = [job.duration for job in jobs.jobs]
    ended: list[float | None] = [None] * len(left)
    held: dict[int, list[tuple[int, int]]] = {}
    now = -1
    while None in ended:
        arrivals = [job.submitted_at - now for job in jobs.jobs if job.submitted_at > now]
        step = min([left[place] for place in held] + arrivals)
        for place in list(held):
            left[place] -= step
            if not left[place]:
                ended[place] = now + step
                del held[place]
        now += step
        present = [place for place, job in enumerate(jobs.jobs) if job.submitted_at <= now and left[place]]
        free, fresh = [size] * nodes, {}
        for place in sorted(present, key=lambda place: (left[place], place)):
            parts = held.get(place, [])
            if not parts or any(free[node] < count for node, count in parts):
                parts = fitting(free, jobs.jobs[place].gpus, size)
            for node, count in parts:
                free[node] -= count
            if parts:
                fresh[place] = parts
        held = fresh
    return ended


def fitting(free: list[int], gpus: int, size: int) -> list[tuple[int, int]]:
    whole, rest = divmod(gpus, size)
    parts = [(node, size) for node, count in enumerate(free) if count == size][:whole]
    if rest:
        others = [(count, node) for node, count in enumerate(free) if count >= rest and (node, size) not in parts]
        parts += [(min(others)[1], rest)] if others else []
    return parts if sum(count for _, count in parts) == gpus else []


@pytest.mark.parametrize(("name", "published"), [("itp06", 11.26), ("itp03", 12.90)])
def test_its_mean_completion_time_is_the_published_one_within_one_per_cent(name: str, published: float) -> None:
    jobs = read_trace(TRACES / f"{name}.csv.gz")
    record = run_oracle(jobs, Surroundings(nodes=default_nodes(jobs, 8)))
    assert figures_of(record).mean_jct_hours == pytest.approx(published, rel=0.01)
