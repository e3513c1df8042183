"""`make bench NAME=trainer`: what the trainer costs beside a loop by hand, Lightning Fabric and Accelerate.

Ratios of steps: one rank, one thread, steps of about 50 ms of the transformer recipe on this machine's CPU; the loops
take turns in one process, a block of steps each. A block's figure is the mean over its steps, what the loop does
between steps included. Then the time that an asynchronous checkpoint blocks beside a synchronous one, and samples per
second of two ranks beside one (one thread each, twice the samples, in turns). Each figure is the median over turns with
its 95 % interval. Fabric and Accelerate are installed into a folder that is thrown away. It takes some four minutes on
a machine that does nothing else; `--quick` one.

Prints a table and, last, one line of JSON. Not for: whether the training is right (`tests/distributed`).
"""

from __future__ import annotations

import argparse
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from tests.bench.support import checkpoint_times, peers, training_loops
from tests.bench.support.checkpoint_times import BlockingTimes
from tests.bench.support.figures import Row, json_line, table
from tests.bench.support.ratios import Interval, interval_rows, median_interval, ratio_interval, titled, turn_order
from tests.bench.support.training_loops import ACCELERATE, FABRIC, HAND, TRAINER, Block, Workload
from tests.support.ranks import Ranks

ROWS: Final = (
    Row("step_ratio_to_hand_loop", "step ÷ loop by hand", "", 1.0, "by hand", 1.03),
    Row("step_ratio_to_fabric", "step ÷ Fabric", "", 1.0, "Fabric", 1.02),
    Row("step_ratio_to_accelerate", "step ÷ Accelerate", "", 1.0, "Accelerate", 1.02),
    Row("async_checkpoint_blocking_ratio", "blocking, async ÷ sync checkpoint", "", 0.3, "torch's default", 0.1),
    Row("ddp_scaling_1_to_2", "samples/s, 2 ranks ÷ 1", "", is_more_better=True),
    Row("step_cpu_ratio_to_hand_loop", "CPU of a step ÷ loop by hand", ""),
    Row("step_cpu_ratio_to_fabric", "CPU of a step ÷ Fabric", ""),
    Row("step_cpu_ratio_to_accelerate", "CPU of a step ÷ Accelerate", ""),
    Row("hand_loop_step_ms", "step by hand", "ms"),
    Row("async_checkpoint_blocking_s", "asynchronous checkpoint blocks", "s"),
)
"""The first five are the ones to judge by; the others say how. Each has an interval."""
FACTS: Final = (
    Row("checkpoint_gb", "checkpoint", "GB"),
    Row("turns", "turns of the loops", ""),
    Row("load_before", "load average before", ""),
    Row("load_after", "load average after", ""),
)
OTHERS: Final = {"hand_loop": HAND, "fabric": FABRIC, "accelerate": ACCELERATE}
"""Name in the keys to name of the loop."""
MIN_TURNS: Final = 5
CASE_SECONDS: Final = 240.0
SMALL_CHECKPOINT_BYTES: Final = 256 * 1_000_000


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """How much is measured."""

    step_seconds: float = 0.05
    timed_steps: int = 20
    turns: int = 24
    loops_seconds: float = 130.0
    """No further turn begins after this long (but `MIN_TURNS` of them do)."""
    checkpoint_bytes: int = 1_000_000_000
    checkpoint_turns: int = 6
    scaling_turns: int = 10


QUICK: Final = Sizes(
    step_seconds=0.02,
    timed_steps=10,
    turns=6,
    loops_seconds=20.0,
    checkpoint_bytes=100_000_000,
    checkpoint_turns=3,
    scaling_turns=3,
)


def main(words: Sequence[str] | None = None) -> int:
    """Measure, print, return 0."""
    parts: dict[str, Callable[[Sizes, Path, int, Path | None], dict[str, float]]] = {
        "loops": measure_loops,
        "checkpoint": measure_checkpoints,
        "ddp": measure_scaling,
    }
    parser = argparse.ArgumentParser(
        prog="python -m tests.bench.trainer", description=(__doc__ or "").split("\n", 1)[0]
    )
    parser.add_argument("--quick", action="store_true", help="short steps, few turns, for a first look")
    parser.add_argument("--only", choices=tuple(parts), help="one part; prints its rows and no JSON")
    parser.add_argument("--peers", type=Path, help="folder of packages that has Fabric and Accelerate already")
    arguments = parser.parse_args(words)
    sizes = QUICK if arguments.quick else Sizes()
    figures = {"load_before": os.getloadavg()[0]}
    print(f"{os.cpu_count()} cores, load average {figures['load_before']:.2f} before", flush=True)
    began_at = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="gl-bench-") as folder:
        batch_size = choose_batch(sizes)
        for name, measure in parts.items():
            if arguments.only in (None, name):
                figures |= measure(sizes, Path(folder) / name, batch_size, arguments.peers)
    figures["load_after"] = os.getloadavg()[0]
    print(f"load average {figures['load_after']:.2f} after; {time.monotonic() - began_at:.0f} s\n")
    print(table([titled(row, figures) for row in ROWS if row.key in figures], figures))
    if arguments.only is None:
        print(json_line([*(one for row in ROWS for one in interval_rows(row)), *FACTS], figures), flush=True)
    return 0


def choose_batch(sizes: Sizes) -> int:
    """Samples per rank and step, so that a step takes about as long as it should."""
    with Ranks(1) as ranks:
        batch_size: int = ranks.run(training_loops.choose_batch, sizes.step_seconds)[0]
    print(f"{batch_size} samples per rank, for steps of {sizes.step_seconds * 1_000:.0f} ms of one core", flush=True)
    return batch_size


def measure_loops(sizes: Sizes, folder: Path, batch_size: int, packages: Path | None) -> dict[str, float]:
    """The four loops, a block each per turn. The first turn does not count."""
    workload = Workload(batch_size=batch_size, timed_steps=sizes.timed_steps)
    packages = packages or peers.install_peers(folder / "peers")
    turns: list[dict[str, Block]] = []
    with ExitStack() as stack:
        ranks = stack.enter_context(with_packages(packages))
        ranks.run(training_loops.check_same_updates, str(folder / "check"))
        ranks.run(training_loops.run_turn, workload, str(folder), 0, seconds=CASE_SECONDS)
        began_at = time.monotonic()
        while len(turns) < sizes.turns:
            if len(turns) >= MIN_TURNS and time.monotonic() - began_at > sizes.loops_seconds:
                break
            turns += ranks.run(training_loops.run_turn, workload, str(folder), len(turns), seconds=CASE_SECONDS)
            walls = ", ".join(f"{name} {turns[-1][name].wall_seconds * 1_000:.1f}" for name in sorted(turns[-1]))
            print(f"turn {len(turns)}, ms per step: {walls}", flush=True)
    return loop_figures(turns)


def with_packages(packages: Path) -> Ranks:
    """One rank that finds the packages of a folder, too."""
    # Ranks pass this process's environment on. Nothing else of it reads the variable: it has started.
    os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (str(packages), os.environ.get("PYTHONPATH"))))
    return Ranks(1)


def loop_figures(turns: Sequence[dict[str, Block]]) -> dict[str, float]:
    """The ratios of the trainer's blocks to each other loop's, by wall clock and by CPU. Pure."""
    figures: dict[str, float] = {"turns": len(turns)}
    ours = [turn[TRAINER] for turn in turns]
    for name, other in OTHERS.items():
        theirs = [turn[other] for turn in turns]
        walls = ratio_interval([one.wall_seconds for one in ours], [one.wall_seconds for one in theirs])
        cpus = ratio_interval([one.cpu_seconds for one in ours], [one.cpu_seconds for one in theirs])
        figures |= walls.named(f"step_ratio_to_{name}") | cpus.named(f"step_cpu_ratio_to_{name}")
    by_hand = median_interval([turn[HAND].wall_seconds * 1_000 for turn in turns])
    return figures | by_hand.named("hand_loop_step_ms")


def measure_checkpoints(sizes: Sizes, folder: Path, batch_size: int, packages: Path | None) -> dict[str, float]:
    """Synchronous and asynchronous checkpoints of one state in turns, on one rank."""
    folder.mkdir(parents=True)
    num_bytes = checkpoint_size(sizes.checkpoint_bytes, shutil.disk_usage(folder).free, available_memory())
    if num_bytes < sizes.checkpoint_bytes:
        print(f"memory or disk is short: checkpoints of {num_bytes / 1e9:.3g} GB instead", flush=True)
    with Ranks(1) as ranks:
        times: BlockingTimes = ranks.run(
            checkpoint_times.blocking_times, num_bytes, sizes.checkpoint_turns, str(folder), seconds=CASE_SECONDS
        )[0]
    for name, seconds in (("synchronous", times.sync_seconds), ("asynchronous", times.async_seconds)):
        told = ", ".join(f"{one:.3f}" for one in seconds)
        print(f"{name} checkpoints of {times.num_bytes / 1e9:.3g} GB in {folder} blocked, s: {told}", flush=True)
    return checkpoint_figures(times)


def checkpoint_figures(times: BlockingTimes) -> dict[str, float]:
    """The ratio of blocking times, and the time itself. Pure."""
    return {
        **ratio_interval(times.async_seconds, times.sync_seconds).named("async_checkpoint_blocking_ratio"),
        **median_interval(times.async_seconds).named("async_checkpoint_blocking_s"),
        "checkpoint_gb": times.num_bytes / 1e9,
    }


def checkpoint_size(wanted: int, free_disk: int, free_memory: int) -> int:
    """`wanted` bytes, or 256 MB where disk (three checkpoints) or memory (state, gradients, copy, pages of a file) is
    short. Pure."""
    return wanted if free_disk > 4 * wanted and free_memory > 5 * wanted else min(wanted, SMALL_CHECKPOINT_BYTES)


def available_memory() -> int:
    """Bytes that new work may use, as Linux estimates it. Raises StopIteration where it does not say."""
    lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))


def measure_scaling(sizes: Sizes, folder: Path, batch_size: int, packages: Path | None) -> dict[str, float]:
    """The trainer on one rank and on two, each rank with as many samples and one thread, in turns."""
    workloads = {n: Workload(batch_size=n * batch_size, timed_steps=sizes.timed_steps) for n in (1, 2)}
    rates: dict[int, list[float]] = {1: [], 2: []}
    with Ranks(1) as one, Ranks(2) as two:
        gangs = {"1": one, "2": two}
        for turn in range(-1, sizes.scaling_turns):
            for ranks in (gangs[name] for name in turn_order(list(gangs), turn)):
                workload = workloads[ranks.world_size]
                blocks: list[Block] = ranks.run(training_loops.run_trainer, workload, str(folder), seconds=CASE_SECONDS)
                # Turn -1 does not count: ranks start and meet in it.
                if turn >= 0:
                    rates[ranks.world_size].append(workload.batch_size / max(block.wall_seconds for block in blocks))
    scaling: Interval = ratio_interval(rates[2], rates[1])
    return scaling.named("ddp_scaling_1_to_2")


if __name__ == "__main__":
    sys.exit(main())
