"""`make bench NAME=path`: the main path on the real stack, beside the peers and goals of the design.

Two pools, one after the other, with the deadlines of production, SQLite and a real Redis. The first has one idle agent
of 8 slots: idle CPU, start, log, `true` jobs. In the second every slot is held, so that what is submitted queues while
the scheduler runs: submissions, `kill -9` of the API, the list. It takes some three minutes; `--quick` a fifth of that.

Prints a table and, last, one line of JSON. Not for: faults (`tests/chaos`), or how well the scheduler decides.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

from service.settings import Settings
from tests.bench.support import latencies, submissions
from tests.bench.support.cpu import command_of, cpu_seconds, pids_of
from tests.bench.support.figures import Row, json_line, percentile, table
from tests.support.stack import FAST, Stack

PRODUCTION: Final = {name: str(getattr(Settings(), name.lower())) for name in FAST}
"""The defaults of the product in the place of the deadlines of tests."""
SLOTS: Final = 8
LISTED_JOBS: Final = 10_000
SETTLED_SECONDS: Final = 5.0
"""After the start, before idleness is measured: imports and first connections are over."""

ROWS: Final = (
    Row("submissions_per_s_1", "submissions, 1 client", "/s", 456, "slurmrestd", 800, is_more_better=True),
    Row("submissions_per_s_8", "submissions, 8 clients", "/s", is_more_better=True),
    Row("submissions_per_s_32", "submissions, 32 clients", "/s", 787, "slurmrestd", 1_000, is_more_better=True),
    Row("submit_ratio_to_bare_insert", "… 32 clients ÷ bare inserts", "", is_more_better=True),
    Row("start_p50_ms", "submit → rank process, p50", "ms", 688, "Slurm, tuned", 250),
    Row("start_p99_ms", "submit → rank process, p99", "ms"),
    Row("true_jobs_per_s", "`true` jobs on 8 slots", "/s", 24, "Slurm, tuned", 30, is_more_better=True),
    Row("list_10k_p50_ms", "page of 50 of 10,000 jobs, p50", "ms", 175, "Slurm", 15),
    Row("list_10k_p99_ms", "page of 50 of 10,000 jobs, p99", "ms"),
    Row("log_p50_ms", "log line → client, p50", "ms", 0.2, "srun", 100),
    Row("log_p99_ms", "log line → client, p99", "ms"),
    Row("idle_cpu_s_per_min", "idle stack, CPU s/min", "", 0, "Slurm", 0.6),
)
"""Peers as the design's table has them, the best of each row, however it gets there: `srun` is joined to its job by a
socket and stores nothing, and Slurm's list is the whole list, ours a page of it."""


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    idle_seconds: float = 60.0
    starts: int = 50
    true_jobs: int = 200
    lines: int = 120
    submit_seconds: float = 4.0
    kill_seconds: float = 1.5
    requests: int = 200


QUICK: Final = Sizes(
    idle_seconds=10.0, starts=10, true_jobs=60, lines=100, submit_seconds=1.5, kill_seconds=0.5, requests=60
)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, return 0."""
    parser = argparse.ArgumentParser(prog="python -m tests.bench.path", description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--quick", action="store_true", help="a fifth of everything, for a first look")
    parser.add_argument("--only", choices=("idle-pool", "full-pool"), help="one half; prints its rows and no JSON")
    arguments = parser.parse_args(words)
    sizes = QUICK if arguments.quick else Sizes()
    began_at = time.monotonic()
    print(f"{os.cpu_count()} cores, load average {os.getloadavg()[0]:.2f} before")
    figures: dict[str, float] = {}
    if arguments.only != "full-pool":
        figures |= measure_idle_pool(sizes)
    if arguments.only != "idle-pool":
        figures |= measure_full_pool(sizes)
    print(f"load average {os.getloadavg()[0]:.2f} after; {time.monotonic() - began_at:.0f} s\n")
    print(table([row for row in ROWS if row.key in figures], figures))
    if arguments.only is None:
        print(json_line(ROWS, figures), flush=True)
    return 0


def measure_idle_pool(sizes: Sizes) -> dict[str, float]:
    """Idle CPU, start, log and `true` jobs of a pool that has nothing else to do."""
    chance = random.Random(1)
    with Stack(num_nodes=1, slots=SLOTS, settings=PRODUCTION) as stack:
        idle = told("idle stack, CPU s/min", idle_cpu_seconds_per_minute(stack, sizes.idle_seconds))
        latencies.start_seconds(stack, 2, chance)  # what is loaded once is loaded now
        starts = latencies.start_seconds(stack, sizes.starts, chance)
        told(f"{len(starts)} starts, ms: least, most", *least_and_most_ms(starts))
        lines = latencies.log_seconds(stack, sizes.lines)
        told(f"{len(lines)} lines of log, ms: least, most", *least_and_most_ms(lines))
        rate = told(
            f"{sizes.true_jobs} jobs of `true`, per second", latencies.true_jobs_per_second(stack, sizes.true_jobs)
        )
    return {
        "idle_cpu_s_per_min": idle,
        **in_milliseconds("start", starts),
        **in_milliseconds("log", lines),
        "true_jobs_per_s": rate,
    }


def idle_cpu_seconds_per_minute(stack: Stack, seconds: float) -> float:
    """CPU of API, agent, nursery, Celery child and Redis together while nobody asks anything."""
    time.sleep(SETTLED_SECONDS)
    before = {pid: cpu_seconds(pid) for pid in pids_of(stack)}
    began_at = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began_at
    used = {pid: (cpu_seconds(pid) - seconds_before) * 60 / took for pid, seconds_before in before.items()}
    for pid, per_minute in used.items():
        told(f"  {command_of(pid)}", per_minute)
    return sum(used.values())


def measure_full_pool(sizes: Sizes) -> dict[str, float]:
    """Submissions to, and the list of, a pool whose slots are all held, so that jobs queue up to some 10,000."""
    spec: dict[str, Any] = {"name": "queued", "run": {"command": ["true"]}, "resources": latencies.ONE_SLOT}
    figures = {}
    with Stack(num_nodes=1, slots=SLOTS, settings=PRODUCTION) as stack:
        holder = stack.submit(
            name="holder", run={"command": ["sleep", "3600"]}, resources={"nodes": 1, "gpus_per_node": SLOTS}
        )
        stack.wait_state(holder, "running")
        for num_clients in (1, 8, 32):
            rate = submissions.submissions_per_second(stack, spec, num_clients, sizes.submit_seconds)
            told(f"submissions/s, {num_clients} client processes (keep-alive, raw sockets)", rate)
            figures[f"submissions_per_s_{num_clients}"] = rate
        bare = submissions.bare_inserts_per_second(stack.folder, spec, sizes.submit_seconds / 2)
        told("bare SQLite inserts/s, one transaction a row, same pragmas", bare)
        figures["submit_ratio_to_bare_insert"] = figures["submissions_per_s_32"] / bare
        num_survivors = submissions.survivors_of_kill(stack, spec, 32, sizes.kill_seconds)
        told("answered submissions before kill -9 of the API; all are there after it", num_survivors)
        latencies.fill_jobs(stack, spec, LISTED_JOBS)
        listed = latencies.list_seconds(stack, sizes.requests)
        told(f"{len(listed)} pages of over 10,000 jobs made by the API, ms: least, most", *least_and_most_ms(listed))
        # Every job goes back into the queue and nothing starts: else the freed slots would run all that is queued.
        stack.processes["server"].send_signal(signal.SIGUSR1)
    return {**figures, **in_milliseconds("list_10k", listed)}


def told(what: str, *values: float) -> float:
    """Print what was just measured; returns the first value."""
    print(f"{what}: {', '.join(f'{value:,.2f}' for value in values)}", flush=True)
    return values[0]


def least_and_most_ms(seconds: Sequence[float]) -> tuple[float, float]:
    """The ends of a distribution."""
    return min(seconds) * 1_000, max(seconds) * 1_000


def in_milliseconds(name: str, seconds: Sequence[float]) -> dict[str, float]:
    """p50 and p99 of a distribution, under the keys of the table."""
    return {
        f"{name}_p50_ms": percentile(seconds, 50) * 1_000,
        f"{name}_p99_ms": percentile(seconds, 99) * 1_000,
    }


if __name__ == "__main__":
    sys.exit(main())
