"""What the pool's nodes have in all, whoever uses it now, and which of it a job could use. Pure."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace


@dataclass(frozen=True, kw_only=True)
class NodeShape:
    """What a node has in all, whoever uses it now."""

    name: str
    num_gpus: int
    gpu_types: frozenset[str]
    """Models as the node reports them, such as `NVIDIA H100 80GB HBM3`."""
    gpu_memory_bytes: int | None = None
    """Of its smallest GPU; None: it has CPU slots, or does not say."""
    gpu_memories: tuple[int, ...] = ()
    """Of each GPU that says it."""
    cpus: float
    memory_bytes: int
    labels: Mapping[str, str] = field(default_factory=dict)


def gpu_type_matches(asked: str | None, gpu_types: frozenset[str]) -> bool:
    """Whether a node with `gpu_types` has the type asked for (None: any).

    Compared by whole words without regard to case: `A100` is in `NVIDIA A100-SXM4-80GB`, `A10` is not.
    """
    if asked is None:
        return True
    words = _words(asked)
    return any(words in _words(gpu_type) for gpu_type in gpu_types)


def _words(text: str) -> str:
    return " " + " ".join(re.findall(r"\w+", text.casefold())) + " "


def least_gpu_memory(
    asked: str | None,
    shapes: Sequence[NodeShape],
    *,
    at_least: int | None = None,
    labels: Mapping[str, str] | None = None,
    share: int = 1,
) -> int | None:
    """Memory of the smallest GPU that a job for GPUs of type `asked` may get; None: not known of all of them.

    `at_least`: it gets none with less memory than this. `labels`: that its nodes have. `share`: the fewest GPUs that it
    takes of a node.
    """
    able = [
        shape
        for shape in shapes
        if shape.num_gpus >= max(1, share)
        and gpu_type_matches(asked, shape.gpu_types)
        and has_labels(shape, labels or {})
    ]
    if at_least is not None:
        return min((size for shape in able for size in shape.gpu_memories if size >= at_least), default=at_least)
    known = [shape.gpu_memory_bytes for shape in able if shape.gpu_memory_bytes is not None]
    return min(known) if known and len(known) == len(able) else None


def usable_shapes(
    shapes: Sequence[NodeShape], labels: Mapping[str, str], gpu_memory_bytes: int | None
) -> tuple[NodeShape, ...]:
    """The nodes that have these labels, each with only the GPUs that have so much memory."""
    labelled = tuple(shape for shape in shapes if has_labels(shape, labels))
    if gpu_memory_bytes is None:
        return labelled
    return tuple(
        replace(shape, num_gpus=sum(size >= gpu_memory_bytes for size in shape.gpu_memories)) for shape in labelled
    )


def has_labels(shape: NodeShape, labels: Mapping[str, str]) -> bool:
    """Whether the node has all of them, with these values."""
    return all(shape.labels.get(label) == value for label, value in labels.items())
