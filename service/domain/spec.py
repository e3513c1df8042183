"""What a job asks for, as stored: the immutable `JobSpec`, and its gang once resolved against the nodes of the pool.

Pure data and pure functions. Not for: reading what users submit and saying what is wrong with it (`service.schemas`).
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from enum import StrEnum
from typing import Any, Final

from gangline.protocol.launch import decode
from service.domain.gang_layout import GangLayout, equal_shares, most_compact
from service.domain.misfit import DoesNotFit, explain_misfit, literal_layout, nodes_fitting
from service.domain.node_shapes import NodeShape, usable_shapes
from service.domain.node_shapes import gpu_type_matches as gpu_type_matches
from trainer.plan.training_plan import TrainingSpec

ANY_GPU: Final = "any"
DEFAULT_STOP_GRACE_SECONDS: Final = 30.0
_CANONICAL: Final = json.JSONEncoder(
    sort_keys=True, separators=(",", ":"), ensure_ascii=False, allow_nan=False, check_circular=False, default=vars
)


@dataclass(frozen=True, kw_only=True)
class CodeSpec:
    """Where the code is. Both None: the job brings no code."""

    bundle: str | None = None
    """`sha256:<hex>`."""
    path: str | None = None
    """Absolute folder on the nodes."""


@dataclass(frozen=True, kw_only=True)
class RunSpec:
    """What is run."""

    kind: str
    """`script`, `command`, `recipe` or `entry`; of the last two `JobSpec.training` says the rest."""
    script: str | None = None
    args: tuple[str, ...] = ()
    command: tuple[str, ...] | None = None
    """Argument list, passed exactly."""
    shell: str | None = None
    """String form of `command`: one shell script, run inside the job only."""


@dataclass(frozen=True, kw_only=True)
class ResourceSpec:
    """What was asked for, as it was asked; None: not said. Resolved by `resolve_gang`."""

    num_nodes: int | None = None
    gpus_per_node: int | None = None
    total_gpus: int | None = None
    """With `min_gpus`: the most that it can use."""
    min_gpus: int | None = None
    """The least that it runs on, of a job that runs on whatever number is free; None: on one number only."""
    gpu_type: str | None = None
    gpu_memory_bytes: int | None = None
    """Least memory of each GPU."""
    labels: dict[str, str] = field(default_factory=dict)
    """That each of its nodes must have, with these values."""
    exclusive: bool = False
    """Whole nodes to itself, however few of their GPUs it uses."""
    cpus_per_node: float | None = None
    memory_bytes_per_node: int | None = None
    time_limit_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class RetrySpec:
    """When a failed attempt is followed by another one at the user's expense."""

    max_retries: int = 0
    outcomes: tuple[str, ...] = ()
    exit_codes: tuple[int, ...] = ()


class Condition(StrEnum):
    """How a job that another one needs must have ended."""

    OK = "ok"
    ANY = "any"
    NOT_OK = "not_ok"


@dataclass(frozen=True, kw_only=True)
class Dependency:
    """A job that must have ended before this one starts."""

    job: int
    condition: Condition = Condition.OK


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """A job as its owner wants it. Never changed after submission: every attempt runs the same bytes of `to_json`."""

    name: str
    team: str | None = None
    private: bool = False
    code: CodeSpec = field(default_factory=CodeSpec)
    python: str | None = None
    run: RunSpec
    training: TrainingSpec | None = None
    """Of a recipe or entry: what is trained and how. None for scripts and commands."""
    resources: ResourceSpec = field(default_factory=ResourceSpec)
    processes_per_node: int | None = None
    env: dict[str, str] = field(default_factory=dict)
    retry: RetrySpec = field(default_factory=RetrySpec)
    preemptible: bool = False
    on_disconnect: str = "continue"
    """`continue` or `stop`."""
    stop_grace_seconds: float = DEFAULT_STOP_GRACE_SECONDS
    tags: dict[str, str] = field(default_factory=dict)
    priority: int = 0
    on_time_limit: str = "fail"
    """`fail` or `requeue`."""
    hold: bool = False
    start_after: str | None = None
    """ISO time with the offset that it has in `zone`."""
    zone: str | None = None
    """Zone to show `start_after` in: a name, or an offset such as `+01:00`."""
    after: tuple[Dependency, ...] = ()

    @property
    def starts_after(self) -> float | None:
        """`start_after` in epoch seconds."""
        return None if self.start_after is None else datetime.fromisoformat(self.start_after).timestamp()

    def to_json(self) -> str:
        """Canonical JSON: the same spec is the same text. To be stored as text, not in a type that reformats it."""
        return _CANONICAL.encode(self)

    @classmethod
    def from_json(cls, text: str) -> JobSpec:
        """The spec that `to_json` wrote; keys added since then take their defaults. ValueError for anything else."""
        try:
            data: dict[str, Any] = json.loads(text)
            run: dict[str, Any] = data["run"]
            command = run.get("command")
            retry: dict[str, Any] = data.get("retry", {})
            training = data.get("training")
            parts: dict[str, Any] = {
                "code": CodeSpec(**data.get("code", {})),
                "run": RunSpec(
                    **{
                        **run,
                        "args": tuple(run.get("args", ())),
                        "command": None if command is None else tuple(command),
                    }
                ),
                "training": None if training is None else decode(TrainingSpec, training),
                "resources": ResourceSpec(**data.get("resources", {})),
                "after": tuple(
                    Dependency(job=one["job"], condition=Condition(one["condition"])) for one in data.get("after", ())
                ),
                "retry": RetrySpec(
                    **{
                        **retry,
                        "outcomes": tuple(retry.get("outcomes", ())),
                        "exit_codes": tuple(retry.get("exit_codes", ())),
                    }
                ),
            }
            return cls(**{**data, **parts})
        except (TypeError, KeyError, AttributeError) as error:
            raise ValueError(f"not a stored job spec ({error}): {text[:200]!r}") from error


# --- From what was asked to a gang ---------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class ResolvedGang:
    """The gang to place: the same share on each of `num_nodes` nodes. Of a job with a range of GPUs, the largest."""

    num_nodes: int
    gpus_per_node: int
    processes_per_node: int
    cpus_per_node: float
    memory_bytes_per_node: int
    """0: not asked for."""
    layouts: tuple[GangLayout, ...] = ()
    """Of a job with a range of GPUs: all that it may start on, the largest first. (): only the one above."""


def resolve_gang(spec: JobSpec, node_shapes: Sequence[NodeShape]) -> ResolvedGang | DoesNotFit:
    """The gang of a job in a pool of these nodes.

    Nothing said: one node with one GPU. Only `gpus: N`: the fewest nodes of equal share that the pool allows; of a
    range, every layout of every size that it allows. A pool without any node resolves to the literal numbers, so that
    jobs may be submitted before nodes join.
    """
    asked = spec.resources
    usable = usable_shapes(node_shapes, asked.labels, asked.gpu_memory_bytes)
    if not usable and node_shapes:
        return explain_misfit(asked, node_shapes)
    if asked.min_gpus is not None:
        return gang_of(spec, most_compact(_elastic_layouts(spec, usable))) or explain_misfit(asked, node_shapes)
    if not node_shapes:
        num_nodes, gpus = literal_layout(asked)
        return _gang(spec, num_nodes, gpus, cpus_available=None)
    layouts = _possible_layouts(asked, len(usable))
    for num_nodes, gpus in layouts:
        fitting = nodes_fitting(usable, asked, gpus)
        if len(fitting) >= num_nodes:
            # Taken from the nodes with most CPUs, the share that all of them can give.
            cpus_available = sorted((shape.cpus for shape in fitting), reverse=True)[num_nodes - 1]
            return _gang(spec, num_nodes, gpus, cpus_available=cpus_available)
    return explain_misfit(asked, node_shapes)


def gang_of(spec: JobSpec, layouts: Sequence[GangLayout]) -> ResolvedGang | None:
    """The gang of a job with a range of GPUs that may start on these, the largest first; None when there is none."""
    if not layouts:
        return None
    first = layouts[0]
    return ResolvedGang(
        num_nodes=first.num_nodes,
        gpus_per_node=first.gpus_per_node,
        processes_per_node=first.processes_per_node,
        cpus_per_node=first.cpus_per_node,
        memory_bytes_per_node=spec.resources.memory_bytes_per_node or 0,
        layouts=tuple(layouts),
    )


def _elastic_layouts(spec: JobSpec, shapes: Sequence[NodeShape]) -> list[GangLayout]:
    asked = spec.resources
    least, most = asked.min_gpus or 1, asked.total_gpus or 1
    if not shapes:
        return [_layout(spec, *numbers, cpus_available=None) for numbers in equal_shares(least, most, most, most)]
    largest_share = max(shape.num_gpus for shape in shapes)
    # CPUs of the nodes that can give a share of so many GPUs, the most first.
    cpus = {
        share: sorted((shape.cpus for shape in nodes_fitting(shapes, asked, share)), reverse=True)
        for share in range(1, largest_share + 1)
    }
    return [
        _layout(spec, num_nodes, share, cpus_available=cpus[share][num_nodes - 1])
        for num_nodes, share in equal_shares(least, most, largest_share, len(shapes))
        if num_nodes <= len(cpus[share])
    ]


def _possible_layouts(asked: ResourceSpec, num_shapes: int) -> list[tuple[int, int]]:
    total = asked.total_gpus
    if total and asked.num_nodes is None and asked.gpus_per_node is None:
        return [(n, total // n) for n in range(1, min(total, num_shapes) + 1) if total % n == 0]
    return [literal_layout(asked)]


def _gang(spec: JobSpec, num_nodes: int, gpus: int, *, cpus_available: float | None) -> ResolvedGang:
    layout = _layout(spec, num_nodes, gpus, cpus_available=cpus_available)
    return ResolvedGang(
        num_nodes=num_nodes,
        gpus_per_node=gpus,
        processes_per_node=layout.processes_per_node,
        cpus_per_node=layout.cpus_per_node,
        memory_bytes_per_node=spec.resources.memory_bytes_per_node or 0,
    )


def _layout(spec: JobSpec, num_nodes: int, gpus: int, *, cpus_available: float | None) -> GangLayout:
    cpus = spec.resources.cpus_per_node
    if cpus is None:
        cpus = float(max(1, gpus))
        cpus = cpus if cpus_available is None else min(cpus, cpus_available)
    # A command runs once per node and brings its own launcher.
    processes = 1 if spec.run.kind == "command" else (spec.processes_per_node or max(1, gpus))
    return GangLayout(num_nodes=num_nodes, gpus_per_node=gpus, processes_per_node=processes, cpus_per_node=cpus)
