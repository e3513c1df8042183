"""What a job asks for, as stored: the immutable `JobSpec`, and its gang once resolved against the nodes of the pool.

Pure data and pure functions. Not for: reading what users submit and saying what is wrong with it (`service.schemas`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, Final

from gangline.protocol.launch import decode
from service.domain.gang_layout import GangLayout, equal_shares, most_compact
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
    cpus_per_node: float | None = None
    memory_bytes_per_node: int | None = None
    time_limit_seconds: float | None = None


@dataclass(frozen=True, kw_only=True)
class RetrySpec:
    """When a failed attempt is followed by another one at the user's expense."""

    max_retries: int = 0
    outcomes: tuple[str, ...] = ()
    exit_codes: tuple[int, ...] = ()


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
class NodeShape:
    """What a node has in all, whoever uses it now."""

    name: str
    num_gpus: int
    gpu_types: frozenset[str]
    """Models as the node reports them, such as `NVIDIA H100 80GB HBM3`."""
    gpu_memory_bytes: int | None = None
    """Of its smallest GPU; None: it has CPU slots, or does not say."""
    cpus: float
    memory_bytes: int


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


@dataclass(frozen=True, kw_only=True)
class DoesNotFit:
    """No set of the pool's nodes could ever hold the job, even if all were idle."""

    message: str
    fix: str


def gpu_type_matches(asked: str | None, gpu_types: frozenset[str]) -> bool:
    """Whether a node with `gpu_types` has the type asked for (None: any).

    Compared by whole words without regard to case: `A100` is in `NVIDIA A100-SXM4-80GB`, `A10` is not.
    """
    if asked is None:
        return True
    words = _words(asked)
    return any(words in _words(gpu_type) for gpu_type in gpu_types)


def least_gpu_memory(asked: str | None, shapes: Sequence[NodeShape]) -> int | None:
    """Memory of the smallest GPU that a job for GPUs of type `asked` may get; None: not known of all of them."""
    able = [shape.gpu_memory_bytes for shape in shapes if shape.num_gpus and gpu_type_matches(asked, shape.gpu_types)]
    known = [one for one in able if one is not None]
    return min(known) if known and len(known) == len(able) else None


def _words(text: str) -> str:
    return " " + " ".join(re.findall(r"\w+", text.casefold())) + " "


def resolve_gang(spec: JobSpec, node_shapes: Sequence[NodeShape]) -> ResolvedGang | DoesNotFit:
    """The gang of a job in a pool of these nodes.

    Nothing said: one node with one GPU. Only `gpus: N`: the fewest nodes of equal share that the pool allows; of a
    range, every layout of every size that it allows. A pool without any node resolves to the literal numbers, so that
    jobs may be submitted before nodes join.
    """
    asked = spec.resources
    if asked.min_gpus is not None:
        return gang_of(spec, most_compact(_elastic_layouts(spec, node_shapes))) or _explain_misfit(asked, node_shapes)
    if not node_shapes:
        num_nodes, gpus = _literal_layout(asked)
        return _gang(spec, num_nodes, gpus, cpus_available=None)
    layouts = _possible_layouts(asked, len(node_shapes))
    for num_nodes, gpus in layouts:
        fitting = _fitting(node_shapes, asked, gpus)
        if len(fitting) >= num_nodes:
            # Taken from the nodes with most CPUs, the share that all of them can give.
            cpus_available = sorted((shape.cpus for shape in fitting), reverse=True)[num_nodes - 1]
            return _gang(spec, num_nodes, gpus, cpus_available=cpus_available)
    return _explain_misfit(asked, node_shapes)


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
        share: sorted((shape.cpus for shape in _fitting(shapes, asked, share)), reverse=True)
        for share in range(1, largest_share + 1)
    }
    return [
        _layout(spec, num_nodes, share, cpus_available=cpus[share][num_nodes - 1])
        for num_nodes, share in equal_shares(least, most, largest_share, len(shapes))
        if num_nodes <= len(cpus[share])
    ]


def _literal_layout(asked: ResourceSpec) -> tuple[int, int]:
    """(nodes, GPUs on each) from the numbers alone."""
    total, num_nodes, gpus = asked.total_gpus, asked.num_nodes, asked.gpus_per_node
    if gpus is None:
        num_nodes = num_nodes or 1
        return num_nodes, 1 if total is None else total // num_nodes
    if num_nodes is None:
        num_nodes = 1 if total is None or gpus == 0 else total // gpus
    return num_nodes, gpus


def _possible_layouts(asked: ResourceSpec, num_shapes: int) -> list[tuple[int, int]]:
    total = asked.total_gpus
    if total and asked.num_nodes is None and asked.gpus_per_node is None:
        return [(n, total // n) for n in range(1, min(total, num_shapes) + 1) if total % n == 0]
    return [_literal_layout(asked)]


def _fitting(shapes: Sequence[NodeShape], asked: ResourceSpec, gpus: int) -> list[NodeShape]:
    return [
        shape
        for shape in shapes
        if shape.num_gpus >= gpus
        and (gpus == 0 or gpu_type_matches(asked.gpu_type, shape.gpu_types))
        and shape.cpus >= (asked.cpus_per_node or 0)
        and shape.memory_bytes >= (asked.memory_bytes_per_node or 0)
    ]


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


# --- Why it does not fit -------------------------------------------------------------------------------------------


def _explain_misfit(asked: ResourceSpec, shapes: Sequence[NodeShape]) -> DoesNotFit:
    """What was asked, the largest that would fit, and what to change. The first limit in the way is the one named."""
    num_nodes, gpus = _literal_layout(asked)
    is_total_only = bool(asked.total_gpus) and asked.num_nodes is None and asked.gpus_per_node is None
    request = f"The job asks for {_describe(asked, num_nodes, gpus, is_total_only=is_total_only)}."
    typed = [shape for shape in shapes if gpu_type_matches(asked.gpu_type, shape.gpu_types)] if gpus else list(shapes)
    if not typed:
        types = ", ".join(sorted({gpu_type for shape in shapes for gpu_type in shape.gpu_types})) or "no GPU at all"
        return DoesNotFit(
            message=f"{request} No node has a GPU of type {asked.gpu_type}; the pool has {types}.",
            fix="Set resources.gpu to a type that the pool has, or leave it out.",
        )
    if is_total_only:
        return _explain_total(asked, typed, request)
    if num_nodes > len(typed):
        return DoesNotFit(
            message=f"{request} The pool has {_count(len(typed), 'such node' if asked.gpu_type else 'node')}.",
            fix=f"Set resources.nodes to at most {len(typed)}.",
        )
    for name, wanted, of_shape, shown in (
        ("gpus_per_node", gpus, _gpus_of, _plain),
        ("cpus", asked.cpus_per_node or 0, _cpus_of, _plain),
        ("memory", asked.memory_bytes_per_node or 0, _memory_of, _size),
    ):
        most = sorted((of_shape(shape) for shape in typed), reverse=True)[num_nodes - 1]
        if most < wanted:
            has = f"{_count(num_nodes, 'node')} of the pool can give at most {shown(most)} each"
            fix = f"Set resources.{name} to at most {shown(most)}{_fewer_nodes(typed, of_shape, wanted)}."
            if name == "gpus_per_node" and asked.gpus_per_node is None:
                fix = f"Set resources.gpus to at most {shown(most * num_nodes)}."
            return DoesNotFit(message=f"{request} Of resources.{name}, {has}.", fix=fix)
        typed = [shape for shape in typed if of_shape(shape) >= wanted]
    raise AssertionError("a job that does not fit has a limit in the way")


def _explain_total(asked: ResourceSpec, typed: Sequence[NodeShape], request: str) -> DoesNotFit:
    able = _fitting(typed, asked, 0)
    if not able:
        cpus, memory = max(map(_cpus_of, typed)), max(map(_memory_of, typed))
        return DoesNotFit(
            message=f"{request} The largest node has {_plain(cpus)} CPUs, the largest memory is {_size(memory)}.",
            fix=f"Set resources.cpus to at most {_plain(cpus)} and resources.memory to at most {_size(memory)}.",
        )
    gpus_by_node = sorted((shape.num_gpus for shape in able), reverse=True)
    most, nodes = max((gpus * n, -n) for n, gpus in enumerate(gpus_by_node, start=1))
    layout = f"{_count(-nodes, 'node')} × {most // -nodes}"
    least = asked.total_gpus if asked.min_gpus is None else asked.min_gpus
    uneven = "" if (least or 0) > most else f", and {_plain_range(asked)} cannot be split evenly over them"
    return DoesNotFit(
        message=f"{request} The most that nodes can give in equal shares is {_count(most, 'GPU')} ({layout}){uneven}.",
        fix=_total_fix(asked, most),
    )


def _total_fix(asked: ResourceSpec, most: int) -> str:
    if asked.min_gpus is None or most == 0:
        return f"Set resources.gpus to {most}, or to a smaller number that splits evenly."
    if asked.min_gpus > most:
        return f"Set resources.gpus.min to at most {most}."
    return f"Set resources.gpus.max to at least {most}."


def _plain_range(asked: ResourceSpec) -> str:
    if asked.min_gpus in (None, asked.total_gpus):
        return str(asked.total_gpus)
    return f"{asked.min_gpus} to {asked.total_gpus}"


def _fewer_nodes(shapes: Sequence[NodeShape], of_shape: Any, wanted: float) -> str:
    able = sum(1 for shape in shapes if of_shape(shape) >= wanted)
    return f", or resources.nodes to at most {able}" if able else ""


def _describe(asked: ResourceSpec, num_nodes: int, gpus: int, *, is_total_only: bool) -> str:
    of_type = f" of type {asked.gpu_type}" if asked.gpu_type and gpus else ""
    if is_total_only:
        number = _plain_range(asked)
        parts = [f"{number} GPU{'' if number == '1' else 's'}{of_type}"]
    else:
        each = " each" if num_nodes > 1 else ""
        parts = [f"{_count(num_nodes, 'node')} with {_count(gpus, 'GPU')}{of_type}{each}"]
    if asked.cpus_per_node is not None:
        parts.append(f"{_plain(asked.cpus_per_node)} CPUs on each node")
    if asked.memory_bytes_per_node is not None:
        parts.append(f"{_size(asked.memory_bytes_per_node)} of memory on each node")
    return " and ".join(parts)


def _gpus_of(shape: NodeShape) -> float:
    return shape.num_gpus


def _cpus_of(shape: NodeShape) -> float:
    return shape.cpus


def _memory_of(shape: NodeShape) -> float:
    return shape.memory_bytes


def _plain(number: float) -> str:
    return f"{number:g}" if number < 1e6 else f"{number:.0f}"


def _size(num_bytes: float) -> str:
    for unit, size in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= size:
            # Rounded down, so that the size shown is one that fits.
            return f"{int(num_bytes * 10 // size) / 10:g}{unit}"
    return f"{num_bytes:.0f}"


def _count(number: int, word: str) -> str:
    return f"{number} {word}{'' if number == 1 else 's'}"
