"""Laws of the scheduler through time: small pools live under it until every job has ended, and are checked all along.

Not for: one pass alone (`test_plan`), nor how good the policy is (`gang replay`).
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from service.scheduler.facts import NodeView, Team, User
from service.scheduler.plan import Plan, PolicyOptions
from service.scheduler.world import World
from tests.property.laws import WAYS, Way, devices
from tests.support.pool_in_time import Arrival, PoolInTime
from tests.unit.service.worlds import DAY, GIB, HOUR, MINUTE, job, node, team, user

SEEDS = st.integers(0, 2**32)
FEW = settings(max_examples=4, deadline=None, phases=[Phase.explicit, Phase.generate])
MANY = settings(FEW, max_examples=100)
MAX_DAYS = 40
ways = pytest.mark.parametrize("way", WAYS, ids=[" ".join(way) for way in WAYS])
Check = Callable[[PoolInTime, Plan], None]


# --- Lives -----------------------------------------------------------------------------------------------------------


def a_life(seed: int, way: Way, **more: object) -> PoolInTime:
    """Thirty jobs of all sizes over five hours on twelve GPUs; every other life with quotas and caps, or a grace."""
    drawn = random.Random(seed)
    nodes = tuple(node(number, 4, cpus=64.0, shared="nfs") for number in (1, 2, 3))
    has_quotas = drawn.random() < 0.5
    arrivals = []
    for number in range(1, 31):
        count, share = drawn.choice([(1, 1), (1, 1), (1, 2), (1, 4), (1, 4), (2, 4), (3, 4), (2, 2)])
        seconds = drawn.choice([60.0, 300.0, 1_500.0, 2 * HOUR])
        one = job(
            number,
            count,
            share,
            submitted_at=float(drawn.randint(0, 5 * 60) * 60),
            limit=drawn.choice([seconds, seconds * 2, seconds * 8, None]),
            preemptible=has_quotas or drawn.random() < 0.7,
            reports=drawn.random() < 0.5,
            team=drawn.randint(1, 2),
            user=drawn.randint(1, 2),
            exclusive=drawn.random() < 0.05,
        )
        arrivals.append(Arrival(job=one, seconds=seconds))
    teams: tuple[Team, ...] = (team(1, quota_gpus=8), team(2, quota_gpus=4, cap_gpus=12)) if has_quotas else ()
    users: tuple[User, ...] = (user(1, 12),) if has_quotas else ()
    return PoolInTime(
        nodes=nodes,
        arrivals=tuple(arrivals),
        policy=way[0],
        options=PolicyOptions(preemption=way[1]),
        teams=teams,
        users=users,
        grace_seconds=drawn.choice([0.0, 60.0]),
        loses_work=drawn.random() < 0.2,
        **more,  # type: ignore[arg-type]
    )


def nothing_is_held_twice(pool: PoolInTime, plan: Plan) -> None:
    """By the pool's own books: what starts is free, and kept for nobody else."""
    held = {device: job_id for job_id, holding in pool.held.items() for device in devices(holding.facts.gang)}
    kept = {device: one.job_id for one in pool.promised.values() for device in devices(one.gang)}
    assert sum(len(devices(one.gang)) for one in pool.promised.values()) == len(kept), "two promises of one GPU"
    for place in plan.places:
        for device in devices(place.gang):
            assert device not in held, f"job {place.job_id} starts on {device}, which job {held[device]} holds"
            assert kept.get(device, place.job_id) == place.job_id, f"{device} was kept for job {kept[device]}"
            held[device] = place.job_id


def a_promise_is_kept(pool: PoolInTime, plan: Plan) -> None:
    """Whoever was promised GPUs starts on exactly those."""
    for place in plan.places:
        promised = pool.promised.get(place.job_id)
        assert promised is None or promised.gang == place.gang


def everybody_is_told_why(pool: PoolInTime, plan: Plan) -> None:
    """Who waits and does not start has a reason; one who is still leaving to be moved does not wait yet."""
    started = {place.job_id for place in plan.places}
    assert Counter(wait.job_id for wait in plan.waits) == Counter(pool.waiting.keys() - started)


def bounds_hold(pool: PoolInTime, plan: Plan) -> None:
    """No cap is exceeded when something is given, counting what is promised and not what is being freed."""
    used = {"team": Counter[int](), "user": Counter[int]()}
    gangs = [(holding.facts.job, holding.facts.gang) for holding in pool.held.values() if not holding.facts.is_stopping]
    jobs = pool.waiting | {job_id: holding.facts.job for job_id, holding in pool.held.items()}
    gangs += [(jobs[one.job_id], one.gang) for one in pool.promised.values()]
    gangs += [(jobs[one.job_id], one.gang) for one in plan.places if one.job_id not in pool.promised]
    for one, placed in gangs:
        used["team"][one.team_id] += placed.layout.num_gpus
        used["user"][one.user_id] += placed.layout.num_gpus
    for bounded in pool.teams:
        assert bounded.cap_gpus is None or used["team"][bounded.id] <= bounded.cap_gpus
    for capped in pool.users:
        assert capped.cap_gpus is None or used["user"][capped.id] <= capped.cap_gpus


CHECKS: tuple[Check, ...] = (nothing_is_held_twice, a_promise_is_kept, everybody_is_told_why, bounds_hold)


def checked(pool: PoolInTime, plan: Plan) -> None:
    """All of them."""
    for check in CHECKS:
        check(pool, plan)


def facts_of(world: World) -> dict[str, object]:
    """What has to be equal. Turns rest on the ratios at the start of each wait, which nobody writes down."""
    facts = dict(world.facts())
    facts["waiting"] = {job_id: waiting for job_id, (waiting, _) in facts["waiting"].items()}
    return facts


def same_as_rebuilt(pool: PoolInTime) -> None:
    """The world that was kept by changes holds what one built from the books holds."""
    kept, rebuilt = facts_of(pool.world), facts_of(pool.rebuilt())
    assert kept.keys() == rebuilt.keys()
    for name in kept:
        assert kept[name] == rebuilt[name], name


# --- Laws ------------------------------------------------------------------------------------------------------------


def lives_well(seed: int, way: Way) -> None:
    """All checks after every pass, the world compared before each, and everybody gets to the end."""
    pool = a_life(seed, way, on_pass=checked, on_change=same_as_rebuilt).run(until=MAX_DAYS * DAY)
    assert len(pool.ended_at) == len(pool.arrivals), f"after {MAX_DAYS} days {sorted(pool.waiting)} still wait"
    assert not pool.world.facts()["team_gpus"] and not pool.world.facts()["nominations"]
    if way[1] == "none" or way[0] != "time-left":
        assert pool.num_stops == 0


@ways
def test_a_pool_keeps_the_laws_until_every_job_has_ended(way: Way) -> None:
    @FEW
    @given(SEEDS)
    def check(seed: int) -> None:
        lives_well(seed, way)

    check()


@pytest.mark.full
@ways
def test_a_hundred_pools_keep_the_laws(way: Way) -> None:
    @MANY
    @given(SEEDS)
    def check(seed: int) -> None:
        lives_well(seed, way)

    check()


@ways
def test_the_same_life_is_lived_again(way: Way) -> None:
    first, second = a_life(7, way).run(), a_life(7, way).run()
    assert (first.started_at, first.ended_at, first.num_stops) == (second.started_at, second.ended_at, second.num_stops)


# --- Bounds ----------------------------------------------------------------------------------------------------------


WAITED = 23 * HOUR


def flood(way: Way, *, limit: float | None, preemptible: bool) -> PoolInTime:
    """A gang of the whole pool that waited 23 hours, and more small jobs of ten minutes than the pool takes."""
    big = job(1, 2, 4, submitted_at=10.0, waits=10.0 - WAITED, limit=2 * HOUR, preemptible=True)
    small = [
        job(number, submitted_at=(number - 2) * 70.0, limit=limit, preemptible=preemptible)
        for number in range(2, int(2 * HOUR / 70))
    ]
    nodes = tuple(node(number, 4, cpus=64.0) for number in (1, 2))
    arrivals = (Arrival(job=big, seconds=HOUR), *(Arrival(job=one, seconds=10 * MINUTE) for one in small))
    return PoolInTime(nodes=nodes, arrivals=arrivals, policy=way[0], options=PolicyOptions(preemption=way[1]))


def waited(pool: PoolInTime) -> float:
    """How long the gang waited in all, seconds."""
    return pool.run(until=2 * HOUR).started_at.get(1, float("inf")) - 10.0 + WAITED


@ways
@pytest.mark.parametrize("preemptible", [True, False], ids=["resumes", "stays"])
def test_a_gang_of_the_whole_pool_starts_within_its_bound_under_a_flood_of_small_jobs(
    way: Way, preemptible: bool
) -> None:
    """Bound: its promotion after max(24 h, 4 x its limit), and the longest hard limit of those that hold GPUs then.

    First come, first served needs no promotion: the gang is first at once.
    """
    promotion = DAY if way[0] == "time-left" else WAITED
    assert waited(flood(way, limit=20 * MINUTE, preemptible=preemptible)) <= promotion + 20 * MINUTE


@pytest.mark.parametrize("preemption", ["all", "reclaim_only", "none"])
def test_so_it_does_when_nobody_says_how_long_the_small_ones_run(preemption: str) -> None:
    assert waited(flood(("time-left", preemption), limit=None, preemptible=True)) <= DAY + 20 * MINUTE


def roomy(*numbers: int, **more: Any) -> tuple[NodeView, ...]:
    """Nodes with four GPUs, and more CPUs than anybody asks for."""
    return tuple(node(number, 4, cpus=64.0, **more) for number in numbers)


DEMANDING: dict[str, tuple[dict[str, Any], dict[str, Any], tuple[NodeView, ...], int]] = {
    "most of a node": ({"gpus": 3}, {}, roomy(1), 4),
    "most of two nodes": ({"nodes": 2, "gpus": 3}, {}, roomy(1, 2), 8),
    "one GPU, on a node for itself": ({"exclusive": True}, {}, roomy(1), 4),
    "no GPU, on a node for itself": ({"gpus": 0, "exclusive": True}, {}, roomy(1), 4),
    "most CPUs of a node": ({"cpus": 60.0}, {"cpus": 8.0}, (node(1, 12, cpus=64.0),), 8),
    "CPUs alone": ({"gpus": 0, "cpus": 60.0}, {"cpus": 8.0}, (node(1, 12, cpus=64.0),), 8),
    "most memory of a node": ({"memory": 50 * GIB}, {"memory": 10 * GIB}, (node(1, 9, cpus=64.0),), 6),
    "two nodes that see one folder": (
        {"nodes": 2, "gpus": 4, "is_split": True},
        {},
        (*roomy(1, shared="other"), *roomy(2, 3, shared="nfs")),
        12,
    ),
}
"""What is asked for, what each small job asks for, the nodes, and how many small jobs run there at once."""


def flood_of_all(way: Way, asked: str, limit: float | None) -> float:
    """How long a job that asks for that waited, after 23 hours, when small jobs of ten minutes had filled the pool."""
    asks, small_asks, nodes, num_at_once = DEMANDING[asked]
    came, pause = 20 * MINUTE, 0.95 * 10 * MINUTE / num_at_once
    big = job(1, **asks, submitted_at=came, waits=came - WAITED, limit=2 * HOUR, preemptible=True)
    small = (
        Arrival(job=job(n, **small_asks, submitted_at=n * pause, limit=limit), seconds=10 * MINUTE)
        for n in range(2, int(2 * HOUR / pause))
    )
    pool = PoolInTime(
        nodes=nodes,
        arrivals=(Arrival(job=big, seconds=HOUR), *small),
        policy=way[0],
        options=PolicyOptions(preemption=way[1]),
    )
    return pool.run(until=2 * HOUR).started_at.get(1, float("inf")) - came + WAITED


@pytest.mark.parametrize("limit", [20 * MINUTE, None], ids=["limits", "no limits"])
@pytest.mark.parametrize("way", [WAYS[0], ("fifo+easy", "all")], ids=["time-left", "fifo+easy"])
@pytest.mark.parametrize("asked", DEMANDING)
def test_whatever_a_job_asks_for_no_flood_of_small_jobs_keeps_it_waiting(
    way: Way, limit: float | None, asked: str
) -> None:
    """Its promotion, and the time that those run on which hold what it needs: GPUs are not all that is reserved."""
    promotion = DAY if way[0] == "time-left" else WAITED
    assert flood_of_all(way, asked, limit) <= promotion + 20 * MINUTE


@pytest.mark.parametrize("limit", [None, 2.0, 20.0])
@pytest.mark.parametrize("policy", ["time-left", "fifo", "fifo+easy"])
def test_o19_an_older_large_job_is_not_overtaken_for_ever(policy: str, limit: float | None) -> None:
    """One GPU is busy when a job of 4 of higher priority comes; then a 1-GPU job of 2 s comes every second.

    Bound: its promotion (here a minute away) and the hard limits of those that run then. EASY needs such limits.
    """
    if policy == "fifo+easy" and limit is None:
        limit = 5.0
    waits = MINUTE - DAY
    busy = Arrival(job=job(1, submitted_at=0.0, limit=30.0, priority=-1), seconds=25.0)
    large = Arrival(job=job(2, 1, 4, submitted_at=1.0, waits=waits, limit=HOUR, priority=50), seconds=60.0)
    small = [Arrival(job=job(n, submitted_at=1.0 + n, limit=limit, priority=-1), seconds=2.0) for n in range(3, 200)]
    pool = PoolInTime(nodes=(node(1, 4),), arrivals=(busy, large, *small), policy=policy, on_pass=checked)
    pool.run(until=200.0)
    assert pool.started_at.get(2, float("inf")) <= MINUTE + 1 + (limit or 2.0)
    assert min(pool.started_at[number] for number in range(3, 20) if number in pool.started_at) < MINUTE or (
        policy == "fifo"
    ), "others may pass it as long as they do not delay it"


def test_a_job_that_is_stopped_again_and_again_is_left_alone_in_the_end() -> None:
    """A long job of the whole pool, and a short one every quarter of an hour: 15 stops, and it ends."""
    long = Arrival(job=job(1, 1, 4, submitted_at=0.0, limit=4 * DAY, preemptible=True), seconds=2 * DAY)
    short = [
        Arrival(job=job(n, 1, 4, submitted_at=n * 900.0, limit=MINUTE, preemptible=True), seconds=MINUTE)
        for n in range(2, 800)
    ]
    pool = PoolInTime(nodes=(node(1, 4),), arrivals=(long, *short), on_pass=checked).run(until=30 * DAY)
    assert pool.num_runs[1] <= 16
    assert pool.ended_at[1] < 10 * DAY


# --- Promises --------------------------------------------------------------------------------------------------------


def nominated(seed: int) -> PoolInTime:
    """A long job that leaves in a minute's grace for a short one of its size, while others of that size arrive."""
    victim = Arrival(job=job(1, 1, 4, submitted_at=0.0, limit=2 * DAY, preemptible=True), seconds=DAY)
    short = Arrival(job=job(2, 1, 4, submitted_at=HOUR, limit=10 * MINUTE), seconds=5 * MINUTE)
    drawn = random.Random(seed)
    others = [
        Arrival(job=job(n, 1, drawn.randint(1, 4), submitted_at=HOUR + 60.0 + n, limit=MINUTE), seconds=MINUTE)
        for n in range(3, 30)
    ]
    return PoolInTime(nodes=(node(1, 4),), arrivals=(victim, short, *others), grace_seconds=60.0, on_pass=checked)


def test_the_job_for_which_others_were_stopped_gets_their_gpus_whoever_comes_meanwhile() -> None:
    pool = nominated(1).run(until=HOUR + 10 * MINUTE)
    assert pool.num_runs[1] == 1, "it was stopped once"
    assert pool.started_at[2] == HOUR + 2 * MINUTE, "patience of a minute, and the grace"


def test_a_promise_is_dropped_when_its_node_is_blocked_and_its_job_waits_like_others() -> None:
    pool = nominated(1).run(until=HOUR + MINUTE)
    assert 2 in pool.promised
    view: NodeView = pool.nodes[0]
    pool.world.set_node(node(1, 4, blocked="cordoned (disk)"))
    assert not pool.world.facts()["nominations"]
    pool.world.set_node(view)
    assert 2 in pool.world.facts()["waiting"]
