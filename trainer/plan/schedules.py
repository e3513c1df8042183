"""Pipeline schedules, and which of them are proven to train right with which other ways to split. Pure data and sums.

The names are those of `torch.distributed.pipelining`. Some combinations train wrong without a word (FSDP that reshards
inside a zero-bubble schedule) or crash (DDP around a stage), so only what an equality test covers may run. A new row in
`PROVEN` is a new case of that test. Not for: running a schedule (`trainer.parallel.pipeline`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Final, Literal

from trainer.plan.axes import ParallelPlan

DataKind = Literal["none", "replicate", "shard", "hybrid"]


@dataclass(frozen=True, kw_only=True)
class Schedule:
    """What is to be known of a schedule."""

    name: str
    least_stages: int = 1
    """Stages on a rank."""
    most_stages: float = 1
    """math.inf: as many as there are layers."""
    is_v: bool = False
    """Stages go down the ranks and up again, so that a rank has the r-th and the r-th but last."""
    splits_backward: bool = False
    """The gradients of inputs and of weights are computed apart (the zero-bubble family)."""
    takes: Callable[[int, int], bool] = lambda micro_batches, pp: True
    """Whether so many micro-batches go over `pp` ranks: torch refuses the others."""
    rule: str = "any number of micro-batches"
    """`takes` in words."""
    idle_slots: Callable[[int, int, int], float]
    """(micro_batches, pp, stages_per_rank) to what a rank waits in a step, in forwards with backward of one stage and
    micro-batch."""


def _in_rounds(micro_batches: int, pp: int) -> bool:
    """As torch's interleaved schedules: rounds of equal size, of at least `pp` each."""
    return micro_batches % max(1, micro_batches // pp) == 0


def _idle_interleaved(micro_batches: int, pp: int, stages: int) -> float:
    """p − 1; with fewer micro-batches than ranks a rank also waits for its next stage's turn."""
    return pp - 1 + (stages - 1) * max(0, pp - micro_batches)


def _idle_zero_bubble(micro_batches: int, pp: int, stages: int) -> float:
    """Qi et al. 2023 (arXiv 2401.10241), table 1, of ZB-H1: (p − 1)(T_F + T_B − T_W), a third of 1F1B's where forward
    and both parts of backward take equally long. With fewer micro-batches than ranks it is about this."""
    return (pp - 1 + 2 * (stages - 1) * max(0, pp - micro_batches)) / 3


def _idle_v(micro_batches: int, pp: int, stages: int) -> float:
    """The same third from 2p − 1 micro-batches on: the paper's ZB-V has no bubble only where a rank starts the next
    step before the others end this one, which averaging gradients does not allow. So for DualPipeV."""
    return max(pp - 1, 4 * (pp - 1) - 2 * (micro_batches - 1)) / 3


_ROUNDS_RULE: Final = "micro_batches a multiple of micro_batches // pp"

SCHEDULES: Final[Mapping[str, Schedule]] = {
    one.name: one
    for one in (
        Schedule(name="GPipe", idle_slots=lambda micro_batches, pp, stages: pp - 1),
        Schedule(
            name="1F1B",
            takes=lambda micro_batches, pp: micro_batches >= pp,
            rule="micro_batches of pp or more",
            idle_slots=lambda micro_batches, pp, stages: pp - 1,
        ),
        Schedule(
            name="Interleaved1F1B",
            least_stages=2,
            most_stages=math.inf,
            takes=_in_rounds,
            rule=_ROUNDS_RULE,
            idle_slots=_idle_interleaved,
        ),
        Schedule(
            name="InterleavedZeroBubble",
            least_stages=2,
            most_stages=math.inf,
            splits_backward=True,
            takes=_in_rounds,
            rule=_ROUNDS_RULE,
            idle_slots=_idle_zero_bubble,
        ),
        Schedule(
            name="ZBVZeroBubble",
            least_stages=2,
            most_stages=2,
            is_v=True,
            splits_backward=True,
            idle_slots=_idle_v,
        ),
        Schedule(
            name="DualPipeV",
            least_stages=2,
            most_stages=2,
            is_v=True,
            splits_backward=True,
            takes=lambda micro_batches, pp: micro_batches >= 2 * pp,
            rule="micro_batches of 2 × pp or more",
            idle_slots=_idle_v,
        ),
    )
}
"""Every schedule by its name."""
SCHEDULE_NAMES: Final = tuple(SCHEDULES)


def bubble_of(plan: ParallelPlan) -> float:
    """The part of a step in which a rank waits for others of its pipeline, in theory, from 0 to 1.

    Of equal stages without the time to send: (p − 1)/(m + p − 1) for GPipe and 1F1B, (p − 1)/(v·m + p − 1) interleaved,
    (p − 1)/(3·v·m + p − 1) for the zero-bubble family with forward and both parts of backward equally long.
    """
    if plan.pp == 1:
        return 0.0
    idle = SCHEDULES[plan.schedule].idle_slots(plan.micro_batches, plan.pp, plan.stages_per_rank)
    return idle / (plan.stages_per_rank * plan.micro_batches + idle)


def largest_micro_batches(schedule: str, most: int, pp: int) -> int | None:
    """The largest number up to `most` that `schedule` takes over `pp` ranks; None when there is none."""
    return next((number for number in range(most, 0, -1) if SCHEDULES[schedule].takes(number, pp)), None)


def nearest_micro_batches(schedule: str, wanted: int, pp: int) -> tuple[int, ...]:
    """The numbers next to `wanted`, below and above it, that `schedule` takes over `pp` ranks."""
    below = largest_micro_batches(schedule, wanted, pp)
    # 2 × pp suits every schedule, and so does each multiple above it.
    above = next(number for number in range(wanted, wanted + 3 * pp) if SCHEDULES[schedule].takes(number, pp))
    return tuple(dict.fromkeys((*([] if below is None else [below]), above)))


# --- What is proven --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Combination:
    """Ways to split that a plan uses at once."""

    schedule: str | None
    """None: no pipeline."""
    data: DataKind
    tensor: bool


_WHOLE: Final[tuple[DataKind, ...]] = ("none", "replicate")
_SHARDED: Final[tuple[DataKind, ...]] = (*_WHOLE, "shard")
_ROWS: Final[tuple[tuple[str | None, tuple[DataKind, ...], tuple[DataKind, ...]], ...]] = (
    (None, (*_SHARDED, "hybrid"), _SHARDED),
    ("GPipe", _SHARDED, _WHOLE),
    ("1F1B", _SHARDED, _WHOLE),
    ("Interleaved1F1B", _SHARDED, _WHOLE),
    ("InterleavedZeroBubble", _SHARDED, ()),
    ("ZBVZeroBubble", _SHARDED, ()),
    ("DualPipeV", _SHARDED, ()),
)
"""A schedule (None: no pipeline), and the data parallelism that goes with it: without tensor parallelism, and with."""
PROVEN: Final = tuple(
    Combination(schedule=schedule, data=data, tensor=tensor)
    for schedule, without, with_tensor in _ROWS
    for tensor, kinds in ((False, without), (True, with_tensor))
    for data in kinds
)
"""Every combination whose gradients a test compares with one process's. All others are refused."""


def combination_of(plan: ParallelPlan) -> Combination:
    """What a plan uses."""
    kinds: dict[tuple[bool, bool], DataKind] = {
        (False, False): "none",
        (True, False): "replicate",
        (False, True): "shard",
        (True, True): "hybrid",
    }
    return Combination(
        schedule=plan.schedule if plan.pp > 1 else None,
        data=kinds[plan.dp_replicate > 1, plan.dp_shard > 1],
        tensor=plan.tp > 1,
    )


def nearest_proven(wanted: Combination) -> Combination:
    """The proven combination with the least changes: another schedule, then shards instead of copies (which needs no
    more memory), then no tensor parallelism. It always keeps a pipeline, and never asks for one."""
    candidates = [one for one in PROVEN if (one.schedule is None) == (wanted.schedule is None)]
    return min(candidates, key=lambda one: _distance(wanted, one))


def nearest_proven_plan(plan: ParallelPlan) -> ParallelPlan:
    """`plan` changed into the nearest proven combination, on as many ranks."""
    wanted, found = combination_of(plan), nearest_proven(combination_of(plan))
    data, tp = plan.data_parallel_size, plan.tp
    if wanted.tensor and not found.tensor:
        data, tp = data * tp, 1
    axes = {"none": (1, 1), "replicate": (data, 1), "shard": (1, data), "hybrid": (plan.dp_replicate, plan.dp_shard)}
    if found.data == wanted.data and tp == plan.tp:
        replicas, shards = plan.dp_replicate, plan.dp_shard
    else:
        replicas, shards = axes[found.data]
    changed = replace(plan, dp_replicate=replicas, dp_shard=shards, tp=tp)
    return changed if found.schedule is None else replace(changed, schedule=found.schedule)


def _distance(wanted: Combination, other: Combination) -> int:
    """How much a combination differs from the wanted one."""
    distance = 0
    if wanted.schedule is not None and other.schedule is not None and wanted.schedule != other.schedule:
        first, second = SCHEDULES[wanted.schedule], SCHEDULES[other.schedule]
        distance += 1 if first.least_stages == second.least_stages else 2
    if wanted.data != other.data:
        distance += 3 if (wanted.data, other.data) == ("hybrid", "shard") else 8
    if wanted.tensor != other.tensor:
        distance += 5 if wanted.tensor else 20
    return distance
