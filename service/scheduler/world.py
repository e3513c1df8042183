"""The scheduler's indexed view of the pool: nodes by what is free, jobs that run, jobs in lanes. Kept by changes. Pure.

Every change can be undone in reverse order, so that a plan or a what-if leaves the world as it found it. A world kept
by changes holds the same facts as one built anew (`facts`). Not for: deciding anything (`service.scheduler.policies`).
"""

from __future__ import annotations

import heapq
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Final, NamedTuple

from service.scheduler.estimates import Ratios, RatioView, left_of_waiting
from service.scheduler.facts import (
    TOP_PRIORITY,
    EndedRatio,
    GPUView,
    Measured,
    NodeShare,
    NodeView,
    Nomination,
    PlacedGang,
    RunningJob,
    Shape,
    Team,
    User,
    WaitingJob,
)
from service.scheduler.free_index import FreeIndex, Kind, kind_of
from service.scheduler.jobs import FOREVER, Entry, Run
from service.scheduler.node import Node
from service.scheduler.offers import OfferBook
from service.scheduler.queue import Lane, LaneKey, Queue

__all__ = ["GPUView", "NodeShare", "NodeView", "PlacedGang", "RunningJob", "Team", "User", "WaitingJob", "World"]

BY_LEFT: Final = "left"
BY_SUBMISSION: Final = "submission"


class World:
    """Everything a policy may look at, and the only way to change it."""

    def __init__(
        self,
        nodes: Iterable[NodeView] = (),
        waiting: Iterable[WaitingJob] = (),
        running: Iterable[RunningJob] = (),
        *,
        teams: Iterable[Team] = (),
        users: Iterable[User] = (),
        nominations: Iterable[Nomination] = (),
        ratios: Iterable[EndedRatio] = (),
        now: float = 0.0,
        order: str = BY_LEFT,
    ):
        self.nodes: dict[int, Node] = {}
        self.runs: dict[int, Run] = {}
        self.queue = Queue()
        self.held: dict[int, WaitingJob] = {}
        """Waiting jobs that must not start now: held, backing off, before their time."""
        self.nominations: dict[int, Nomination] = {}
        self.nominated: dict[int, Entry] = {}
        """The entries of nominated jobs that wait; one that is still stopping to be moved has none."""
        self.teams: dict[int, Team] = {}
        self.users: dict[int, User] = {}
        self.team_gpus: defaultdict[int, int] = defaultdict(int)
        self.team_nodes: defaultdict[int, int] = defaultdict(int)
        self.user_gpus: defaultdict[int, int] = defaultdict(int)
        """Held or promised, without what is being freed."""
        self.ratios = Ratios(ratios)
        self.order = order
        self.has_quotas = False
        self.largest_node = 0
        """GPUs of the largest node that the pool ever had."""
        self.version = 0
        self.num_freeing = 0
        self.offers = OfferBook()
        """What freeing GPUs on each node would cost."""
        self._openings: list[tuple[float, int]] = []
        """(when, job) of running jobs whose protection ends."""
        self._indexes: dict[Kind, FreeIndex] = {}
        self._stamp = 0
        self._stamps: dict[int, int] = {}
        """Of nodes that a what-if has changed: what their stamps were."""
        self._journal: list[Callable[[], None]] | None = None
        self._team_entries: defaultdict[int, dict[int, Entry]] = defaultdict(dict)
        self._num_ranked: defaultdict[int, int] = defaultdict(int)
        """Waiting jobs of each team that have a priority."""
        self._unranked_teams: set[int] = set()
        self._capped_teams: set[int] = set()
        for team in teams:
            self.teams[team.id] = team
        for user in users:
            self.users[user.id] = user
        self._read_bounds()
        for view in sorted(nodes, key=lambda view: (view.changed_at, view.name)):
            self.set_node(view)
        for run in sorted(running, key=lambda run: (run.started_at, run.job.id)):
            self.add_running(run)
        promised = {nomination.job_id: nomination for nomination in nominations}
        for job in sorted(waiting, key=lambda job: job.id):
            self.add_waiting(job, now)
        for nomination in sorted(promised.values(), key=lambda nomination: nomination.job_id):
            if nomination.job_id in self.queue.entries or nomination.job_id in self.runs:
                self.nominate(nomination.job_id, nomination.gang, nomination.after)

    # --- Waiting jobs -----------------------------------------------------------------------------------------------

    @property
    def waiting(self) -> tuple[WaitingJob, ...]:
        """All jobs that wait, by id."""
        jobs = {entry.id: entry.job for entry in self.queue.entries.values()} | self.held
        jobs |= {job_id: entry.job for job_id, entry in self.nominated.items()}
        return tuple(jobs[job_id] for job_id in sorted(jobs))

    def is_waiting(self, job_id: int) -> bool:
        """Whether the job is in the queue, held, or nominated."""
        return job_id in self.queue.entries or job_id in self.nominated or job_id in self.held

    def add_waiting(self, job: WaitingJob, now: float = 0.0) -> None:
        """Put a job into the queue, or aside when something holds it; one that waits already is put in anew."""
        is_held = _is_held_back(job, now)
        if job.id in self.nominated and not is_held:
            before, entry = self.nominated[job.id], Entry(job, left_of_waiting(job, self.ratios), now)
            self.nominated[job.id] = entry
            self._note(lambda: self.nominated.__setitem__(job.id, before))
            return
        self.remove(job.id)
        if is_held:
            self.held[job.id] = job
            self._note(lambda: self.held.pop(job.id))
            self.version += 1
            return
        entry = Entry(job, left_of_waiting(job, self.ratios), now)
        nomination = self.nominations.get(job.id)
        if nomination is not None:
            self.nominated[job.id] = entry
            self._note(lambda: self.nominated.pop(job.id))
        else:
            self._enqueue(entry)

    def remove(self, job_id: int) -> None:
        """A waiting job waits no more; what it was nominated for is free again."""
        job = self.held.pop(job_id, None)
        if job is not None:
            self._note(lambda: self.held.__setitem__(job_id, job))
        if job_id in self.nominated:
            self.drop_nomination(job_id)
        self._dequeue(job_id)
        self.version += 1

    def release_due(self, now: float) -> None:
        """Jobs whose back-off is over join the queue; those whose time has come are promoted."""
        for job in [job for job in self.held.values() if job.held_by is None and (job.not_before or 0.0) <= now]:
            self.add_waiting(job, now)
        while self._openings and self._openings[0][0] <= now:
            run = self.runs.get(heapq.heappop(self._openings)[1])
            if run is not None:
                self._reprice(run)
        for entry in list(self.queue.due_promotions(now)):
            self._dequeue(entry.id)
            entry.is_promoted = True
            self._note(lambda entry=entry: setattr(entry, "is_promoted", False))  # type: ignore[misc]
            self._enqueue(entry)

    def next_due(self) -> float | None:
        """When `release_due` has something to do next."""
        times = [job.not_before for job in self.held.values() if job.held_by is None and job.not_before is not None]
        promotion = self.queue.next_promotion()
        return min([*times, *([] if promotion is None else [promotion])], default=None)

    def next_timer(self, now: float) -> float | None:
        """The earliest moment after `now` at which a pass may decide otherwise though nothing has changed."""
        times = [time for time in (self.next_due(), self.queue.next_patience(now)) if time is not None and time > now]
        return min(times, default=None)

    def settle_turns(self) -> None:
        """Within each team that uses priorities, its jobs take the team's turns by priority."""
        while self._unranked_teams:
            team_id = self._unranked_teams.pop()
            if not self._num_ranked[team_id]:
                continue
            entries = list(self._team_entries[team_id].values())
            natural = {entry.id: self._turn_of(entry) for entry in entries}
            turns = sorted(natural.values())
            ranked = sorted(entries, key=lambda entry: (-entry.job.priority, natural[entry.id]))
            for entry, turn in zip(ranked, turns, strict=True):
                if entry.turn != turn:
                    self._dequeue(entry.id, is_ranked=True)
                    self._enqueue(entry, turn)
            self._unranked_teams.discard(team_id)

    def set_order(self, order: str) -> None:
        """Order the queue by the time left or by submission."""
        if order == self.order:
            return
        self.order = order
        for entry in list(self.queue.entries.values()):
            self._dequeue(entry.id)
            self._enqueue(entry)

    def _turn_of(self, entry: Entry) -> tuple[float, ...]:
        job = entry.job
        is_top = 0.0 if job.priority > TOP_PRIORITY else 1.0
        if self.order == BY_SUBMISSION:
            return (is_top, job.submitted_at, job.id)
        if entry.is_promoted:
            return (is_top, 0.0, job.submitted_at, job.id)
        return (is_top, 1.0, entry.left, job.id)

    def _enqueue(self, entry: Entry, turn: tuple[float, ...] | None = None) -> None:
        entry.turn = self._turn_of(entry) if turn is None else turn
        key = self._lane_key(entry.job)
        lane = self.queue.lanes.get(key)
        if lane is None:
            lane = Lane(key, entry.job, self.index_for(entry.job.shape))
        self.queue.add(entry, lane)
        team_id = entry.job.team_id
        self._team_entries[team_id][entry.id] = entry
        self._num_ranked[team_id] += entry.job.priority != 0
        if turn is None:
            self._unranked_teams.add(team_id)
        self.version += 1
        self._note(lambda: self._dequeue(entry.id))

    def _dequeue(self, job_id: int, *, is_ranked: bool = False) -> Entry | None:
        entry = self.queue.remove(job_id)
        if entry is None:
            return None
        team_id, turn = entry.job.team_id, entry.turn
        del self._team_entries[team_id][job_id]
        self._num_ranked[team_id] -= entry.job.priority != 0
        if not is_ranked:
            self._unranked_teams.add(team_id)
        self.version += 1
        self._note(lambda: self._enqueue(entry, turn))
        return entry

    def _lane_key(self, job: WaitingJob) -> LaneKey:
        bounds = (
            job.team_id if self.has_quotas or job.team_id in self._capped_teams else None,
            job.user_id if job.user_id in self.users else None,
            (job.is_preemptible or job.may_borrow) if self.has_quotas else None,
        )
        return (job.layouts, job.memory_bytes_per_node, job.gpu_type, job.home, job.gpu_memory_bytes, job.labels,
                job.is_exclusive, bounds)  # fmt: skip

    # --- Running jobs -----------------------------------------------------------------------------------------------

    def add_running(self, facts: RunningJob) -> None:
        """A job holds GPUs."""
        masks = tuple((share.node_id, self._mask_of(facts.job, share)) for share in facts.gang.shares)
        run = Run(facts, masks)
        num_whole = sum(mask == self.nodes[node_id].usable for node_id, mask in masks if node_id in self.nodes)
        run.counted = (sum(mask.bit_count() for _, mask in masks), num_whole)
        self.runs[run.id] = run
        self._hold(run)
        if run.open_at < FOREVER:
            heapq.heappush(self._openings, (run.open_at, run.id))
        if run.is_stopping:
            run.is_stopping = False
            self.begin_stop(run.id)
        self._note(lambda: self._forget_run(run))

    def start(self, job_id: int, gang: PlacedGang, now: float, *, restore_seconds: float = 0.0) -> Run:
        """A job of the queue, or a nominated one, gets its GPUs."""
        entry = self.nominated.get(job_id) or self.queue.entries[job_id]
        if job_id in self.nominations:
            self.drop_nomination(job_id)
        self._dequeue(job_id)
        job = entry.job
        if entry.is_promoted and job.promoted_at is None:
            job = replace(job, promoted_at=entry.promoted_at)
        self.add_running(RunningJob(job=job, gang=gang, started_at=now, restore_seconds=restore_seconds))
        return self.runs[job_id]

    def begin_stop(self, job_id: int) -> None:
        """A running job was asked to leave: its GPUs can be promised, and are free once it has gone."""
        run = self.runs[job_id]
        if run.is_stopping:
            return
        run.is_stopping = True
        self._count(run, -1)
        self.num_freeing += 1
        for node, mask in self._shares_of(run):
            node.freeing |= mask
            self._give(node, run, 1)
            node.leaving[run.id] = node.runs.pop(run.id)
            self._touch(node)
        self._note(lambda: self._resume(run))

    def ended(self, job_id: int, ratio: float | None = None) -> None:
        """A job has ended and its GPUs are free. `ratio`: its real time over its limit."""
        run = self.runs.get(job_id)
        if run is None:
            return
        self.drop_nomination(job_id)  # one that was to be moved has come to its end before
        self._release(run)
        if ratio is not None:
            self._learn_ratio(EndedRatio(ratio=ratio, user_id=run.job.user_id, team_id=run.job.team_id))

    def take_ratios(self, ratios: Ratios) -> None:
        """What is known of jobs that ended, read anew. Cannot be undone."""
        self.ratios = ratios
        self.offers.forget()

    def stopped(self, job_id: int, job: WaitingJob, now: float = 0.0) -> None:
        """A job has left its GPUs and waits again."""
        run = self.runs.get(job_id)
        if run is not None:
            if _is_held_back(job, now):
                self.drop_nomination(job_id)  # it does not go where it was to be moved
            self._release(run)
        self.add_waiting(job, now)

    def _release(self, run: Run) -> None:
        self._forget_run(run)
        self._note(lambda: self._restore_run(run))

    def measured(self, job_id: int, left_seconds: float, now: float, rate: float = 1.0) -> None:
        """A running job has reported how much time it has left."""
        run = self.runs.get(job_id)
        if run is not None:
            before = run.measured
            run.measured = Measured(left_seconds=left_seconds, at=now, rate=rate)
            self.version += 1
            self._reprice(run)
            self._note(lambda: self._believe(run, before))

    def checkpointed(self, job_id: int, at: float) -> None:
        """A running job has a new durable checkpoint."""
        run = self.runs.get(job_id)
        if run is not None:
            before = run.checkpointed_at
            run.checkpointed_at = at
            self._note(lambda: setattr(run, "checkpointed_at", before))

    # --- Nominations ------------------------------------------------------------------------------------------------

    def nominate(self, job_id: int, gang: PlacedGang, after: frozenset[int]) -> None:
        """Promise GPUs to a job once those of `after` have left them. Nobody else gets them."""
        nomination = Nomination(job_id=job_id, gang=gang, after=after)
        entry = self._dequeue(job_id)
        job = entry.job if entry is not None else self.runs[job_id].job
        self.nominations[job_id] = nomination
        if entry is not None:
            self.nominated[job_id] = entry
        self._promise(nomination, job, 1)

        def undo() -> None:
            self.nominations.pop(job_id)
            self.nominated.pop(job_id, None)
            self._promise(nomination, job, -1)

        self._note(undo)

    def drop_nomination(self, job_id: int) -> None:
        """Take a promise back: a waiting job goes back into the queue."""
        nomination = self.nominations.pop(job_id, None)
        if nomination is None:
            return
        entry = self.nominated.pop(job_id, None)
        job = entry.job if entry is not None else self.runs[job_id].job
        self._promise(nomination, job, -1)

        def undo() -> None:
            self.nominations[job_id] = nomination
            if entry is not None:
                self.nominated[job_id] = entry
            self._promise(nomination, job, 1)

        self._note(undo)
        if entry is not None:
            self._enqueue(entry)

    def ready_nominations(self) -> list[Nomination]:
        """Nominations of waiting jobs whose GPUs all are free by now, by job."""
        return [
            nomination
            for job_id, nomination in sorted(self.nominations.items())
            if job_id in self.nominated and self._is_free(nomination)
        ]

    def _is_free(self, nomination: Nomination) -> bool:
        for share in nomination.gang.shares:
            node = self.nodes.get(share.node_id)
            if node is None or node.view.blocked_by is not None:
                return False
            mask = node.mask_of(share.gpu_indices)
            if mask.bit_count() != len(share.gpu_indices) or mask & ~node.usable or mask & node.held:
                return False  # a GPU may have been quarantined or taken out since it was promised
        return not any(job_id in self.runs for job_id in nomination.after)

    def _promise(self, nomination: Nomination, job: WaitingJob, sign: int) -> None:
        num_gpus = num_whole = 0
        for share in nomination.gang.shares:
            node = self.nodes.get(share.node_id)
            if node is None:
                continue
            mask = self._mask_of(job, share)
            num_gpus += mask.bit_count()
            num_whole += mask == node.usable
            node.promised = node.promised | mask if sign > 0 else node.promised & ~mask
            if sign > 0:
                node.nominated[nomination.job_id] = job.is_exclusive
            else:
                node.nominated.pop(nomination.job_id, None)
            node.cpus -= sign * nomination.gang.layout.cpus_per_node
            node.memory_bytes -= sign * job.memory_bytes_per_node
            self._touch(node)
        if nomination.job_id not in self.runs or self.runs[nomination.job_id].is_stopping:
            self.team_gpus[job.team_id] += sign * num_gpus
            self.user_gpus[job.user_id] += sign * num_gpus
            self.team_nodes[job.team_id] += sign * num_whole

    # --- Nodes, teams, users ----------------------------------------------------------------------------------------

    def set_node(self, view: NodeView) -> None:
        """A node joined, or its facts changed."""
        assert self._journal is None, "nodes do not change within a what-if"
        old = self.nodes.get(view.id)
        if old is not None and old.view == view:
            return
        self._stamp += 1
        node = Node(view, len(self.nodes), self._stamp)
        self.nodes[view.id] = node
        self.largest_node = max(self.largest_node, node.size)
        if old is not None:
            node.order, node.stamp = old.order, old.stamp
        else:
            for order, known in enumerate(sorted(self.nodes.values(), key=lambda node: node.view.name)):
                known.order = order
        for run in self.runs.values():
            for node_id, mask in run.masks:
                if node_id == view.id:
                    node.held |= mask
                    if run.is_stopping:
                        node.freeing |= mask
                        node.leaving[run.id] = run
                    else:
                        node.runs[run.id] = run
                        self._give(node, run, -1)
        for nomination in self.nominations.values():
            for share in nomination.gang.shares:
                if share.node_id == view.id:
                    job = self._job_of(nomination.job_id)
                    node.promised |= self._mask_of(job, share)
                    node.nominated[nomination.job_id] = job.is_exclusive
                    node.cpus -= nomination.gang.layout.cpus_per_node
                    node.memory_bytes -= job.memory_bytes_per_node
        node.refresh()
        self.offers.changed(node.id)
        for index in self._indexes.values():
            index.add(node)
        self.version += 1
        if view.blocked_by is not None:
            self._drop_nominations_on(view.id)

    def remove_node(self, node_id: int) -> None:
        """A node has left the pool."""
        self._drop_nominations_on(node_id)
        if self.nodes.pop(node_id, None) is not None:
            self.offers.changed(node_id)
            for index in self._indexes.values():
                index.drop(node_id)
            self.version += 1

    def set_team(self, team: Team) -> None:
        """A team's quota or cap changed."""
        if self.teams.get(team.id) != team:
            self.teams[team.id] = team
            self._read_bounds()

    def set_user(self, user: User) -> None:
        """A user's cap changed."""
        if self.users.get(user.id) != user and (user.cap_gpus is not None or user.id in self.users):
            self.users[user.id] = user
            self._read_bounds()

    def index_for(self, shape: Shape) -> FreeIndex:
        """The nodes that jobs of this shape may use, by what is free; made when first asked for."""
        kind = kind_of(shape)
        index = self._indexes.get(kind)
        if index is None:
            index = self._indexes[kind] = FreeIndex(shape, self.nodes.values())
        return index

    def _read_bounds(self) -> None:
        self.users = {user.id: user for user in self.users.values() if user.cap_gpus is not None}
        self.has_quotas = any(
            team.quota_gpus is not None or team.quota_nodes is not None for team in self.teams.values()
        )
        self._capped_teams = {team.id for team in self.teams.values() if team.cap_gpus is not None}
        self.version += 1
        for entry in list(self.queue.entries.values()):
            turn = entry.turn
            self._dequeue(entry.id, is_ranked=True)
            self._enqueue(entry, turn)

    def _drop_nominations_on(self, node_id: int) -> None:
        for job_id, nomination in list(self.nominations.items()):
            if any(share.node_id == node_id for share in nomination.gang.shares):
                self.drop_nomination(job_id)

    # --- What was, and what would be --------------------------------------------------------------------------------

    def begin(self) -> None:
        """From now on every change is noted, to be undone."""
        assert self._journal is None, "one what-if at a time"
        self._journal = []

    def undo(self) -> None:
        """Take back all changes since `begin`, newest first."""
        journal, self._journal = self._journal or [], None
        for change in reversed(journal):
            change()
        for node_id, stamp in self._stamps.items():
            node = self.nodes[node_id]
            node.stamp = stamp
            for index in self._indexes.values():
                index.changed(node, is_undone=True)
        self._stamps.clear()

    def facts(self) -> Mapping[str, Any]:
        """All that it holds, in a form that compares equal for equal worlds however they came about."""
        return {
            "nodes": {
                node.id: (node.view, node.usable, node.held, node.freeing, node.promised, node.available,
                          round(node.cpus, 6), node.memory_bytes, frozenset(node.runs))
                for node in self.nodes.values()
            },
            "runs": {run.id: run.facts() for run in self.runs.values()},
            "waiting": {entry.id: (entry.job, entry.turn) for entry in self.queue.entries.values()},
            "held": dict(self.held),
            "nominations": dict(self.nominations),
            "team_gpus": {team: gpus for team, gpus in self.team_gpus.items() if gpus},
            "team_nodes": {team: nodes for team, nodes in self.team_nodes.items() if nodes},
            "user_gpus": {user: gpus for user, gpus in self.user_gpus.items() if gpus},
            "num_freeing": self.num_freeing,
        }  # fmt: skip

    def _note(self, undo: Callable[[], object]) -> None:
        if self._journal is not None:
            self._journal.append(undo)  # type: ignore[arg-type]  # what it returns does not matter

    # --- Small parts ------------------------------------------------------------------------------------------------

    def _job_of(self, job_id: int) -> WaitingJob:
        entry = self.nominated.get(job_id)
        return entry.job if entry is not None else self.runs[job_id].job

    def _mask_of(self, job: WaitingJob, share: NodeShare) -> int:
        node = self.nodes.get(share.node_id)
        if node is None:
            return 0
        mask = node.mask_of(share.gpu_indices)
        return node.usable | mask if job.is_exclusive else mask

    def _shares_of(self, run: Run) -> Sequence[tuple[Node, int]]:
        found = [(self.nodes[node_id], mask) for node_id, mask in run.masks if node_id in self.nodes]
        # Those left alone longest come first again when all of them change at once.
        return sorted(found, key=lambda pair: pair[0].stamp) if len(found) > 1 else found

    def _give(self, node: Node, run: Run, sign: int) -> None:
        node.cpus += sign * run.gang.layout.cpus_per_node
        node.memory_bytes += sign * run.job.memory_bytes_per_node

    def _hold(self, run: Run) -> None:
        for node, mask in self._shares_of(run):
            node.held |= mask
            node.runs[run.id] = run
            self._give(node, run, -1)
            self._touch(node)
        self._count(run, 1)

    def _forget_run(self, run: Run) -> None:
        del self.runs[run.id]
        for node, mask in self._shares_of(run):
            node.held &= ~mask
            if run.is_stopping:
                node.freeing &= ~mask
                del node.leaving[run.id]
            else:
                self._give(node, run, 1)
                del node.runs[run.id]
            self._touch(node)
        if run.is_stopping:
            self.num_freeing -= 1
        else:
            self._count(run, -1)

    def _restore_run(self, run: Run) -> None:
        self.runs[run.id] = run
        if not run.is_stopping:
            self._hold(run)
            return
        self.num_freeing += 1
        for node, mask in self._shares_of(run):
            node.held |= mask
            node.freeing |= mask
            node.leaving[run.id] = run
            self._touch(node)

    def _resume(self, run: Run) -> None:
        """Undo `begin_stop`."""
        run.is_stopping = False
        self.num_freeing -= 1
        self._count(run, 1)
        for node, mask in self._shares_of(run):
            node.freeing &= ~mask
            self._give(node, run, -1)
            node.runs[run.id] = node.leaving.pop(run.id)
            self._touch(node)

    def _count(self, run: Run, sign: int) -> None:
        job = run.job
        num_gpus, num_nodes = run.counted
        self.team_gpus[job.team_id] += sign * num_gpus
        self.user_gpus[job.user_id] += sign * num_gpus
        self.team_nodes[job.team_id] += sign * num_nodes

    def _believe(self, run: Run, measured: Measured | None) -> None:
        run.measured = measured
        self._reprice(run)

    def _learn_ratio(self, ended: EndedRatio) -> None:
        before = self.ratios.views_of(ended.user_id, ended.team_id)
        self.ratios.add(ended)
        after = self.ratios.views_of(ended.user_id, ended.team_id)
        self._note(lambda: self._forget_ratio(ended))
        of_user, of_team, of_all = (_Move.of(then, now) for then, now in zip(before, after, strict=True))
        if of_all.is_up:
            self.offers.forget()  # what was estimated to be short may be long now
        elif of_user.is_up or of_team.is_up:
            for run in self.runs.values():
                if _is_kin(run.job, ended):
                    self._reprice(run)
        if of_all.is_wide:
            self._rank_anew(list(self.queue.entries.values()))
        elif of_user.is_wide or of_team.is_wide:
            self._rank_anew([entry for entry in self.queue.entries.values() if _is_kin(entry.job, ended)])

    def _rank_anew(self, entries: Iterable[Entry]) -> None:
        """Else whoever came before the first jobs had ended would be behind all equal ones that come after."""
        for entry in entries:
            before, left = entry.left, left_of_waiting(entry.job, self.ratios)
            if left != before:
                self._dequeue(entry.id)
                entry.left = left
                self._note(lambda entry=entry, before=before: setattr(entry, "left", before))  # type: ignore[misc]
                self._enqueue(entry)

    def _forget_ratio(self, ended: EndedRatio) -> None:
        self.ratios.remove(ended)
        self.offers.forget()

    def _reprice(self, run: Run) -> None:
        for node_id, _ in run.masks:
            self.offers.changed(node_id)

    def _touch(self, node: Node) -> None:
        before = node.available
        node.refresh()
        self.offers.changed(node.id)
        self.version += 1
        if node.available != before:
            if self._journal is not None:
                self._stamps.setdefault(node.id, node.stamp)
            self._stamp += 1
            node.stamp = self._stamp
            for index in self._indexes.values():
                index.changed(node)


class _Move(NamedTuple):
    """What one more ended job did to estimates."""

    is_up: bool
    """Some are longer than before."""
    is_wide: bool
    """They moved while they rest on few jobs."""

    @classmethod
    def of(cls, before: RatioView, after: RatioView) -> _Move:
        is_up = after.silent > before.silent or after.reporting > before.reporting
        has_moved = (after.silent, after.reporting) != (before.silent, before.reporting)
        return cls(is_up, has_moved and after.is_unsteady)


def _is_kin(job: WaitingJob, ended: EndedRatio) -> bool:
    return job.user_id == ended.user_id or job.team_id == ended.team_id


def _is_held_back(job: WaitingJob, now: float) -> bool:
    return job.held_by is not None or (job.not_before is not None and job.not_before > now)
