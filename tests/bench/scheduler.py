"""Speed of the scheduler's decisions, in one process and without a database: `make bench NAME=scheduler`.

A pool in steady state, all of it held and a long queue: in each round one job ends, one arrives, and a pass is made.
Beside it in the same run the naive loop (every job against every node), as a yardstick of this machine. The growth test
is the point: what a pass costs with ten times the queue, the nodes or the running jobs.
"""

from __future__ import annotations

import json
import random
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass

from service.domain.gang_layout import GangLayout, fixed_layout
from service.operations.explain_job import explain_in
from service.scheduler.calibration import Calibration
from service.scheduler.facts import EndedRatio, GPUView, NodeView, Team, WaitingJob
from service.scheduler.forecast import forecast
from service.scheduler.plan import PolicyOptions, decide, plan
from service.scheduler.world import World

SIZES = (1, 1, 1, 1, 2, 4, 8, 8, 16, 32)
GPUS_PER_NODE = 8
ROUNDS = 400
HOUR = 3600.0
OPTIONS = PolicyOptions()
NUM_USERS, NUM_TEAMS = 50, 20


def layouts_of(num_gpus: int) -> tuple[GangLayout, ...]:
    """A gang on whole nodes, or on a part of one."""
    if num_gpus <= GPUS_PER_NODE:
        return fixed_layout(1, num_gpus, num_gpus, float(num_gpus))
    return fixed_layout(num_gpus // GPUS_PER_NODE, GPUS_PER_NODE, GPUS_PER_NODE, float(GPUS_PER_NODE))


def a_job(number: int, now: float, chance: random.Random, size: int | None = None) -> WaitingJob:
    """A job of a usual mix of sizes and limits."""
    return WaitingJob(
        id=number,
        user_id=number % NUM_USERS,
        team_id=number % NUM_TEAMS,
        priority=0,
        submitted_at=now,
        layouts=layouts_of(size or chance.choice(SIZES)),
        gpu_type=None,
        memory_bytes_per_node=0,
        limit_seconds=chance.choice((0.25, 1, 4, 12, 24, 48, 96)) * HOUR,
        is_preemptible=True,
        will_report=True,
    )


@dataclass
class Pool:
    """A pool in steady state."""

    world: World
    now: float
    next_id: int
    chance: random.Random

    def arrive(self) -> int:
        """One more job."""
        self.next_id += 1
        self.world.add_waiting(a_job(self.next_id, self.now, self.chance), self.now)
        return self.next_id

    def end_one(self) -> None:
        """A running job ends."""
        running = [run.id for run in self.world.runs.values() if not run.is_stopping]
        self.world.ended(self.chance.choice(running), self.chance.random())

    def leave(self, stopped: list[int]) -> None:
        """Those that were told to stop have left and wait again."""
        for job_id in stopped:
            run = self.world.runs[job_id]
            self.world.stopped(job_id, _again(run.job, self.now), self.now)

    def settle(self) -> None:
        """Passes until nothing more is stopped."""
        for _ in range(50):
            stops = decide(self.world, self.now, options=OPTIONS).stops
            if not stops:
                return
            self.leave([stop.job_id for stop in stops])


def _again(job: WaitingJob, now: float) -> WaitingJob:
    from dataclasses import replace

    return replace(job, wait_began_at=now, num_stops=job.num_stops + 1, served_seconds=job.served_seconds + 600.0)


def nodes(num_gpus: int) -> list[NodeView]:
    """Nodes of eight GPUs."""
    gpus = tuple(
        GPUView(index=index, model="A100", link_group=f"nvlink {index // 4}", numa_node=index // 4, is_free=True)
        for index in range(GPUS_PER_NODE)
    )
    return [
        NodeView(
            id=number, name=f"node-{number:05}", blocked_by=None, gpus=gpus, cpus=64.0, memory_bytes=2**40,
            free_cpus=64.0, free_memory_bytes=2**40,
        )
        for number in range(1, num_gpus // GPUS_PER_NODE + 1)
    ]  # fmt: skip


def a_pool(
    num_gpus: int, num_queued: int, seed: int = 1, sizes: tuple[int, ...] | None = None, num_teams: int = 0
) -> Pool:
    """A full pool with a queue of `num_queued` jobs; with `num_teams`, each has an equal quota."""
    chance = random.Random(seed)
    history = [
        EndedRatio(ratio=chance.random(), user_id=number % NUM_USERS, team_id=number % NUM_TEAMS)
        for number in range(5_000)
    ]
    teams = [Team(id=number, name=f"team-{number}", quota_gpus=num_gpus // num_teams) for number in range(num_teams)]
    pool = Pool(World(nodes(num_gpus), ratios=history, teams=teams), 0.0, 0, chance)
    while pool.world.index_for(a_job(0, 0.0, chance, 1).shape).num_free > num_gpus // 50:
        for _ in range(max(8, num_gpus // 40)):
            pool.next_id += 1
            size = None if sizes is None else chance.choice(sizes)
            pool.world.add_waiting(a_job(pool.next_id, pool.now, chance, size), pool.now)
        decide(pool.world, pool.now, options=OPTIONS)
        pool.now += 60.0
    while len(pool.world.queue.entries) < num_queued:
        pool.arrive()
    pool.now += 2 * HOUR
    pool.settle()
    return pool


def rounds(pool: Pool, count: int = ROUNDS) -> list[float]:
    """Milliseconds of the passes after one end and one arrival each."""
    taken = []
    for _ in range(count):
        pool.now += 20.0
        pool.end_one()
        pool.arrive()
        began = time.perf_counter()
        decided = decide(pool.world, pool.now, options=OPTIONS)
        taken.append((time.perf_counter() - began) * 1e3)
        pool.leave([stop.job_id for stop in decided.stops])
    return sorted(taken)


def naive_pass(world: World) -> int:
    """Every waiting job against every node, as a first implementation does. Returns how many would fit."""
    free = {node.id: node.available.bit_count() for node in world.nodes.values()}
    started = 0
    for entry in sorted(world.queue.entries.values(), key=lambda entry: entry.left):
        layout = entry.job.least
        able = [node_id for node_id, count in free.items() if count >= layout.gpus_per_node]
        if len(able) >= layout.num_nodes:
            started += 1
            for node_id in sorted(able, key=free.__getitem__)[: layout.num_nodes]:
                free[node_id] -= layout.gpus_per_node
    return started


def timed(action: Callable[[], object], count: int) -> float:
    """Median milliseconds."""
    taken = []
    for _ in range(count):
        began = time.perf_counter()
        action()
        taken.append((time.perf_counter() - began) * 1e3)
    return statistics.median(taken)


def cold_fill(num_gpus: int, num_queued: int) -> float:
    """Seconds of the first pass over an empty pool."""
    chance = random.Random(3)
    world = World(nodes(num_gpus), [a_job(number, 0.0, chance) for number in range(1, num_queued + 1)], now=0.0)
    began = time.perf_counter()
    decide(world, 0.0, options=OPTIONS)
    return time.perf_counter() - began


def answers(pool: Pool) -> dict[str, float]:
    """Milliseconds to say why a job waits, and when it starts, from a world that is held already."""
    calibration = Calibration()
    ids = [entry.id for entry in pool.world.queue.entries.values()]
    chosen = pool.chance.sample(ids, 31)
    why, when = [], []
    for job_id in chosen:
        why.append(timed(lambda job_id=job_id: explain_in(pool.world, job_id, pool.now, None), 1))  # type: ignore[misc]
        when.append(timed(lambda job_id=job_id: forecast(pool.world, job_id, pool.now, calibration), 1))  # type: ignore[misc]
    return {"why_ms": statistics.median(why), "forecast_ms": statistics.median(when), "forecast_most_ms": max(when)}


def growth() -> dict[str, float]:
    """What ten times the queue, the nodes and the running jobs cost, as ratios of medians in interleaved rounds."""
    base = a_pool(1_000, 1_000)
    queue = a_pool(1_000, 10_000)
    wide = a_pool(10_000, 1_000, sizes=(8, 32, 64))
    few = a_pool(1_000, 1_000, sizes=(8, 16))
    many = a_pool(1_000, 1_000, sizes=(1,))
    times: dict[str, list[float]] = {name: [] for name in ("base", "queue", "wide", "few", "many")}
    pools = {"base": base, "queue": queue, "wide": wide, "few": few, "many": many}
    for _ in range(8):
        for name, pool in pools.items():
            times[name].extend(rounds(pool, 40))
    median = {name: statistics.median(values) for name, values in times.items()}
    return {
        "growth_queue_x10": median["queue"] / median["base"],
        "growth_nodes_x10": median["wide"] / median["base"],
        "growth_running_x10": median["many"] / median["few"],
    }


def main() -> int:
    """Run all and print them."""
    figures: dict[str, float] = {}
    for name, num_gpus in (("1k", 1_000), ("10k", 10_000)):
        pool = a_pool(num_gpus, 10_000)
        taken = rounds(pool)
        figures[f"pass_median_ms_{name}"] = statistics.median(taken)
        figures[f"pass_p99_ms_{name}"] = taken[int(len(taken) * 0.99)]
        if name == "1k":
            naive = timed(lambda world=pool.world: naive_pass(world), 5)  # type: ignore[misc]
            figures["naive_ms_1k"] = naive
            figures["ratio_to_naive_1k"] = naive / figures["pass_median_ms_1k"]
        else:
            figures |= answers(pool)
            figures["plan_ms_10k"] = timed(lambda pool=pool: plan(pool.world, pool.now, explain=False), 9)  # type: ignore[misc]
    taken = rounds(a_pool(1_000, 10_000, num_teams=20))
    figures["pass_median_ms_1k_quotas"] = statistics.median(taken)
    figures["pass_p99_ms_1k_quotas"] = taken[int(len(taken) * 0.99)]
    figures["cold_fill_10k_s"] = cold_fill(10_000, 10_000)
    figures |= growth()
    for name, value in figures.items():
        print(f"{name:24} {value:12.3f}")
    print(json.dumps({name: round(value, 4) for name, value in figures.items()}))
    return 0


if __name__ == "__main__":
    sys.exit(main())
