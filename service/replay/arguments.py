"""From the words of a command line to the terms of a replay: every fault is found, each with what it takes. Pure.

Not for: the names and help of the options (`service.replay.command`).
"""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from service.replay.limits import LIMIT_KINDS, Assumptions
from service.replay.pool_size import KNOWN_GPUS_PER_NODE, PoolShape, default_nodes, least_nodes
from service.replay.run_record import Surroundings
from service.replay.study import ORACLE
from service.replay.traces import Trace
from service.scheduler.policies import POLICIES
from service.scheduler.scheduling_pass import PREEMPTION_KINDS

MAX_SEEDS: Final = 1_000
MAX_NODES: Final = 100_000
MAX_GPUS_PER_NODE: Final = 64
_PERCENT: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*%?\s*")
_TIME: Final = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(s|m|h|)\s*")
RECORDED: Final = "recorded"
"""As the source tells it of each job."""
_SECONDS: Final = {"": 1, "s": 1, "m": 60, "h": 3600}


@dataclass(frozen=True)
class Fault:
    """What is wrong with one option, and what it takes."""

    option: str
    message: str


@dataclass(frozen=True, kw_only=True)
class Words:
    """The options as typed."""

    trace: str | None = None
    is_history: bool = False
    policies: tuple[str, ...] = ()
    nodes: str | None = None
    gpus_per_node: str | None = None
    limits: str | None = None
    reports: str | None = None
    report_error: str = "20%"
    preemptible: str | None = None
    preemption: str = "all"
    grace: str = "0"
    restore: str = "60"
    seeds: str = "1"
    first_seed: str = "1"
    processes: str = "1"


@dataclass(frozen=True, kw_only=True)
class Terms:
    """The options as meant."""

    policies: tuple[str, ...]
    nodes: int | None
    gpus_per_node: int | None
    assumptions: Assumptions
    preemption: str
    grace_seconds: int
    restore_seconds: int
    seeds: tuple[int, ...]
    processes: int


def read_terms(words: Words) -> tuple[Terms, list[Fault]]:
    """The terms, and all faults; with a fault the terms mean nothing."""
    reading = _Reading()
    if words.is_history == (words.trace is not None):
        both = "both were given" if words.is_history else "none was given"
        reading.fault("TRACE", f"give a trace file or --history: {both}")
    first = reading.number("--first-seed", words.first_seed, 0, 10**9)
    terms = Terms(
        policies=reading.policies(words.policies),
        nodes=None if words.nodes is None else reading.number("--nodes", words.nodes, 1, MAX_NODES),
        gpus_per_node=(
            None
            if words.gpus_per_node is None
            else reading.number("--gpus-per-node", words.gpus_per_node, 1, MAX_GPUS_PER_NODE)
        ),
        assumptions=Assumptions(
            limits=reading.choice("--limits", _limits(words), LIMIT_KINDS),
            preemptible_share=reading.share_or_recorded("--preemptible", words.preemptible, words.is_history),
            reporting_share=reading.share_or_recorded("--reports", words.reports, words.is_history),
            report_error=reading.share("--report-error", words.report_error, 99),
        ),
        preemption=reading.choice("--preemption", words.preemption, PREEMPTION_KINDS),
        grace_seconds=reading.seconds("--grace", words.grace),
        restore_seconds=reading.seconds("--restore", words.restore),
        seeds=tuple(range(first, first + reading.number("--seeds", words.seeds, 1, MAX_SEEDS))),
        processes=reading.number("--jobs", words.processes, 1, 256),
    )
    return terms, reading.faults


def surroundings_of(terms: Terms, trace: Trace, pool: PoolShape | None = None) -> tuple[Surroundings, list[Fault]]:
    """The pool to replay on: as the options say, else as `pool` is, else of a size that suits the trace.

    A fault when a job of the trace could never start there.
    """
    size = terms.gpus_per_node
    if size is None:
        size = KNOWN_GPUS_PER_NODE if pool is None else pool.gpus_per_node
    nodes = terms.nodes
    if nodes is None:
        nodes = default_nodes(trace, size) if pool is None else pool.nodes_of(size)
    least = least_nodes(trace, size)
    faults = []
    if nodes < least:
        largest = max(trace.jobs, key=lambda job: job.gpus)
        faults.append(
            Fault(
                "--nodes",
                f"job {largest.job_id} asks for {largest.gpus} GPUs, more than {nodes} x {size}: give at least {least}",
            )
        )
    surroundings = Surroundings(
        nodes=nodes,
        gpus_per_node=size,
        grace_seconds=terms.grace_seconds,
        restore_seconds=terms.restore_seconds,
    )
    return surroundings, faults


def _limits(words: Words) -> str:
    """A server knows the limits of its own jobs; the public traces have none."""
    if words.limits is not None:
        return words.limits
    return RECORDED if words.is_history else "human"


class _Reading:
    """Reads one word after another and keeps what is wrong with them."""

    def __init__(self) -> None:
        self.faults: list[Fault] = []

    def fault(self, option: str, message: str) -> None:
        self.faults.append(Fault(option, message))

    def number(self, option: str, word: str, least: int, most: int) -> int:
        text = word.strip()
        if text.isascii() and text.isdigit() and least <= int(text) <= most:
            return int(text)
        self.fault(option, f"{word!r} is no whole number from {least:,} to {most:,}")
        return least

    def share(self, option: str, word: str, most_percent: int) -> float:
        found = _PERCENT.fullmatch(word)
        if found is not None and float(found[1]) <= most_percent:
            return float(found[1]) / 100.0
        self.fault(option, f"{word!r} is no share from 0% to {most_percent}%; write it like 30%")
        return 0.0

    def share_or_recorded(self, option: str, word: str | None, is_history: bool) -> float | None:
        """None: as recorded, which is the default of a history and which no trace file can give."""
        if word is None:
            return None if is_history else 1.0
        if word.strip() != RECORDED:
            return self.share(option, word, 100)
        if not is_history:
            self.fault(option, f"{word!r} is for --history: a trace file does not tell it; write a share like 30%")
        return None

    def seconds(self, option: str, word: str) -> int:
        found = _TIME.fullmatch(word)
        seconds = math.inf if found is None else float(found[1]) * _SECONDS[found[2]]
        if seconds <= 86400:
            return round(seconds)
        self.fault(option, f"{word!r} is no time of at most a day; write it like 60, 60s or 10m")
        return 0

    def choice(self, option: str, word: str, choices: Sequence[str]) -> str:
        if word not in choices:
            self.fault(option, _unknown(word, choices))
        return word

    def policies(self, words: Sequence[str]) -> tuple[str, ...]:
        names = [name.strip() for word in words for name in word.split(",") if name.strip()]
        known = (*POLICIES, ORACLE)
        for name in names:
            if name not in known:
                self.fault("--policy", _unknown(name, known))
        if not names:
            self.fault("--policy", f"names no policy; there are {', '.join(known)}")
        return tuple(dict.fromkeys(name for name in names if name != ORACLE))


def _unknown(word: str, choices: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, choices, n=1)
    hint = f", did you mean {near[0]}?" if near else "."
    return f"there is no {word!r}{hint} There are {', '.join(choices)}"
