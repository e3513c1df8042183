"""The parts of a job file that say how a recipe or entry trains: `train`, `parallel`, `checkpoint`.

Their words and bounds are those of `trainer.plan`, which the ranks obey. Not for: what the keys mean together
(`service.schemas.training_rules`).
"""

from __future__ import annotations

from typing import Annotated, Any, Final, Literal

from pydantic import Field

from service.schemas.wire_types import Duration, WireModel, list_of_at_most
from trainer.plan.parallel_plan import ACTIVATION_CHECKPOINTING, ALIASES, PRECISIONS, STRATEGIES, ParallelRequest
from trainer.plan.schedules import SCHEDULE_NAMES
from trainer.plan.training_plan import (
    OPTIMIZERS,
    SCHEDULES,
    CheckpointSettings,
    RunTarget,
    TrainingSpec,
    TrainSettings,
)

MAX_COUNT: Final = 10**12
"""Of steps, samples and the like: far beyond any training, and a number that every part can compute with."""
MAX_CUT_POINTS: Final = 1_000
_Strategy = Literal[(*STRATEGIES, *ALIASES)]  # type: ignore[valid-type]  # made from the plan's own words
_Precision = Literal[PRECISIONS]  # type: ignore[valid-type]
_PipelineSchedule = Literal[SCHEDULE_NAMES]  # type: ignore[valid-type]
_Checkpointing = Literal[ACTIVATION_CHECKPOINTING]  # type: ignore[valid-type]
_Optimizer = Literal[OPTIMIZERS]  # type: ignore[valid-type]
_Schedule = Literal[SCHEDULES]  # type: ignore[valid-type]
_FromOne = Annotated[int, Field(ge=1, le=MAX_COUNT)]
_FromZero = Annotated[int, Field(ge=0, le=MAX_COUNT)]
_Share = Annotated[float, Field(ge=0, le=1e9, allow_inf_nan=False)]
_Length = Annotated[Duration, Field(gt=0)]


class TrainWire(WireModel, title="Train"):
    """How long and how a recipe or entry is trained. A step is one update of the parameters."""

    steps: _FromOne | None = None
    """Steps in all. Give this or epochs."""
    epochs: _FromOne | None = None
    """Passes over the training data. Give this or steps."""
    batch_size: _FromOne | None = None
    """Samples of one step, over all ranks. Default: 32."""
    optimizer: _Optimizer | None = None
    """adamw (default) or sgd. A task of an entry may bring its own."""
    lr: _Share | None = None
    """Learning rate. Default: 0.001."""
    weight_decay: _Share | None = None
    """Applied to parameters of two and more dimensions. Default: 0."""
    momentum: _Share | None = None
    """Of sgd. Default: 0.9."""
    schedule: _Schedule | None = None
    """Of the learning rate after the warm-up: constant (default), linear or cosine."""
    warmup_steps: _FromZero | None = None
    """The learning rate rises linearly over these steps. Default: 0."""
    final_lr_ratio: _Share | None = None
    """Where linear and cosine end, as a part of lr. Default: 0."""
    clip_norm: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    """Largest norm of the gradient. Default: not clipped."""
    eval_every: _FromOne | None = None
    """Evaluate after each so many steps. Default: at the end only."""
    seed: Annotated[int, Field(ge=0, lt=2**63)] | None = None
    """Of weights, order of samples and dropout. Default: 0."""
    deterministic: bool | None = None
    """Only algorithms that give the same bits each time; slower."""
    data_workers: Annotated[int, Field(ge=0, le=1_024)] | None = None
    """Processes per rank that load samples. Default: 0, the rank itself."""
    report_every: _FromOne | None = None
    """Report after each so many steps. Default: about twice a second."""
    hang_after: _Length | None = None
    """A rank that moves on in nothing for this long counts as hung, such as 10m. Default: 5m."""


class ParallelWire(WireModel, title="Parallel"):
    """How a recipe or entry is split over GPUs."""

    strategy: _Strategy | None = None
    """single, ddp (also dp), fsdp, hsdp, model, tensor, pipeline or auto. Default: what the axes below say, else ddp on
    several ranks. Axes that are not given follow from it and from the GPUs."""
    pp: _FromOne | None = None
    """Ranks of a pipeline, each with a part of the layers."""
    dp_replicate: _FromOne | None = None
    """Copies of the model, each fed with other samples."""
    dp_shard: _FromOne | None = None
    """Ranks that share one copy of parameters, gradients and optimizer state."""
    tp: _FromOne | None = None
    """Ranks of a node that split each layer."""
    schedule: _PipelineSchedule | None = None
    """Of a pipeline, by torch's name. Default: 1F1B, or Interleaved1F1B with several stages on a rank."""
    stages_per_rank: _FromOne | None = None
    """Parts of the model on each rank of a pipeline. Default: 1, or what the schedule needs."""
    micro_batches: _FromOne | None = None
    """Parts of a batch that travel through a pipeline one after another. Default: 4 × pp, or what the batch allows."""
    cut_points: Annotated[list[_FromOne], list_of_at_most(MAX_CUT_POINTS)] | None = None
    """Number of the first layer of each stage of a pipeline but the first. Default: balanced by what layers cost."""
    activation_checkpointing: _Checkpointing | None = None
    """none (default), selective or full: less memory, more time."""
    precision: _Precision | None = None
    """fp32 (default), or bf16: autocast, with parameters in fp32."""
    grad_accum_steps: _FromOne | None = None
    """Parts of a batch whose gradients are summed before an update. Default: 1."""
    compile: bool | None = None
    """torch.compile the model; the first step then takes minutes."""
    find_unused_parameters: bool | None = None
    """For models that use some parameters only at times."""
    sync_batch_norm: bool | None = None
    """BatchNorm takes its statistics over all ranks. Default: true."""


class CheckpointWire(WireModel, title="Checkpoint"):
    """When checkpoints are written. One is always written when the job is asked to make room, and at the end."""

    every_steps: _FromOne | None = None
    """After each so many steps."""
    every: _Length | None = None
    """After each so much time, such as 30m; beside every_steps, whichever comes first. Default without it: 10m."""
    keep: _FromOne | None = None
    """Newest checkpoints that stay on disk. Default: 3."""
    is_async: Annotated[bool | None, Field(alias="async")] = None
    """Write in the background. Default: true."""


_OTHER_FIELDS: Final = {"hang_after": "hang_after_seconds", "every": "every_seconds"}
"""Keys with a unit of their own, and the fields that hold them in seconds."""


def training_of(
    run: RunTarget,
    train: TrainWire | None,
    parallel: ParallelWire | None,
    checkpoint: CheckpointWire | None,
    profile: dict[str, Any] | None = None,
) -> TrainingSpec:
    """What the parts of a job file mean; keys that are not given take the plan's defaults."""
    every = _given(checkpoint)
    if "every_steps" in every:
        every.setdefault("every_seconds", None)
    asked = _given(parallel)
    if "cut_points" in asked:
        asked["cut_points"] = tuple(asked["cut_points"])
    return TrainingSpec(
        run=run,
        train=TrainSettings(**_given(train)),
        parallel=ParallelRequest(**asked),
        checkpoint=CheckpointSettings(**every),
        profile=profile,
    )


def _given(part: WireModel | None) -> dict[str, Any]:
    """The fields that were given; null means not given."""
    values = {} if part is None else {name: getattr(part, name) for name in type(part).model_fields}
    return {_OTHER_FIELDS.get(name, name): value for name, value in values.items() if value is not None}
