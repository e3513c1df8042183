"""The options of `gang replay`: what each means, and that all faults are told at once."""

from __future__ import annotations

import pytest

from service.replay.arguments import Words, read_terms, surroundings_of
from service.replay.limits import Assumptions
from service.replay.pool_size import PoolShape
from tests.unit.replay.small_traces import trace


def test_without_options_it_is_the_published_setting() -> None:
    terms, faults = read_terms(Words(trace="t.csv", policies=("time-left",)))
    assert not faults
    assert terms.policies == ("time-left",)
    assert terms.assumptions == Assumptions(
        limits="human", preemptible_share=1.0, reporting_share=1.0, report_error=0.2
    )
    assert (terms.grace_seconds, terms.restore_seconds, terms.seeds, terms.preemption) == (0, 60, (1,), "all")
    surroundings, _ = surroundings_of(terms, trace((0, 10, 1)))
    assert (terms.nodes, surroundings.gpus_per_node) == (None, 8)


def test_options_are_read_in_the_ways_that_people_write_them() -> None:
    words = Words(
        trace="t.csv",
        policies=("fifo, time-left", "fifo", "srtf"),
        reports="50",
        preemptible="30%",
        report_error="12.5 %",
        grace="60s",
        restore="10m",
        seeds="20",
        first_seed="11",
        limits="x5",
    )
    terms, faults = read_terms(words)
    assert not faults
    assert terms.policies == ("fifo", "time-left"), "the oracle is in every table"
    assert (terms.assumptions.reporting_share, terms.assumptions.preemptible_share) == (0.5, 0.3)
    assert (terms.assumptions.report_error, terms.assumptions.limits) == (0.125, "x5")
    assert (terms.grace_seconds, terms.restore_seconds) == (60, 600)
    assert (terms.seeds[0], terms.seeds[-1], len(terms.seeds)) == (11, 30, 20)


def test_a_history_is_replayed_as_it_was_recorded_unless_an_option_says_otherwise() -> None:
    terms, _ = read_terms(Words(is_history=True, policies=("fifo",)))
    assert terms.assumptions == Assumptions(limits="recorded", preemptible_share=None, reporting_share=None)
    words = Words(is_history=True, policies=("fifo",), preemptible="30%", reports="recorded", limits="x5")
    terms, faults = read_terms(words)
    assert (terms.assumptions, faults) == (Assumptions(limits="x5", preemptible_share=0.3, reporting_share=None), [])


def test_what_no_trace_file_tells_cannot_be_taken_as_recorded() -> None:
    _, faults = read_terms(Words(trace="t.csv", policies=("fifo",), reports="recorded", preemptible="recorded"))
    assert [fault.option for fault in faults] == ["--preemptible", "--reports"]
    assert faults[0].message == "'recorded' is for --history: a trace file does not tell it; write a share like 30%"


def test_all_faults_are_told_at_once() -> None:
    words = Words(
        policies=("tim-left",),
        nodes="0",
        gpus_per_node="x",
        limits="lazy",
        reports="130%",
        report_error="100%",
        preemptible="some",
        preemption="sometimes",
        grace="long",
        restore="2d",
        seeds="0",
        first_seed="-1",
        processes="0",
    )
    _, faults = read_terms(words)
    assert {fault.option for fault in faults} == {
        "TRACE", "--policy", "--nodes", "--gpus-per-node", "--limits", "--reports", "--report-error", "--preemptible",
        "--preemption", "--grace", "--restore", "--seeds", "--first-seed", "--jobs",
    }  # fmt: skip
    messages = {fault.option: fault.message for fault in faults}
    assert "did you mean time-left?" in messages["--policy"]
    assert "srtf" in messages["--policy"]
    assert messages["--reports"] == "'130%' is no share from 0% to 100%; write it like 30%"


@pytest.mark.parametrize("words", [Words(policies=("fifo",)), Words(policies=("fifo",), trace="t", is_history=True)])
def test_it_takes_a_trace_or_the_history(words: Words) -> None:
    _, faults = read_terms(words)
    assert [fault.option for fault in faults] == ["TRACE"]


def test_a_pool_on_which_a_job_could_never_start_is_refused() -> None:
    terms, _ = read_terms(Words(trace="t", policies=("fifo",), nodes="2"))
    _, faults = surroundings_of(terms, trace((0, 10, 1), (0, 10, 20)))
    (fault,) = faults
    assert fault.message == "job b asks for 20 GPUs, more than 2 x 8: give at least 3"


def test_without_a_number_of_nodes_the_pool_follows_from_the_trace() -> None:
    terms, _ = read_terms(Words(trace="t", policies=("fifo",)))
    surroundings, faults = surroundings_of(terms, trace((0, 10, 1), (0, 10, 20)))
    assert (surroundings.nodes, faults) == (3, [])


def test_the_pool_of_a_history_is_the_servers_unless_an_option_says_otherwise() -> None:
    jobs, pool = trace((0, 10, 1), (0, 10, 4)), PoolShape(((4, 2),))

    def size(**words: str) -> tuple[int, int]:
        terms, faults = read_terms(Words(is_history=True, policies=("fifo",), **words))
        surroundings, unfit = surroundings_of(terms, jobs, pool)
        assert not faults + unfit
        return surroundings.nodes, surroundings.gpus_per_node

    assert size() == (2, 4)
    assert size(nodes="3") == (3, 4)
    assert size(gpus_per_node="8") == (1, 8), "the same GPUs on larger nodes"
    assert size(nodes="5", gpus_per_node="2") == (5, 2)
