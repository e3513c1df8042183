"""The production scheduler on whole traces: the yardstick prints the published figures, the default policy its own.

Published: JCT in hours of FIFO and FIFO + EASY with true limits, reproduced before by two independent implementations.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from service.replay.files import read_trace
from service.replay.limits import Assumptions
from service.replay.metrics import Figures
from service.replay.pool_size import default_nodes
from service.replay.run_record import Surroundings
from service.replay.study import Study, Task, run_task

TRACES = Path(__file__).resolve().parents[2] / "data" / "traces"
ORACLE_JCT = 11.28
"""Of the oracle on itp06."""


def figures(name: str, policy: str, limits: str = "true") -> Figures:
    """One replay with the production code, seed 1."""
    jobs = read_trace(TRACES / f"{name}.csv.gz")
    study = Study(
        trace=jobs,
        surroundings=Surroundings(nodes=default_nodes(jobs, 8)),
        assumptions=Assumptions(limits=limits),
        policies=(policy,),
        preemption="all",
        seeds=(1,),
    )
    return run_task(study, Task(policy=policy, seed=1)).figures


@pytest.mark.parametrize(
    ("name", "policy", "jct", "wait", "slowdown", "idle", "big"),
    [
        ("itp06", "fifo", 106.11, 99.33, 175.58, 7.1, 61.5),
        ("itp06", "fifo+easy", 48.05, 41.26, 43.40, 2.2, 60.0),
        ("itp03", "fifo+easy", 56.88, 50.73, 44.91, 1.7, 64.0),
    ],
)
def test_the_yardstick_reproduces_the_published_figures(
    name: str, policy: str, jct: float, wait: float, slowdown: float, idle: float, big: float
) -> None:
    found = figures(name, policy)
    assert found.mean_jct_hours == pytest.approx(jct, rel=0.02)
    assert found.mean_wait_hours == pytest.approx(wait, rel=0.02)
    assert found.mean_slowdown == pytest.approx(slowdown, rel=0.05)
    assert found.idle_percent == pytest.approx(idle, abs=0.2)
    assert found.big_after_24h_percent == pytest.approx(big, abs=1.0)
    assert found.max_preemptions == 0


def test_the_default_policy_stays_close_to_the_oracle() -> None:
    """One draw of the users' limits: the means of 20 are what the policy is judged by."""
    found = figures("itp06", "time-left", limits="human")
    assert found.mean_jct_hours / ORACLE_JCT <= 1.03
    assert found.max_preemptions <= 15
