"""The options of `gang replay`: what each means, and that all faults are told at once."""

from __future__ import annotations

import pytest

from service.replay.arguments import Words, read_terms, surroundings_of
from service.replay.limits import Assumptions
from tests.unit.replay.small_traces import trace


def test_without_options_it_is_the_published_setting() -> None:
    terms, faults = read_terms(Words(trace="t.csv", policies=("time-left",)))
    assert not faults
    assert terms.policies == ("time-left",)
    assert terms.assumptions == Assumptions(
        limits="human", preemptible_share=1.0, reporting_share=1.0, report_error=0.2
    )
    assert (terms.grace_seconds, terms.restore_seconds, terms.seeds, terms.preemption) == (0, 60, (1,), "all")
    assert (terms.nodes, terms.gpus_per_node) == (None, 8)


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


def test_a_history_has_limits_of_its_own() -> None:
    terms, _ = read_terms(Words(is_history=True, policies=("fifo",)))
    assert terms.assumptions.limits == "recorded"


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
