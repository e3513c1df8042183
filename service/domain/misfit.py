"""Why no set of the pool's nodes could ever hold a job, with the largest that would fit and what to change. Pure.

Not for: finding the gang of a job that fits (`service.domain.spec`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from service.domain.node_shapes import NodeShape, gpu_type_matches, has_labels, usable_shapes

if TYPE_CHECKING:
    from service.domain.spec import ResourceSpec

MAX_VALUES_NAMED: Final = 10


@dataclass(frozen=True, kw_only=True)
class DoesNotFit:
    """No set of the pool's nodes could ever hold the job, even if all were idle."""

    message: str
    fix: str


def literal_layout(asked: ResourceSpec) -> tuple[int, int]:
    """(nodes, GPUs on each) from the numbers alone."""
    total, num_nodes, gpus = asked.total_gpus, asked.num_nodes, asked.gpus_per_node
    if gpus is None:
        num_nodes = num_nodes or 1
        return num_nodes, 1 if total is None else total // num_nodes
    if num_nodes is None:
        num_nodes = 1 if total is None or gpus == 0 else total // gpus
    return num_nodes, gpus


def nodes_fitting(shapes: Sequence[NodeShape], asked: ResourceSpec, gpus: int) -> list[NodeShape]:
    return [
        shape
        for shape in shapes
        if shape.num_gpus >= gpus
        and (gpus == 0 or gpu_type_matches(asked.gpu_type, shape.gpu_types))
        and shape.cpus >= (asked.cpus_per_node or 0)
        and shape.memory_bytes >= (asked.memory_bytes_per_node or 0)
    ]


def explain_misfit(asked: ResourceSpec, shapes: Sequence[NodeShape]) -> DoesNotFit:
    """What was asked, the largest that would fit, and what to change. The first limit in the way is the one named."""
    num_nodes, gpus = literal_layout(asked)
    is_total_only = bool(asked.total_gpus) and asked.num_nodes is None and asked.gpus_per_node is None
    request = f"The job asks for {_describe(asked, num_nodes, gpus, is_total_only=is_total_only)}."
    if (unlabelled := _explain_labels(asked.labels, shapes, request)) is not None:
        return unlabelled
    least = asked.gpu_memory_bytes if gpus else None
    if (too_small := _explain_gpu_memory(least, shapes, asked, request)) is not None:
        return too_small
    is_choosy = bool(asked.labels or asked.gpu_type or least)
    shapes = [shape for shape in usable_shapes(shapes, asked.labels, least) if shape.num_gpus or least is None]
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
            message=f"{request} The pool has {_count(len(typed), 'such node' if is_choosy else 'node')}.",
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


def _explain_labels(labels: Mapping[str, str], shapes: Sequence[NodeShape], request: str) -> DoesNotFit | None:
    """That no node has the labels asked for, and what the nodes have of them."""
    if any(has_labels(shape, labels) for shape in shapes):
        return None
    for label, value in labels.items():
        values = sorted({shape.labels[label] for shape in shapes if label in shape.labels})
        if value not in values:
            has = f"its values here are {', '.join(values[:MAX_VALUES_NAMED])}" if values else "no node has that label"
            return DoesNotFit(
                message=f"{request} No node has the label {_labels({label: value})}: {has}.",
                fix=f"Correct resources.labels.{label} or leave it out; gang node ls shows the labels.",
            )
    return DoesNotFit(
        message=f"{request} Nodes have each of these labels, but no node has all of them.",
        fix="Ask for fewer resources.labels; gang node ls shows which node has which.",
    )


def _explain_gpu_memory(
    least: int | None, shapes: Sequence[NodeShape], asked: ResourceSpec, request: str
) -> DoesNotFit | None:
    """That no GPU of the nodes that could be taken has so much memory."""
    labelled = usable_shapes(shapes, asked.labels, None)
    typed = [shape for shape in labelled if gpu_type_matches(asked.gpu_type, shape.gpu_types)]
    sizes = [size for shape in typed for size in shape.gpu_memories]
    if least is None or not typed or any(size >= least for size in sizes):
        return None
    if not any(sizes):
        return DoesNotFit(
            message=f"{request} No such GPU of the pool says how much memory it has; CPU slots have none.",
            fix="Leave resources.gpu_memory out, and say resources.memory for the memory of the node.",
        )
    return DoesNotFit(
        message=f"{request} The largest such GPU of the pool has {_size(max(sizes))}.",
        fix=f"Set resources.gpu_memory to at most {_size(max(sizes))}.",
    )


def _explain_total(asked: ResourceSpec, typed: Sequence[NodeShape], request: str) -> DoesNotFit:
    able = nodes_fitting(typed, asked, 0)
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
    if asked.gpu_memory_bytes is not None and gpus:
        of_type += f" of at least {_size(asked.gpu_memory_bytes)}"
    if is_total_only:
        number = _plain_range(asked)
        parts = [f"{number} GPU{'' if number == '1' else 's'}{of_type}"]
    else:
        each = " each" if num_nodes > 1 else ""
        parts = [f"{_count(num_nodes, 'node')} with {_count(gpus, 'GPU')}{of_type}{each}"]
    if asked.cpus_per_node is not None:
        parts.append(f"{_plain(asked.cpus_per_node)} CPUs on each node")
    if asked.labels:
        parts[0] += f" on nodes labelled {_labels(asked.labels)}"
    if asked.memory_bytes_per_node is not None:
        parts.append(f"{_size(asked.memory_bytes_per_node)} of memory on each node")
    return " and ".join(parts)


def _labels(labels: Mapping[str, str]) -> str:
    return ", ".join(f"{label}={value}" for label, value in labels.items())


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
