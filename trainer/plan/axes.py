"""What a job says about splitting a model, and the plan that comes of it, as data: axes of ranks, schedule, words.

Not for: what goes together (`trainer.plan.parallel_plan`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

STRATEGIES: Final = ("single", "ddp", "fsdp", "hsdp", "model", "tensor", "pipeline", "auto")
ALIASES: Final = {"dp": "ddp"}
PRECISIONS: Final = ("fp32", "bf16")
ACTIVATION_CHECKPOINTING: Final = ("none", "selective", "full")
AXES: Final = ("pp", "dp_replicate", "dp_shard", "tp")
"""Outermost first: rank = ((pp_rank × dp_replicate + replica) × dp_shard + shard) × tp + tp_rank."""
STRATEGY_AXES: Final[Mapping[str, tuple[str, ...]]] = {
    "ddp": ("dp_replicate",),
    "fsdp": ("dp_shard",),
    "hsdp": ("dp_replicate", "dp_shard"),
    "model": ("pp",),
    "pipeline": ("pp",),
    "tensor": ("tp",),
}
"""The axes without which a strategy is not what its name says."""


@dataclass(frozen=True, kw_only=True)
class RankLayout:
    """Where the ranks of an attempt lie: as many on each node, those of a node one after another."""

    num_nodes: int = 1
    ranks_per_node: int = 1

    @property
    def world_size(self) -> int:
        """Ranks in all."""
        return self.num_nodes * self.ranks_per_node


@dataclass(frozen=True, kw_only=True)
class ParallelRequest:
    """What a job file says under `parallel`, as it was said. None: left to Gangline."""

    strategy: str | None = None
    pp: int | None = None
    dp_replicate: int | None = None
    dp_shard: int | None = None
    tp: int | None = None
    schedule: str | None = None
    stages_per_rank: int | None = None
    micro_batches: int | None = None
    cut_points: tuple[int, ...] | None = None
    activation_checkpointing: str = "none"
    precision: str = "fp32"
    grad_accum_steps: int = 1
    compile: bool = False
    find_unused_parameters: bool = False
    sync_batch_norm: bool = True


@dataclass(frozen=True, kw_only=True)
class ParallelPlan:
    """One layout of ranks, outermost axis first: pp × dp_replicate × dp_shard × tp ranks."""

    strategy: str = "single"
    """The preset that it was made from. `auto`: all axes are 1, and the ranks choose the plan when they start."""
    pp: int = 1
    """Ranks that a pipeline has one after another."""
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
    cut_points: tuple[int, ...] | None = None
    """Index of the first layer of each stage but the first; None: the layers are split by their cost."""
    grad_accum_steps: int = 1
    """Micro-batches whose gradients are summed before one optimizer update. In a pipeline: runs of the schedule."""
    precision: str = "fp32"
    """`fp32`, or `bf16`: autocast, with parameters and reductions in fp32."""
    activation_checkpointing: str = "none"
    """What forward keeps: everything, what selective checkpointing keeps, or (`full`) only each layer's input."""
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

    @property
    def num_stages(self) -> int:
        """Stages of the pipeline, over all its ranks."""
        return self.pp * self.stages_per_rank


@dataclass(frozen=True, kw_only=True)
class ResolvedParallel:
    """A plan that can run, with what the user should know about how it was chosen."""

    plan: ParallelPlan
    notes: tuple[str, ...] = ()
