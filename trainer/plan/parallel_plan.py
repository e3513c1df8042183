"""How a model is spread over ranks: the one `ParallelPlan`, and the presets that users name. Pure.

`resolve_parallel` turns what a job file says into the plan for its world size, or says all that is wrong. Axes that no
code runs yet are refused by name, never ignored. Not for: applying a plan (`trainer.parallel`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from trainer.plan.problem import PlanError, PlanProblem

STRATEGIES: Final = ("single", "ddp", "fsdp", "hsdp", "model", "tensor", "pipeline", "auto")
RUNNABLE_STRATEGIES: Final = ("single", "ddp")
"""The presets that the trainer can run so far."""
ALIASES: Final = {"dp": "ddp"}
PRECISIONS: Final = ("fp32", "bf16")
ACTIVATION_CHECKPOINTING: Final = ("none", "selective", "full")


@dataclass(frozen=True, kw_only=True)
class ParallelRequest:
    """What a job file says under `parallel`, as it was said. None: left to Gangline."""

    strategy: str | None = None
    precision: str = "fp32"
    grad_accum_steps: int = 1
    compile: bool = False
    find_unused_parameters: bool = False
    sync_batch_norm: bool = True


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """One layout of ranks, outermost axis first: pp × dp_replicate × dp_shard × tp ranks."""

    strategy: str = "single"
    """The preset that it was made from."""
    pp: int = 1
    """Pipeline stages over ranks."""
    dp_replicate: int = 1
    """Copies of the model, each fed with other samples (DDP)."""
    dp_shard: int = 1
    """Ranks that share one copy of parameters, gradients and optimizer state (FSDP)."""
    tp: int = 1
    """Ranks that split each layer (tensor parallelism)."""
    schedule: str = "1F1B"
    """Pipeline schedule, by the name torch has for it."""
    stages_per_rank: int = 1
    micro_batches: int = 1
    """Parts of a batch that travel through a pipeline one after another."""
    grad_accum_steps: int = 1
    """Micro-batches whose gradients are summed before one optimizer update."""
    precision: str = "fp32"
    """`fp32`, or `bf16`: autocast, with parameters and reductions in fp32."""
    activation_checkpointing: str = "none"
    compile: bool = False
    """torch.compile each rank's model; the first step then takes minutes."""
    find_unused_parameters: bool = False
    """Let DDP look for parameters without gradient in each step, for models that use some only at times."""
    sync_batch_norm: bool = True
    """BatchNorm takes its statistics over all ranks, as one process would."""

    @property
    def world_size(self) -> int:
        """Ranks of the layout."""
        return self.pp * self.dp_replicate * self.dp_shard * self.tp

    @property
    def data_parallel_size(self) -> int:
        """Ranks (or groups of ranks) that get different samples."""
        return self.dp_replicate * self.dp_shard


@dataclass(frozen=True, kw_only=True)
class ResolvedParallel:
    """A plan that can run, with what the user should know about how it was chosen."""

    plan: ParallelPlan
    notes: tuple[str, ...] = ()


def resolve_parallel(request: ParallelRequest, world_size: int) -> ResolvedParallel:
    """The plan for `world_size` ranks. Raises PlanError with every problem."""
    notes: list[str] = []
    strategy = request.strategy
    if strategy in ALIASES:
        notes.append(
            f"parallel.strategy {strategy} is taken as {ALIASES[strategy]}: one process per GPU, which PyTorch "
            "recommends over torch.nn.DataParallel even on one machine."
        )
        strategy = ALIASES[strategy]
    if strategy is None:
        strategy = "single" if world_size == 1 else "ddp"
    problems = [*_request_problems(request), *_strategy_problems(strategy, world_size)]
    if problems:
        raise PlanError(problems)
    if strategy == "ddp" and world_size == 1:
        notes.append("parallel.strategy ddp on one rank runs as single: there is nobody to exchange gradients with.")
    plan = ParallelPlan(
        strategy=strategy,
        dp_replicate=world_size,
        grad_accum_steps=request.grad_accum_steps,
        precision=request.precision,
        compile=request.compile,
        find_unused_parameters=request.find_unused_parameters,
        sync_batch_norm=request.sync_batch_norm,
    )
    return ResolvedParallel(plan=plan, notes=tuple(notes))


def check_parallel_plan(plan: ParallelPlan, world_size: int) -> None:
    """Raise PlanError unless this code can run `plan` on `world_size` ranks. For plan files written by hand."""
    problems = [problem for rule in _PLAN_RULES for problem in rule(plan, world_size)]
    if problems:
        raise PlanError(problems)


def _request_problems(request: ParallelRequest) -> Iterator[PlanProblem]:
    if request.precision not in PRECISIONS:
        yield _choice("parallel.precision", request.precision, PRECISIONS)
    if request.grad_accum_steps < 1:
        yield _at_least_one("parallel.grad_accum_steps", request.grad_accum_steps)


def _strategy_problems(strategy: str, world_size: int) -> Iterator[PlanProblem]:
    if strategy not in STRATEGIES:
        yield _choice("parallel.strategy", strategy, STRATEGIES)
    elif strategy not in RUNNABLE_STRATEGIES:
        yield PlanProblem(
            key="parallel.strategy",
            message=f"{strategy} is not run by this version of Gangline.",
            fix=f"Use one of: {', '.join(RUNNABLE_STRATEGIES)}.",
        )
    elif strategy == "single" and world_size != 1:
        yield PlanProblem(
            key="parallel.strategy",
            message=f"single runs on one rank, but the job's resources make {world_size}.",
            fix="Ask for one GPU, or use parallel.strategy: ddp.",
        )


def _axis_rule(plan: ParallelPlan, world_size: int) -> Iterator[PlanProblem]:
    for axis in ("pp", "dp_replicate", "dp_shard", "tp", "stages_per_rank", "micro_batches", "grad_accum_steps"):
        value = getattr(plan, axis)
        if value < 1:
            yield _at_least_one(f"parallel.{axis}", value)
        elif axis in _AXES_TO_COME and value > 1:
            yield PlanProblem(
                key=f"parallel.{axis}",
                message=f"is {value}, but no code of this version runs {_AXES_TO_COME[axis]}.",
                fix="Set it to 1; dp_replicate (ddp) is the axis that runs.",
            )


_AXES_TO_COME: Final = {
    "pp": "pipeline or model parallelism",
    "dp_shard": "sharded data parallelism (fsdp)",
    "tp": "tensor parallelism",
    "stages_per_rank": "several pipeline stages on a rank",
    "micro_batches": "pipeline micro-batches (gradient accumulation is parallel.grad_accum_steps)",
}


def _world_rule(plan: ParallelPlan, world_size: int) -> Iterator[PlanProblem]:
    if plan.world_size != world_size:
        yield PlanProblem(
            key="parallel",
            message=(
                f"makes pp {plan.pp} × dp_replicate {plan.dp_replicate} × dp_shard {plan.dp_shard} × tp {plan.tp} = "
                f"{plan.world_size} ranks, but {world_size} were started."
            ),
            fix=f"Make the product {world_size}, or start {plan.world_size} ranks.",
        )


def _words_rule(plan: ParallelPlan, world_size: int) -> Iterator[PlanProblem]:
    yield from _strategy_problems(plan.strategy, world_size)
    if plan.precision not in PRECISIONS:
        yield _choice("parallel.precision", plan.precision, PRECISIONS)
    if plan.activation_checkpointing not in ACTIVATION_CHECKPOINTING:
        yield _choice("parallel.activation_checkpointing", plan.activation_checkpointing, ACTIVATION_CHECKPOINTING)
    elif plan.activation_checkpointing != "none":
        yield PlanProblem(
            key="parallel.activation_checkpointing",
            message=f"{plan.activation_checkpointing} is not run by this version of Gangline.",
            fix="Use none.",
        )


_PLAN_RULES: Final[tuple[Callable[[ParallelPlan, int], Iterator[PlanProblem]], ...]] = (
    _axis_rule,
    _world_rule,
    _words_rule,
)


def _choice(key: str, value: str, choices: tuple[str, ...]) -> PlanProblem:
    return PlanProblem(key=key, message=f"cannot be {value!r}.", fix=f"Use one of: {', '.join(choices)}.")


def _at_least_one(key: str, value: int) -> PlanProblem:
    return PlanProblem(key=key, message=f"is {value}.", fix="Use a whole number from 1.")
