"""Which replays make up a comparison, and the row of each policy in its table. Pure, but for the time that it takes.

Not for: spreading the replays over processes (`service.replay.workers`).
"""

from __future__ import annotations

import dataclasses
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from service.replay.audit import faults_of
from service.replay.engine import ProductionEngine
from service.replay.forecasts import ForecastingEngine, Judged
from service.replay.limits import Assumptions
from service.replay.metrics import Figures, figures_of, mean
from service.replay.oracle import run_oracle
from service.replay.pool_size import least_nodes
from service.replay.run_record import RunRecord, Surroundings
from service.replay.simulate import SimulationFault, simulate
from service.replay.traces import Trace
from service.scheduler.plan import PolicyOptions

YARDSTICK: Final = "fifo+easy"
ORACLE: Final = "srtf"
MAX_SHOWN_FAULTS: Final = 5
LARGEST_OF_SEEDS: Final = frozenset({"max_wait_hours", "max_preemptions", "worst_team_slowdown"})
"""Of several seeds the largest counts, of other figures the mean."""


@dataclass(frozen=True, kw_only=True)
class Study:
    """One comparison on one trace."""

    trace: Trace
    surroundings: Surroundings
    assumptions: Assumptions
    policies: tuple[str, ...]
    """Besides the yardstick and the oracle, which are always there."""
    preemption: str
    seeds: tuple[int, ...]
    with_alone: bool = False
    """Also replay each team alone on its part of the pool."""
    with_forecasts: bool = False
    """Also foretell the start of each job at its submission, under the policies that are asked for."""

    @property
    def rows(self) -> tuple[str, ...]:
        """Policies in the order of the table."""
        return tuple(dict.fromkeys((YARDSTICK, *self.policies, ORACLE)))

    def tasks(self) -> list[Task]:
        """All replays. The oracle knows the true times, so that one replay serves all seeds."""
        policies = [policy for policy in self.rows if policy != ORACLE]
        tasks = [Task(policy=policy, seed=seed) for seed in self.seeds for policy in policies]
        return [Task(policy=ORACLE, seed=self.seeds[0]), *tasks]

    @property
    def num_jobs(self) -> int:
        """Jobs that end in all replays together, for the progress."""
        alone = len(self.seeds) if self.with_alone else 0
        return len(self.trace.jobs) * (len(self.tasks()) + alone)


@dataclass(frozen=True, kw_only=True)
class Task:
    """One replay of a study."""

    policy: str
    seed: int


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What one replay came to."""

    task: Task
    figures: Figures
    ended_at: tuple[float, ...]
    """Of each job of the trace; empty unless the study compares with teams alone."""
    judged: tuple[Judged, ...] = ()
    """Forecasts that were made, where the study asks for them."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """One policy over all seeds."""

    policy: str
    figures: Mapping[str, float | None]
    """By the names of `Figures`: means of the seeds, of some the largest."""
    over: float
    """Mean JCT over that of the oracle, mean of the seeds."""
    over_range: tuple[float, float]
    late_percent: float | None
    """Jobs that ended later than if their team had run alone on its part of the pool."""
    by_seed: tuple[Outcome, ...]


def run_task(study: Study, task: Task, on_progress: Callable[[int], None] | None = None) -> Outcome:
    """Carry out one replay and check it. Raises SimulationFault."""
    judged: tuple[Judged, ...] = ()
    if task.policy == ORACLE:
        record = run_oracle(study.trace, study.surroundings, on_progress)
    elif study.with_forecasts and task.policy in study.policies:
        engine = ForecastingEngine(study.surroundings, task.policy, PolicyOptions(preemption=study.preemption))
        record = replay(study, study.trace, study.surroundings, task, on_progress, engine)
        judged = tuple(engine.judged)
    else:
        record = replay(study, study.trace, study.surroundings, task, on_progress)
    ended_at = tuple(at for at in record.ended_at if at is not None) if study.with_alone else ()
    return Outcome(task=task, figures=figures_of(record), ended_at=ended_at, judged=judged)


def replay(
    study: Study,
    trace: Trace,
    surroundings: Surroundings,
    task: Task,
    on_progress: Callable[[int], None] | None = None,
    engine: ProductionEngine | None = None,
) -> RunRecord:
    """One audited replay of a trace, or of a part of it, under a policy of the scheduler. Raises SimulationFault."""
    engine = engine or ProductionEngine(surroundings, task.policy, PolicyOptions(preemption=study.preemption))
    record = simulate(trace, engine, surroundings, study.assumptions, task.seed, on_progress)
    faults = faults_of(record)
    if faults:
        raise SimulationFault(
            f"{task.policy}, seed {task.seed}: {len(faults)} faults: " + "; ".join(faults[:MAX_SHOWN_FAULTS])
        )
    return record


def run_alone(study: Study, seed: int, on_progress: Callable[[int], None] | None = None) -> dict[int, float]:
    """When each job (by row) ends if its team has its part of the nodes to itself, under the yardstick."""
    ends: dict[int, float] = {}
    task = Task(policy=YARDSTICK, seed=seed)
    for trace, nodes in parts_of(study):
        surroundings = dataclasses.replace(study.surroundings, nodes=nodes)
        record = replay(study, trace, surroundings, task, on_progress)
        ends |= {job.row: at for job, at in zip(trace.jobs, record.ended_at, strict=True) if at is not None}
    return ends


def parts_of(study: Study) -> Iterator[tuple[Trace, int]]:
    """Each team's jobs, and nodes in proportion to its GPU-seconds: enough for its largest job at least."""
    of_team = defaultdict(list)
    for job in study.trace.jobs:
        of_team[job.team].append(job)
    total = sum(job.gpus * job.duration for job in study.trace.jobs)
    for team, jobs in sorted(of_team.items()):
        trace = Trace(f"{study.trace.name}, {team}", tuple(jobs))
        part = sum(job.gpus * job.duration for job in jobs) / total
        nodes = max(least_nodes(trace, study.surroundings.gpus_per_node), round(part * study.surroundings.nodes))
        yield trace, nodes


def rows_of(study: Study, outcomes: Sequence[Outcome], alone: Mapping[int, Mapping[int, float]]) -> list[Row]:
    """The table. `alone`: per seed what `run_alone` gave, empty if that was not asked for."""
    oracle = next(outcome for outcome in outcomes if outcome.task.policy == ORACLE)
    bound = oracle.figures.mean_jct_hours
    rows = []
    for policy in study.rows:
        own = sorted((one for one in outcomes if one.task.policy == policy), key=lambda one: one.task.seed)
        over = [one.figures.mean_jct_hours / bound for one in own]
        late = [_late_percent(study.trace, one, alone[one.task.seed]) for one in own if one.task.seed in alone]
        rows.append(
            Row(
                policy=policy,
                figures=_joined([one.figures for one in own]),
                over=mean(over),
                over_range=(min(over), max(over)),
                late_percent=mean(late) if late else None,
                by_seed=tuple(own),
            )
        )
    return rows


def _joined(of_seeds: Sequence[Figures]) -> dict[str, float | None]:
    joined: dict[str, float | None] = {}
    for field in dataclasses.fields(Figures):
        values: list[Any] = [getattr(figures, field.name) for figures in of_seeds]
        if None in values:
            joined[field.name] = None
        elif field.name in LARGEST_OF_SEEDS:
            joined[field.name] = max(values)
        else:
            joined[field.name] = mean(values)
    return joined


def _late_percent(trace: Trace, outcome: Outcome, alone: Mapping[int, float]) -> float:
    pairs = zip(trace.jobs, outcome.ended_at, strict=True)
    return 100.0 * sum(at > alone[job.row] for job, at in pairs) / len(trace.jobs)
