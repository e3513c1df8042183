"""Nodes by the number of GPUs that can be given away, one index for each kind of GPU that jobs ask for. Pure.

A lookup walks at most as many buckets as a node has GPUs. In a bucket the node comes first that has been unchanged
longest: what was left alone is used up before what was just freed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from service.scheduler.facts import Shape
from service.scheduler.node import Node, has_labels, matching_mask

Kind = tuple[str | None, int | None, tuple[tuple[str, str], ...]]
"""What decides which nodes and GPUs a job may use, as far as many jobs share it: GPU type, GPU memory, labels."""


def kind_of(shape: Shape) -> Kind:
    """The index that a job of this shape is looked up in."""
    return (shape.gpu_type, shape.gpu_memory_bytes, shape.labels)


class FreeIndex:
    """The nodes for one kind of job."""

    __slots__ = ("_bucket_of", "_is_plain", "_masks", "_shape", "_unsorted", "buckets", "nodes", "num_free")

    def __init__(self, shape: Shape, nodes: Iterable[Node]):
        self._shape = shape
        self._is_plain = shape.gpu_type is None and shape.gpu_memory_bytes is None
        self._masks: dict[int, int] = {}
        self._bucket_of: dict[int, int] = {}
        self._unsorted: set[int] = set()
        self.nodes: dict[int, Node] = {}
        """Those that may take such a job, blocked ones left out; by order once `nodes_in_order` was called."""
        self.buckets: list[dict[int, Node]] = [{}]
        self.num_free = 0
        """GPUs that can be given away in all."""
        for node in sorted(nodes, key=lambda node: (node.stamp, node.order)):
            self.add(node)

    def add(self, node: Node) -> None:
        """Take a node in that joined, or whose facts changed."""
        self.drop(node.id)
        if node.view.blocked_by is not None or not has_labels(node.view, self._shape):
            return
        mask = matching_mask(node.view, self._shape.gpu_type, self._shape.gpu_memory_bytes)
        if not mask and not self._is_plain:
            return
        self._masks[node.id] = mask
        self.nodes[node.id] = node
        while len(self.buckets) <= node.size:
            self.buckets.append({})
        count = (node.available & mask).bit_count()
        self._bucket_of[node.id] = count
        self.buckets[count][node.id] = node
        self._unsorted.add(count)
        self.num_free += count

    def drop(self, node_id: int) -> None:
        """Forget a node."""
        count = self._bucket_of.pop(node_id, None)
        if count is None:
            return
        del self.buckets[count][node_id]
        self.num_free -= count
        del self.nodes[node_id]
        del self._masks[node_id]

    def changed(self, node: Node, *, is_undone: bool = False) -> None:
        """What is available on a node has changed; `is_undone`: back to what it was, with its old stamp."""
        before = self._bucket_of.get(node.id)
        if before is None:
            return
        count = (node.available & self._masks[node.id]).bit_count()
        del self.buckets[before][node.id]
        self.buckets[count][node.id] = node
        self._bucket_of[node.id] = count
        self.num_free += count - before
        if is_undone:
            self._unsorted.add(count)

    def free_mask(self, node: Node) -> int:
        """The GPUs of a node that such a job could take now."""
        return node.available & self._masks[node.id]

    def mask_of(self, node: Node) -> int:
        """The GPUs of a node that such a job could take, whoever holds them."""
        return self._masks[node.id] & node.usable

    def usable_count(self, node: Node) -> int:
        """How many GPUs of a node such a job could take if nobody else was there."""
        return self.mask_of(node).bit_count()

    def best_fit(self, count: int) -> Iterator[Node]:
        """The nodes with at least `count` GPUs to give away, those with the fewest first."""
        for number in range(count, len(self.buckets)):
            bucket = self.buckets[number]
            if bucket:
                if number in self._unsorted:
                    bucket = self._sort(number)
                yield from list(bucket.values()) if len(bucket) < 8 else bucket.values()

    def _sort(self, number: int) -> dict[int, Node]:
        nodes = sorted(self.buckets[number].values(), key=lambda node: (node.stamp, node.order))
        bucket = self.buckets[number] = {node.id: node for node in nodes}
        self._unsorted.discard(number)
        return bucket
