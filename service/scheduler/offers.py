"""What it would cost to free GPUs on each node, kept from pass to pass so that a search looks at few nodes. Pure.

A node's offer for a number of GPUs: stop its runs by the longest time left until so many are free; its price is the sum
of 1/left of those. Times left only shrink, so an old price is a lower bound of the present one: a heap that is
refreshed at its top finds the cheapest. Nodes that changed are priced anew. Not for: whether it pays (`victims`).
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Final

from service.scheduler.estimates import Ratios
from service.scheduler.free_index import FreeIndex
from service.scheduler.jobs import FOREVER, Run
from service.scheduler.node import Node

STEPS_PER_E: Final = 100.0
"""Prices are compared in steps of 1 %: what is closer together counts as equal."""
FREE: Final = -(2**31)


def step_of(price: float) -> int:
    """The step of a price, on a logarithmic scale."""
    return math.floor(math.log(price) * STEPS_PER_E) if price > 0.0 else FREE


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one node has to give."""

    num_gpus: int
    cpus: float
    memory_bytes: int


@dataclass(frozen=True, slots=True)
class Offer:
    """A node, and whom stopping there gives enough."""

    price: float
    least_left: float
    """Of the victims; infinite without any."""
    node: Node
    victims: tuple[Run, ...]

    def loss(self, now: float) -> float:
        """GPU-seconds of work that it loses."""
        return sum(run.loss(now) for run in self.victims)


def offer_of(
    index: FreeIndex,
    node: Node,
    share: Share,
    ratios: Ratios,
    now: float,
    may_stop: Callable[[Run], bool] | None = None,
) -> Offer | None:
    """The offer of a node for a share; None: even without all runs that can be stopped it has not enough."""
    free = index.free_mask(node)
    count = share.num_gpus
    cpus, memory = node.cpus, node.memory_bytes
    if free.bit_count() >= count and cpus >= share.cpus and memory >= share.memory_bytes:
        return Offer(0.0, FOREVER, node, ())
    candidates = [
        (-run.left(ratios, now), run.id, run)
        for run in node.runs.values()
        if run.open_at <= now and (may_stop is None or may_stop(run))
    ]
    candidates.sort()
    kind_mask = index.mask_of(node)
    price = 0.0
    for number, (negative_left, _, run) in enumerate(candidates, start=1):
        price -= 1.0 / negative_left
        free |= run.mask_on(node.id) & kind_mask
        cpus += run.gang.layout.cpus_per_node
        memory += run.job.memory_bytes_per_node
        if free.bit_count() >= count and cpus >= share.cpus and memory >= share.memory_bytes:
            return Offer(price, -negative_left, node, tuple(item[2] for item in candidates[:number]))
    return None


class OfferHeap:
    """The offers of all nodes of an index for one share, the cheapest on top."""

    def __init__(self, index: FreeIndex, share: Share):
        self._index, self._share = index, share
        self._heap: list[tuple[int, int, int, int]] = []
        """(step of the price as it was, order of the node, node id, token); those with an old token count no more."""
        self._tokens: dict[int, int] = {}
        self._next_token = 0
        self.dirty: set[int] = set(index.nodes)
        """Nodes to be priced anew."""

    def cheapest(self, ratios: Ratios, now: float) -> Iterator[Offer]:
        """Offers by the step of their price, then by the order of nodes. What was taken is put back at the end."""
        self._price_changed(ratios, now)
        heap, tokens, nodes = self._heap, self._tokens, self._index.nodes
        taken: list[tuple[int, int, int, int]] = []
        try:
            while heap:
                _, order, node_id, token = heapq.heappop(heap)
                if tokens.get(node_id) != token:
                    continue
                offer = offer_of(self._index, nodes[node_id], self._share, ratios, now)
                if offer is None:
                    del tokens[node_id]
                    continue
                item = (step_of(offer.price), order, node_id, token)
                if heap and heap[0] < item:
                    heapq.heappush(heap, item)
                    continue
                taken.append(item)
                yield offer
        finally:
            for item in taken:
                heapq.heappush(heap, item)

    def _price_changed(self, ratios: Ratios, now: float) -> None:
        nodes = self._index.nodes
        for node_id in self.dirty:
            node = nodes.get(node_id)
            offer = None if node is None else offer_of(self._index, node, self._share, ratios, now)
            if node is None or offer is None:
                self._tokens.pop(node_id, None)
                continue
            self._next_token += 1
            self._tokens[node_id] = self._next_token
            heapq.heappush(self._heap, (step_of(offer.price), node.order, node_id, self._next_token))
        self.dirty.clear()
        if len(self._heap) > 64 + 4 * len(self._tokens):
            self._heap = [item for item in self._heap if self._tokens.get(item[2]) == item[3]]
            heapq.heapify(self._heap)


class OfferBook:
    """The heaps of the shares that are searched for; the least used go when there are many."""

    MAX_HEAPS: Final = 48

    def __init__(self) -> None:
        self._heaps: dict[tuple[int, Share], OfferHeap] = {}

    def heap_for(self, index: FreeIndex, share: Share) -> OfferHeap:
        """The heap of a share, made when first asked for."""
        key = (id(index), share)
        heap = self._heaps.pop(key, None) or OfferHeap(index, share)
        if len(self._heaps) >= self.MAX_HEAPS:
            del self._heaps[next(iter(self._heaps))]
        self._heaps[key] = heap  # the newest stand last
        return heap

    def changed(self, node_id: int) -> None:
        """A node must be priced anew."""
        for heap in self._heaps.values():
            heap.dirty.add(node_id)

    def forget(self) -> None:
        """All prices may have fallen."""
        self._heaps.clear()
