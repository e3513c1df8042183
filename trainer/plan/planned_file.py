"""What of a plan file or a job file decides how a model is split: what is trained, the wish, batch and optimizer. Pure.

Not for: submitting a job file (the API reads all of it and refuses what is wrong), training a plan file (`read_plan`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from typing import Any, Final

from gangline.protocol.launch import decode
from trainer.plan.axes import AXES, ParallelPlan, ParallelRequest, RankLayout
from trainer.plan.estimate import OptimizerKind
from trainer.plan.parallel_rules import PIPELINE_KEYS
from trainer.plan.problem import PlanError, PlanProblem
from trainer.plan.training_plan import RunTarget, TrainSettings

_REQUEST_KEYS: Final = tuple(field.name for field in fields(ParallelRequest))
_SIZES: Final = {
    "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40, "b": 1,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class PlannedFile:
    """What a file says."""

    run: RunTarget
    parallel: ParallelRequest
    batch_size: int
    optimizer: OptimizerKind
    layout: RankLayout
    """Of the job file's resources, with all GPUs on one node where it leaves that open; a plan file's ranks, on one."""
    plan: ParallelPlan | None = None
    """Of a plan file: how it is split over its own number of ranks. `parallel` is then the wish that it came from."""

    def request_on(self, layout: RankLayout, strategy: str | None = None) -> ParallelRequest:
        """What is asked for on the ranks of `layout`: in a plan file its own plan, where these are as many as it has.

        `strategy`: instead of the file's; `auto` chooses the numbers too.
        """
        if strategy == "auto":
            nothing: dict[str, Any] = dict.fromkeys((*AXES, *PIPELINE_KEYS))
            return replace(self.parallel, strategy=strategy, **nothing)
        if strategy is not None:
            return replace(self.parallel, strategy=strategy)
        is_as_planned = self.plan is not None and self.plan.world_size == layout.world_size
        return _request_of(self.plan) if self.plan is not None and is_as_planned else self.parallel


def read_planned(data: Any) -> PlannedFile:
    """What the content of a plan file or of a job file says; other keys are not looked at. Raises PlanError."""
    try:
        if not isinstance(data, Mapping):
            raise ValueError(f"expected a mapping, got {type(data).__name__}")
        run = decode(RunTarget, data.get("run"))
        if (run.recipe is None) == (run.entry is None):
            raise ValueError("run must name a recipe or an entry: the model of a script or command is not known")
        train = dict(data.get("train") or {})
        parallel = {key: value for key, value in dict(data.get("parallel") or {}).items() if key in _REQUEST_KEYS}
        request = decode(ParallelRequest, parallel)
        known = {key: train[key] for key in ("batch_size", "optimizer", "momentum") if key in train}
        settings = decode(TrainSettings, known)
    except (TypeError, ValueError) as error:
        raise PlanError(
            [PlanProblem(key="file", message=f"cannot be read: {error}.", fix="Give a plan file or a job file.")]
        ) from error
    if settings.batch_size < 1:
        message = f"is {settings.batch_size}."
        raise PlanError([PlanProblem(key="train.batch_size", message=message, fix="Use a whole number from 1.")])
    plan = None
    if "resume_from" in data:  # a plan file, in which nothing is left open: the axes are not wishes
        plan = decode(ParallelPlan, data["parallel"])
        request = wish_of(plan)
    return PlannedFile(
        run=run,
        parallel=request,
        batch_size=settings.batch_size,
        optimizer=OptimizerKind(name=settings.optimizer, momentum=settings.momentum),
        layout=_layout_of(data) if plan is None else RankLayout(ranks_per_node=max(1, plan.world_size)),
        plan=plan,
    )


def _layout_of(data: Mapping[str, Any]) -> RankLayout:
    resources = data.get("resources")
    asked = resources if isinstance(resources, Mapping) else {}
    nodes, per_node, total = (asked.get(name) for name in ("nodes", "gpus_per_node", "gpus"))
    total = total.get("max") if isinstance(total, Mapping) else total
    num_nodes = nodes if isinstance(nodes, int) and nodes > 0 else 1
    shared = total // num_nodes if isinstance(total, int) else 1
    ranks = data.get("processes_per_node", per_node if isinstance(per_node, int) else shared)
    return RankLayout(num_nodes=num_nodes, ranks_per_node=max(1, ranks) if isinstance(ranks, int) else 1)


def parse_bytes(text: str) -> int:
    """`80GB` (10^9), `24GiB` (2^30) or a plain number of bytes. Raises PlanError."""
    word = text.strip().lower()
    number = word.rstrip("kmgtib ")
    unit = word[len(number) :].strip() or "b"
    try:
        size = float(number) * _SIZES[unit]
        if not 0 < size < 2**60:
            raise ValueError
    except (KeyError, ValueError):
        fix = "Write a number and GB or GiB: 80GB."
        raise PlanError([PlanProblem(key="memory", message=f"is {text!r:.40}.", fix=fix)]) from None
    return int(size)


def _request_of(plan: ParallelPlan) -> ParallelRequest:
    """The request that makes `plan` again on its own number of ranks."""
    numbers = {name: getattr(plan, name) for name in (*AXES, *(PIPELINE_KEYS if plan.pp > 1 else ()))}
    return wish_of(plan) if plan.world_size == 1 else replace(wish_of(plan), **numbers)


def wish_of(plan: ParallelPlan) -> ParallelRequest:
    """The request that the plan came from, for another number of ranks."""
    return ParallelRequest(
        strategy=plan.strategy,
        activation_checkpointing=plan.activation_checkpointing,
        precision=plan.precision,
        grad_accum_steps=plan.grad_accum_steps,
        compile=plan.compile,
        find_unused_parameters=plan.find_unused_parameters,
        sync_batch_norm=plan.sync_batch_norm,
    )
