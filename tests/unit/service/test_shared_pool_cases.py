"""Reports of other schedulers that starved jobs or blocked them, as worlds that live second by second."""

from __future__ import annotations

import pytest

from service.scheduler.plan import decide
from service.scheduler.policies import POLICIES
from service.scheduler.world import World
from tests.unit.service.worlds import job, node


@pytest.mark.parametrize("policy", ["fifo+easy", "fifo"])
def test_o19_small_jobs_that_keep_coming_do_not_starve_a_large_one(policy: str) -> None:
    """One of four GPUs is busy when the large job comes; then a job of one GPU and two seconds comes each second."""
    world = World([node(1, 4)])
    world.add_waiting(job(1, limit=2.0))
    ends = {place.job_id: 2.0 for place in decide(world, 0.0, policy).places}
    world.add_waiting(job(2, gpus=4, limit=60.0, priority=10))
    for second in range(1, 10):
        now = float(second)
        for job_id in [job_id for job_id, end in ends.items() if end <= now]:
            world.ended(job_id)
            del ends[job_id]
        world.add_waiting(job(100 + second, limit=2.0, priority=-10))
        for place in decide(world, now, policy).places:
            if place.job_id == 2:
                assert now <= 4.0
                return
            ends[place.job_id] = now + 2.0
    pytest.fail("the large job never started")


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("gpus", [5, 50])
def test_o20_a_job_that_fits_no_node_holds_nobody_up_and_says_so(policy: str, gpus: int) -> None:
    world = World([node(1, 4), node(2, 1)])
    world.add_waiting(job(1, gpus=gpus))
    world.add_waiting(job(2, gpus=1))
    decided = decide(world, 10.0, policy, explain=True)
    assert [place.job_id for place in decided.places] == [2]
    assert [(wait.job_id, str(wait.reason.code)) for wait in decided.waits] == [(1, "never_fits")]
