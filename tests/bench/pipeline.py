"""`make bench NAME=pipeline`: the bubble of each pipeline schedule, measured, beside the theory.

Stages sleep for 100 ms forward and 100 ms backward on ranks of this machine, so the time in which a rank does nothing
is the schedule's own. A row's figure is 1 - busy / whole step, the mean over ranks, the median over steps. Theory, for
stages of equal length: (p-1)/(m+p-1) for GPipe and 1F1B, (p-1)/(v·m+p-1) for v interleaved stages a rank (Narayanan et
al. 2021, section 2.2). It takes about two minutes.

Prints a table and, last, one line of JSON: `{"rows": [{"schedule", "p", "m", "measured", "theory"}]}`. Not for: whether
schedules train right (`tests/distributed/test_split_models.py`), or speed on real GPUs.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from typing import Any, Final

from tests.bench.support.sleeping_stages import StepTimes, step_times
from tests.support.ranks import Ranks

SCHEDULES: Final = {"GPipe": 1, "1F1B": 1, "Interleaved1F1B": 2}
"""Schedule to stages on each rank."""
RANKS: Final = (2, 4)
MICRO_BATCHES: Final = (4, 8)
SLOT_SECONDS: Final = 0.1
NUM_STEPS: Final = 3
LARGEST_DIFFERENCE: Final = 0.03
CASE_SECONDS: Final = 120.0


def theory(p: int, m: int, v: int) -> float:
    """The bubble of p ranks with v stages each and m micro-batches. Pure."""
    return (p - 1) / (v * m + p - 1)


def measured_bubble(by_rank: list[list[StepTimes]]) -> float:
    """Median over steps of the ranks' mean idle part. Pure."""
    steps = zip(*by_rank, strict=True)
    return statistics.median(statistics.mean(1 - one.busy / one.whole for one in step) for step in steps)


def measure(slot_seconds: float) -> list[dict[str, Any]]:
    """A row per schedule, ranks and micro-batches."""
    rows = []
    for p in RANKS:
        with Ranks(p) as ranks:
            for name, v in SCHEDULES.items():
                for m in MICRO_BATCHES:
                    by_rank = ranks.run(step_times, name, v, m, slot_seconds, NUM_STEPS, seconds=CASE_SECONDS)
                    row = {"schedule": name, "p": p, "m": m, "v": v}
                    rows.append({**row, "measured": round(measured_bubble(by_rank), 4), "theory": theory(p, m, v)})
                    show(rows[-1])
    return rows


def show(row: dict[str, Any]) -> None:
    """Print a row of the table."""
    off = row["measured"] - row["theory"]
    verdict = "" if abs(off) <= LARGEST_DIFFERENCE else "   more than 3 points off"
    print(
        f"{row['schedule']:<18}{row['p']:>3}{row['m']:>4}{row['v']:>4}{row['measured']:>11.1%}{row['theory']:>9.1%}"
        f"{100 * off:>+8.1f}{verdict}",
        flush=True,
    )


def main() -> int:
    """The benchmark. Exit status 1: a row is more than three points off."""
    parser = argparse.ArgumentParser(prog="make bench NAME=pipeline", description=__doc__)
    parser.add_argument("--slot", type=float, default=SLOT_SECONDS, help="seconds that a stage sleeps each way")
    slot = parser.parse_args().slot
    print(f"{'schedule':<18}{'p':>3}{'m':>4}{'v':>4}{'measured':>11}{'theory':>9}{'points':>8}")
    rows = measure(slot)
    print(json.dumps({"rows": rows}))
    return int(any(abs(row["measured"] - row["theory"]) > LARGEST_DIFFERENCE for row in rows))


if __name__ == "__main__":
    sys.exit(main())
