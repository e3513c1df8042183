"""Whom to stop for a waiting job, by the rules of the policy study: only where it pays. Pure.

A waiting job may stop runs that have more than M times its own time left, if the sum rule and the quorum say so. A
node's price is the sum of 1/left of those that would be stopped on it: what the jobs that wait in their stead lose.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from service.domain.gang_layout import GangLayout
from service.scheduler.estimates import left_of_waiting
from service.scheduler.facts import PlacedGang
from service.scheduler.jobs import FOREVER, Entry, Run
from service.scheduler.node import Node
from service.scheduler.offers import Offer, Share, offer_of, step_of
from service.scheduler.placement import Taken, gang_of, together
from service.scheduler.queue import Lane
from service.scheduler.quota import Standing, are_borrowed, borrowed_gpus, may_stop
from service.scheduler.world import World

MAX_EQUAL: Final = 8
"""Offers of one price of which the one is taken that loses the least work."""
MARGIN: Final = 3.0
"""m of the study: how many times more time left pays for a stop."""


@dataclass(frozen=True, kw_only=True)
class Room:
    """A place for a gang, once these runs have left it."""

    gang: PlacedGang
    victims: tuple[Run, ...]


@dataclass(frozen=True, kw_only=True)
class NoRoom:
    """Why nobody is stopped: a code and its numbers."""

    code: str
    numbers: dict[str, float]


def find_room(world: World, lane: Lane, entry: Entry, standing: Standing, now: float) -> Room | NoRoom:
    """The cheapest runs with more time left whose place the entry may take, or why there are none."""
    search = _Search(world, lane, entry, standing, now)
    offers = search.cheapest()
    if offers is None:
        return NoRoom(code="too_costly", numbers={})
    victims = _distinct(offer for offer, _ in offers)
    if not are_borrowed(world, lane, victims):
        return NoRoom(code="too_costly", numbers={})
    if not entry.is_promoted:
        refused = _sum_rule(world, entry, victims, now) or _quorum(world, entry, victims, now)
        if refused is not None:
            return refused
    return room_of(lane, entry, [(offer.node, count) for offer, count in offers], victims)


def find_reclaim(world: World, lane: Lane, entry: Entry, now: float) -> Room | None:
    """Borrowed GPUs that a job within its team's quota gets back: those whose stop loses the least work.

    Neither protection nor the price counts, only that a job can resume; nobody is taken below its own quota.
    """
    layout = entry.job.least
    borrowed = {team_id: borrowed_gpus(world, team_id) for team_id in world.team_gpus if team_id != lane.team_id}
    for nodes in together(list(lane.index.nodes.values()), layout, lambda node: node.view):
        room = _reclaim_among(world, lane, entry, nodes, dict(borrowed), now)
        if room is not None:
            return room
    return None


def _reclaim_among(
    world: World, lane: Lane, entry: Entry, nodes: Sequence[Node], borrowed: dict[int, int], now: float
) -> Room | None:
    layout = entry.job.least
    offers: list[tuple[_Reclaimed, int]] = []
    used: set[int] = set()
    for count in layout.shares:
        found = [
            offer
            for node in nodes
            if node.id not in used and (offer := _reclaim_on(world, lane, entry, node, count, borrowed, offers, now))
        ]
        if not found:
            return None
        best = min(found, key=lambda one: (one.num_straddling, one.loss, one.price, one.node.order))
        taken = {run.id for offer, _ in offers for run in offer.victims}
        for run in best.victims:
            if run.id not in taken:
                borrowed[run.job.team_id] -= run.counted[0]
        used.add(best.node.id)
        offers.append((best, count))
    victims = _distinct(offer for offer, _ in offers)
    return room_of(lane, entry, [(offer.node, count) for offer, count in offers], victims)


@dataclass(frozen=True, slots=True)
class _Reclaimed:
    """A node, and the borrowers that would have to leave it."""

    num_straddling: int
    """Of them: those that reach into their team's quota."""
    loss: float
    price: float
    node: Node
    victims: tuple[Run, ...]


def _reclaim_on(
    world: World,
    lane: Lane,
    entry: Entry,
    node: Node,
    count: int,
    borrowed: dict[int, int],
    before: list[tuple[_Reclaimed, int]],
    now: float,
) -> _Reclaimed | None:
    """The cheapest borrowers on a node that have to leave it so that `count` GPUs are free."""
    if not entry.job.may_run_on(node.view):
        return None
    chosen = {run.id for offer, _ in before for run in offer.victims}
    left = dict(borrowed)
    free = lane.index.free_mask(node)
    victims: list[Run] = []
    for run in sorted(node.runs.values(), key=lambda run: _reclaim_order(world, run, left, now)):
        if free.bit_count() >= count and _would_fit(node, entry, victims):
            break
        # A pass does not take back what it gave.
        if not run.job.is_preemptible or run.is_leaving or run.started_at >= now:
            continue
        if run.id not in chosen:
            if left.get(run.job.team_id, 0) <= 0:
                continue
            left[run.job.team_id] -= run.counted[0]
        victims.append(run)
        free |= run.mask_on(node.id) & lane.index.mask_of(node)
    if free.bit_count() < count or not _would_fit(node, entry, victims):
        return None
    victims = _needed(lane, entry, node, count, victims, chosen, now)
    num_straddling = sum(run.counted[0] > borrowed.get(run.job.team_id, 0) for run in victims if run.id not in chosen)
    loss = sum(run.loss(now) for run in victims if run.id not in chosen)
    price = sum(1.0 / run.left(world.ratios, now) for run in victims)
    return _Reclaimed(num_straddling, loss, price, node, tuple(victims))


def _reclaim_order(world: World, run: Run, borrowed: dict[int, int], now: float) -> tuple[bool, float, float, int]:
    """Jobs that are borrowed whole come before those that reach into their team's quota; then the least work lost."""
    is_straddling = run.counted[0] > borrowed.get(run.job.team_id, 0)
    return (is_straddling, run.loss(now), -run.left(world.ratios, now), run.id)


def _needed(
    lane: Lane, entry: Entry, node: Node, count: int, victims: list[Run], chosen: set[int], now: float
) -> list[Run]:
    """The victims without those whose place the others make anyway, the dearest first."""
    kept = list(victims)
    for run in sorted(victims, key=lambda run: -run.loss(now)):
        others = [other for other in kept if other is not run]
        free = lane.index.free_mask(node)
        for other in others:
            free |= other.mask_on(node.id) & lane.index.mask_of(node)
        if run.id not in chosen and free.bit_count() >= count and _would_fit(node, entry, others):
            kept = others
    return kept


class _Search:
    """The search for one waiting job."""

    def __init__(self, world: World, lane: Lane, entry: Entry, standing: Standing, now: float):
        self.world, self.lane, self.entry, self.standing, self.now = world, lane, entry, standing, now
        self.index = lane.index
        self.least_left = 0.0 if entry.is_promoted else MARGIN * entry.left
        self.most_price = FOREVER if entry.is_promoted else (1.0 + 1e-12) / (MARGIN * left_now(world, entry))

    def cheapest(self) -> list[tuple[Offer, int]] | None:
        """The cheapest node for each share of the gang; None where there is none that pays."""
        layout = self.entry.job.least
        if layout.num_nodes == 1 and not layout.needs_shared_folder:
            chosen = self._cheapest_node(layout.gpus_per_node, frozenset())
            found = [] if chosen is None else [chosen]
        else:
            found = self._cheapest_nodes(layout)
        if len(found) < layout.num_nodes:
            return None
        shares = [(offer, layout.gpus_per_node) for offer in found]
        if layout.rest_gpus:
            rest = self._cheapest_node(layout.rest_gpus, frozenset(offer.node.id for offer in found))
            if rest is None:
                return None
            shares.append((rest, layout.rest_gpus))
        return shares

    def _cheapest_node(self, count: int, others: frozenset[int]) -> Offer | None:
        """Ties go to the least work lost, then to the lowest node."""
        equal: list[Offer] = []
        most_step = step_of(self.most_price) if self.most_price < FOREVER else FOREVER
        for offer in self._offers(count):
            step = step_of(offer.price)
            if step > (step_of(equal[0].price) if equal else most_step) or len(equal) == MAX_EQUAL:
                break
            if offer.price <= self.most_price and offer.least_left > self.least_left and offer.node.id not in others:
                equal.append(offer)
        return min(equal, key=lambda offer: (offer.loss(self.now), offer.node.order), default=None)

    def _cheapest_nodes(self, layout: GangLayout) -> list[Offer]:
        if not layout.needs_shared_folder:
            found = []
            for offer in self._offers(layout.gpus_per_node):
                if offer.price > self.most_price:
                    break  # what comes now costs as much, to within a step
                if offer.least_left > self.least_left:
                    found.append(offer)
                    if len(found) == layout.num_nodes:
                        break
            return found
        able = [offer for offer in self._offers(layout.gpus_per_node) if offer.least_left > self.least_left]
        groups = together(able, layout, lambda offer: offer.node.view)
        return next((list(group[: layout.num_nodes]) for group in groups if len(group) >= layout.num_nodes), [])

    def _offers(self, count: int) -> Iterator[Offer]:
        """By price: from the heap where all jobs get the same offers, else worked out for this one."""
        job, layout, world = self.entry.job, self.entry.job.least, self.world
        share = Share(num_gpus=count, cpus=layout.cpus_per_node, memory_bytes=job.memory_bytes_per_node)
        offers = world.offers.heap_for(self.index, share).cheapest(world.ratios, self.now)
        if layout.gpus_per_node and job.home is None and not job.is_exclusive and not world.has_quotas:
            yield from offers
        else:
            yield from self._own_offers(offers, share)

    def _own_offers(self, offers: Iterator[Offer], share: Share) -> Iterator[Offer]:
        """What nodes offer to this job, by price: never less than they offer to one that may stop every run."""
        found: list[tuple[int, int, Offer]] = []
        job, ratios = self.entry.job, self.world.ratios
        for offer in offers:
            if offer.price > self.most_price:
                break
            node, step = offer.node, step_of(offer.price)
            while found and found[0][:2] <= (step, node.order):
                yield heapq.heappop(found)[2]
            if job.home is None or job.may_run_on(node.view):
                own = offer_of(self.index, node, share, ratios, self.now, self._may_stop)
                if own is not None and _would_fit(node, self.entry, list(own.victims)):
                    heapq.heappush(found, (step_of(own.price), node.order, own))
        while found:
            yield heapq.heappop(found)[2]

    def _may_stop(self, run: Run) -> bool:
        return may_stop(self.world, self.lane, self.standing, run)


def left_now(world: World, entry: Entry) -> float:
    """Seconds that a waiting job needs, as of now: the ratios have moved since its wait began."""
    return left_of_waiting(entry.job, world.ratios)


def room_of(lane: Lane, entry: Entry, taken: Taken, victims: tuple[Run, ...]) -> Room:
    """The gang on the GPUs that are free or that the victims leave."""
    masks: dict[int, int] = {}
    for node, _ in taken:
        mask = lane.index.free_mask(node)
        for run in victims:
            mask |= run.mask_on(node.id) & lane.index.mask_of(node)
        masks[node.id] = mask
    return Room(gang=gang_of(lane.index, entry.job.least, taken, masks), victims=victims)


def _sum_rule(world: World, entry: Entry, victims: tuple[Run, ...], now: float) -> NoRoom | None:
    price = sum(1.0 / run.left(world.ratios, now) for run in victims)
    if 1.0 / left_now(world, entry) >= MARGIN * price * (1.0 - 1e-12):
        return None
    return NoRoom(code="too_costly", numbers={"victims": len(victims)})


def _quorum(world: World, entry: Entry, victims: tuple[Run, ...], now: float) -> NoRoom | None:
    """A large gang is not stopped for few small jobs: those that would gain must ask for half of its GPUs together."""
    num_gpus = sum(run.num_gpus for run in victims)
    if num_gpus <= 2 * entry.num_gpus:
        return None
    bound = min(run.left(world.ratios, now) for run in victims) / MARGIN
    asked = 0
    for left, _, waiting in world.queue.by_left:
        if left >= bound:
            break
        asked += waiting.num_gpus
        if 2 * asked >= num_gpus:
            return None
    return NoRoom(code="quorum", numbers={"gpus": num_gpus, "asked": asked, "job": victims[0].id})


def _would_fit(node: Node, entry: Entry, victims: list[Run]) -> bool:
    layout, job = entry.job.least, entry.job
    if job.is_exclusive and (len(victims) < len(node.runs) or node.nominated):
        return False
    others = [run for run in node.runs.values() if run not in victims]
    if not layout.gpus_per_node and (any(run.job.is_exclusive for run in others) or any(node.nominated.values())):
        return False
    cpus = node.cpus + sum(run.gang.layout.cpus_per_node for run in victims)
    memory = node.memory_bytes + sum(run.job.memory_bytes_per_node for run in victims)
    return cpus >= layout.cpus_per_node and memory >= job.memory_bytes_per_node


def _distinct(offers: Iterable[Offer | _Reclaimed]) -> tuple[Run, ...]:
    victims: dict[int, Run] = {}
    for offer in offers:
        for run in offer.victims:
            victims[run.id] = run
    return tuple(victims.values())
