"""The laws of the scheduler as checks of a scene and the plan for it, and scenes drawn from seeds.

A scene is a pool at a moment, as records. Each check raises AssertionError where its law is broken; it counts for
itself and asks the scheduler nothing. Not for: what happens through time (`test_pool_in_time`).
"""

from __future__ import annotations

import random
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Final

from service.domain.gang_layout import GangLayout, equal_shares
from service.scheduler.facts import (
    EndedRatio,
    NodeView,
    Nomination,
    PlacedGang,
    RunningJob,
    Team,
    User,
    WaitingJob,
)
from service.scheduler.plan import Plan, PolicyOptions, plan
from service.scheduler.world import World
from tests.unit.service.worlds import GIB, HOUR, gpu, home, job, running

NOW: Final = 10_000.0
WAYS: Final = [
    ("time-left", "all"),
    ("time-left", "reclaim_only"),
    ("time-left", "none"),
    ("fifo", "all"),
    ("fifo+easy", "all"),
]
"""Policies, each with a kind of preemption."""
Way = tuple[str, str]


@dataclass(frozen=True, kw_only=True)
class Scene:
    """A pool at a moment."""

    nodes: tuple[NodeView, ...]
    waiting: tuple[WaitingJob, ...]
    running: tuple[RunningJob, ...] = ()
    teams: tuple[Team, ...] = ()
    users: tuple[User, ...] = ()
    nominations: tuple[Nomination, ...] = ()
    ratios: tuple[EndedRatio, ...] = ()

    def world(self, **changed: Any) -> World:
        """The world of the scene."""
        scene = replace(self, **changed)
        return World(
            nodes=scene.nodes,
            waiting=scene.waiting,
            running=scene.running,
            teams=scene.teams,
            users=scene.users,
            nominations=scene.nominations,
            ratios=scene.ratios,
            now=NOW,
        )

    def plan(self, way: Way, **changed: Any) -> Plan:
        """What one pass decides."""
        return plan(self.world(**changed), NOW, way[0], PolicyOptions(preemption=way[1]))

    @property
    def jobs(self) -> Mapping[int, WaitingJob]:
        """All jobs, by id."""
        return {run.job.id: run.job for run in self.running} | {one.id: one for one in self.waiting}


def given_gangs(decided: Plan) -> Iterator[tuple[int, PlacedGang]]:
    """What jobs get, at once or as soon as it is free."""
    yield from ((one.job_id, one.gang) for one in decided.places)
    yield from ((one.job_id, one.gang) for one in decided.nominations)


def devices(placed: PlacedGang) -> set[tuple[int, int]]:
    """(node, GPU index) of a gang."""
    return {(share.node_id, index) for share in placed.shares for index in share.gpu_indices}


def shares_of(placed: PlacedGang) -> list[int]:
    """How many GPUs its layout takes of each node."""
    layout = placed.layout
    return [layout.gpus_per_node] * layout.num_nodes + ([layout.rest_gpus] if layout.rest_gpus else [])


# --- The laws of one pass --------------------------------------------------------------------------------------------


def no_gpu_is_held_twice(scene: Scene, decided: Plan) -> None:
    """What starts now is held by nobody; what is promised is held by those alone who were told to leave."""
    stopped = {stop.job_id for stop in decided.stops} | {run.job.id for run in scene.running if run.is_stopping}
    usable = {(node.id, one.index) for node in scene.nodes for one in node.gpus if one.is_free}
    holders = {device: run.job.id for run in scene.running for device in devices(run.gang)}
    for place in decided.places:
        assert not devices(place.gang) & holders.keys(), f"job {place.job_id} starts on GPUs that others hold"
    for one in decided.nominations:
        on_it = {holders[device] for device in devices(one.gang) & holders.keys()}
        assert on_it <= stopped, f"job {one.job_id} is promised GPUs of {on_it - stopped}, which stay"
        assert on_it <= one.after, f"job {one.job_id} would not wait for {on_it - one.after}"
    counts = Counter(device for _, placed in given_gangs(decided) for device in devices(placed))
    assert all(count == 1 for count in counts.values()), "a GPU is given twice"
    assert counts.keys() <= usable, "a GPU is given that is not free"


def gangs_are_all_or_nothing(scene: Scene, decided: Plan) -> None:
    """All that a layout of the job asks for, on different nodes that may take work."""
    nodes = {node.id: node for node in scene.nodes}
    for job_id, placed in given_gangs(decided):
        assert placed.layout in scene.jobs[job_id].layouts
        assert len({share.node_id for share in placed.shares}) == len(placed.shares)
        assert sorted(len(set(share.gpu_indices)) for share in placed.shares) == sorted(shares_of(placed))
        assert all(nodes[share.node_id].blocked_by is None for share in placed.shares)


def a_job_gets_what_it_asks_for(scene: Scene, decided: Plan) -> None:
    """GPUs of its type and memory, nodes with its labels and its checkpoint; a split model nodes with one folder."""
    nodes = {node.id: node for node in scene.nodes}
    for job_id, placed in given_gangs(decided):
        asked = scene.jobs[job_id]
        on = [nodes[share.node_id] for share in placed.shares]
        assert all(asked.may_run_on(node) for node in on), f"job {job_id} does not find its checkpoint"
        assert all(node.labels.get(name) == value for node in on for name, value in asked.labels)
        if placed.layout.needs_shared_folder:
            folders = {node.shared_folder_id for node in on}
            assert len(folders) == 1 and None not in folders, f"the nodes of job {job_id} see {folders}"
        chosen = devices(placed)
        for one in (one for node in on for one in node.gpus if (node.id, one.index) in chosen):
            assert asked.gpu_type in (None, one.model)
            assert one.memory_bytes >= (asked.gpu_memory_bytes or 0)


def no_node_gives_more_than_it_has(scene: Scene, decided: Plan) -> None:
    """CPUs and memory, now (with those who are still leaving) and once all who were told to leave have left."""
    stopped = {stop.job_id for stop in decided.stops} | {run.job.id for run in scene.running if run.is_stopping}
    stay = [(run.job, run.gang) for run in scene.running if run.job.id not in stopped]
    leave = [(run.job, run.gang) for run in scene.running if run.job.id in stopped]
    places = [(scene.jobs[one.job_id], one.gang) for one in decided.places]
    renewed = {one.job_id for one in decided.nominations} | {one.job_id for one in decided.places}
    promised = [(scene.jobs[one.job_id], one.gang) for one in decided.nominations]
    promised += [(scene.jobs[one.job_id], one.gang) for one in scene.nominations if one.job_id not in renewed]
    blocked = {node.id for node in scene.nodes if node.blocked_by is not None}
    for moment, gangs in (("now", stay + leave + places), ("then", stay + places + promised)):
        cpus: defaultdict[int, float] = defaultdict(float)
        memory: defaultdict[int, int] = defaultdict(int)
        for one, placed in gangs:
            for share in placed.shares:
                cpus[share.node_id] += placed.layout.cpus_per_node
                memory[share.node_id] += one.memory_bytes_per_node
        for node in scene.nodes:
            if node.id not in blocked:
                assert cpus[node.id] <= node.free_cpus + 1e-9, f"CPUs of {node.name} {moment}"
                assert memory[node.id] <= node.free_memory_bytes, f"memory of {node.name} {moment}"


def an_exclusive_job_is_alone_on_its_nodes(scene: Scene, decided: Plan) -> None:
    """From its start on, and so is what it was promised."""
    started = {one.job_id for one in decided.places}
    on: defaultdict[int, set[int]] = defaultdict(set)
    for run in scene.running:
        for share in run.gang.shares:
            on[share.node_id].add(run.job.id)
    for place in decided.places:
        for share in place.gang.shares:
            on[share.node_id].add(place.job_id)
    for node_id, job_ids in on.items():
        alone = {job_id for job_id in job_ids if scene.jobs[job_id].is_exclusive}
        assert not alone or len(job_ids) == 1 or not job_ids & started, f"{job_ids} on node {node_id}, {alone} alone"


def every_waiting_job_is_decided_on_once_and_told_why(scene: Scene, decided: Plan) -> None:
    """It starts, or it waits and there is a sentence and a next step."""
    listed = [place.job_id for place in decided.places] + [wait.job_id for wait in decided.waits]
    assert Counter(listed) == Counter(one.id for one in scene.waiting)
    for wait in decided.waits:
        assert wait.reason.text.endswith("."), wait.reason
        assert wait.reason.fix.endswith("."), wait.reason
        assert "{" not in wait.reason.text + wait.reason.fix


def nothing_starts_that_is_held_back(scene: Scene, decided: Plan) -> None:
    """Held by somebody, or backing off."""
    resting = {
        one.id
        for one in scene.waiting
        if one.held_by is not None or (one.not_before is not None and one.not_before > NOW)
    }
    assert not resting & {job_id for job_id, _ in given_gangs(decided)}


def caps_are_never_exceeded(scene: Scene, decided: Plan) -> None:
    """Whoever gets GPUs holds no more than the cap, with all that is promised and without what is being freed."""
    takers = [
        scene.jobs[job_id]
        for job_id, placed in given_gangs(decided)
        if _size_on_nodes(scene, scene.jobs[job_id], placed)
    ]
    for team_id, count in _used(scene, decided, "team_id").items():
        cap = next((team.cap_gpus for team in scene.teams if team.id == team_id), None)
        if cap is not None and any(one.team_id == team_id for one in takers):
            assert count <= cap, f"team {team_id} holds {count} of at most {cap}"
    for user_id, count in _used(scene, decided, "user_id").items():
        cap = next((user.cap_gpus for user in scene.users if user.id == user_id), None)
        if cap is not None and any(one.user_id == user_id for one in takers):
            assert count <= cap, f"user {user_id} holds {count} of at most {cap}"


def only_jobs_that_can_be_stopped_borrow(scene: Scene, decided: Plan) -> None:
    """A team that gives GPUs to a job which cannot be stopped has that and all others such within its quota."""
    if not _has_quotas(scene):
        return
    quotas = {team.id: team for team in scene.teams}
    held: Counter[int] = Counter()
    for run in scene.running:
        if not run.is_stopping and not run.job.is_preemptible:
            held[run.job.team_id] += _size_on_nodes(scene, run.job, run.gang)
    for job_id, placed in given_gangs(decided):
        one = scene.jobs[job_id]
        team = quotas.get(one.team_id)
        if one.is_preemptible or not placed.layout.num_gpus or (team is not None and team.quota_nodes is not None):
            continue
        held[one.team_id] += _size_on_nodes(scene, one, placed)
        quota = 0 if team is None else team.quota_gpus or 0
        assert held[one.team_id] <= quota, f"job {job_id} borrows for team {one.team_id}: {held[one.team_id]}, {quota}"


def only_a_team_that_borrows_loses_jobs_to_others(scene: Scene, decided: Plan) -> None:
    """Jobs that are stopped for other teams' can be stopped one by one so that theirs holds more than its quota."""
    if not _has_quotas(scene):
        return
    quotas = {team.id: team for team in scene.teams}
    runs = {run.job.id: run for run in scene.running}
    held: Counter[int] = Counter()
    for run in scene.running:
        held[run.job.team_id] += 0 if run.is_stopping else _size_on_nodes(scene, run.job, run.gang)
    for one in scene.nominations:
        held[scene.jobs[one.job_id].team_id] += _size_on_nodes(scene, scene.jobs[one.job_id], one.gang)
    for job_id, placed in given_gangs(decided):
        held[scene.jobs[job_id].team_id] += _size_on_nodes(scene, scene.jobs[job_id], placed)
    lost: defaultdict[int, list[int]] = defaultdict(list)
    for stop in (stop for stop in decided.stops if stop.job_id in runs):
        run = runs[stop.job_id]
        if stop.why != "move" and scene.jobs[stop.for_job_id].team_id != run.job.team_id:
            lost[run.job.team_id].append(_size_on_nodes(scene, run.job, run.gang))
    for team_id, sizes in lost.items():
        team = quotas.get(team_id)
        if team is None or team.quota_nodes is None:
            quota = 0 if team is None else team.quota_gpus or 0
            before = held[team_id] - sum(sizes) + max(sizes)
            assert before > quota, f"team {team_id} holds {before} of {quota} and loses a job to another"


def _has_quotas(scene: Scene) -> bool:
    return any(team.quota_gpus is not None or team.quota_nodes is not None for team in scene.teams)


def a_nomination_is_never_stolen(scene: Scene, decided: Plan) -> None:
    """What is promised to one job is given to no other, while the promise stands."""
    blocked = {node.id for node in scene.nodes if node.blocked_by is not None}
    for one in scene.nominations:
        if any(share.node_id in blocked for share in one.gang.shares):
            continue  # dropped
        for job_id, placed in given_gangs(decided):
            assert job_id == one.job_id or not devices(placed) & devices(one.gang), f"{job_id} takes from {one.job_id}"
            if job_id == one.job_id:
                assert placed == one.gang, f"job {job_id} gets other GPUs than were kept for it"


def a_pass_does_not_take_back_what_it_gave(scene: Scene, decided: Plan) -> None:
    """Stopped are only jobs that ran before it, each once; no job gets two places."""
    assert {stop.job_id for stop in decided.stops} <= {run.job.id for run in scene.running}
    assert max(Counter(stop.job_id for stop in decided.stops).values(), default=1) == 1
    assert max(Counter(job_id for job_id, _ in given_gangs(decided)).values(), default=1) == 1


def only_jobs_that_can_be_stopped_are(scene: Scene, decided: Plan) -> None:
    """They resume, were stopped fewer than 15 times, are not promoted, and are past their protected run.

    To reclaim, it is enough that they resume.
    """
    runs = {run.job.id: run for run in scene.running}
    for stop in (stop for stop in decided.stops if stop.job_id in runs):
        run = runs[stop.job_id]
        assert run.job.is_preemptible and not run.is_stopping
        if stop.why == "reclaim":
            continue
        assert run.job.num_stops < 15 and run.job.promoted_at is None
        protected = min(12 * HOUR, 600.0 * 2**run.job.num_stops)
        assert run.started_at + protected <= NOW, f"job {stop.job_id} is protected"


def stops_are_of_the_kind_that_the_pool_allows(scene: Scene, decided: Plan, way: Way) -> None:
    """`none`: nothing is stopped; `reclaim_only`: to reclaim; nobody is stopped for nothing."""
    kinds = {stop.why for stop in decided.stops}
    if way[1] == "none":
        assert not kinds
    if way[1] == "reclaim_only":
        assert kinds <= {"reclaim"}
    gets = {job_id for job_id, _ in given_gangs(decided)}
    assert {stop.for_job_id for stop in decided.stops} <= gets, "something is stopped for a job that gets nothing"


def no_fitting_gpu_stays_free_beside_an_eligible_job(scene: Scene, decided: Plan) -> None:
    """Whoever still waits fits nowhere in what is left, unless that is kept for a promoted job."""
    left = _Left(scene, decided)
    if any(scene.jobs[wait.job_id].promoted_at is not None for wait in decided.waits):
        return  # what a promoted job needs may be kept for it
    for wait in decided.waits:
        one = scene.jobs[wait.job_id]
        if left.may_start(one):
            assert not any(left.fits(one, layout) for layout in one.layouts), f"job {one.id} fits: {wait.reason.text}"


LAWS: Final = {
    check.__name__: check
    for check in (
        no_gpu_is_held_twice,
        gangs_are_all_or_nothing,
        a_job_gets_what_it_asks_for,
        no_node_gives_more_than_it_has,
        an_exclusive_job_is_alone_on_its_nodes,
        every_waiting_job_is_decided_on_once_and_told_why,
        nothing_starts_that_is_held_back,
        caps_are_never_exceeded,
        only_jobs_that_can_be_stopped_borrow,
        only_a_team_that_borrows_loses_jobs_to_others,
        a_nomination_is_never_stolen,
        a_pass_does_not_take_back_what_it_gave,
        only_jobs_that_can_be_stopped_are,
    )
}
"""Those that hold under every policy."""


def _size_on_nodes(scene: Scene, one: WaitingJob, placed: PlacedGang) -> int:
    """GPUs that it takes from others: all of its nodes for an exclusive job."""
    if not one.is_exclusive:
        return placed.layout.num_gpus
    nodes = {node.id: node for node in scene.nodes}
    return sum(sum(gpu.is_free for gpu in nodes[share.node_id].gpus) for share in placed.shares)


def _used(scene: Scene, decided: Plan, of: str) -> Counter[int]:
    """GPUs held or promised after the plan, without those that are being freed, by team or user."""
    stopped = {stop.job_id for stop in decided.stops} | {run.job.id for run in scene.running if run.is_stopping}
    used: Counter[int] = Counter()
    gangs = [(run.job.id, run.gang) for run in scene.running if run.job.id not in stopped]
    given = dict(given_gangs(decided))
    gangs += list(given.items())
    blocked = {node.id for node in scene.nodes if node.blocked_by is not None}
    gangs += [
        (one.job_id, one.gang)
        for one in scene.nominations
        if one.job_id not in given and not any(share.node_id in blocked for share in one.gang.shares)
    ]
    for job_id, placed in gangs:
        one = scene.jobs[job_id]
        used[getattr(one, of)] += _size_on_nodes(scene, one, placed)
    return used


class _Left:
    """What is left of a pool once a plan is carried out, counted anew."""

    def __init__(self, scene: Scene, decided: Plan):
        self.scene, self.decided = scene, decided
        self.nodes = {node.id: node for node in scene.nodes if node.blocked_by is None}
        self.free = {node.id: {one.index for one in node.gpus if one.is_free} for node in self.nodes.values()}
        self.cpus = {node.id: node.free_cpus for node in self.nodes.values()}
        self.memory = {node.id: node.free_memory_bytes for node in self.nodes.values()}
        self.used_by: defaultdict[int, set[int]] = defaultdict(set)
        gangs = [(run.job.id, run.gang) for run in scene.running] + list(given_gangs(decided))
        gangs += [(one.job_id, one.gang) for one in scene.nominations]
        for job_id, placed in gangs:
            one = scene.jobs[job_id]
            for share in placed.shares:
                if share.node_id in self.nodes:
                    self.free[share.node_id] -= set(share.gpu_indices)
                    self.cpus[share.node_id] -= placed.layout.cpus_per_node
                    self.memory[share.node_id] -= one.memory_bytes_per_node
                    self.used_by[share.node_id].add(job_id)
        self.promised = {one.job_id for one in scene.nominations} | {one.job_id for one in decided.nominations}
        self.used = {of: _used(scene, decided, of) for of in ("team_id", "user_id")}

    def may_start(self, one: WaitingJob) -> bool:
        """Whether nobody and no bound holds it back."""
        if one.held_by is not None or one.id in self.promised or (one.not_before or 0.0) > NOW:
            return False
        return not self.scene.teams and not self.scene.users  # quotas and caps: judged by their own laws

    def fits(self, one: WaitingJob, layout: GangLayout) -> bool:
        """Whether the job could start on what nobody holds and nobody was promised."""
        able = [node for node in self.nodes.values() if self._could_take(one, layout, node)]
        groups: list[list[NodeView]] = [able]
        if layout.needs_shared_folder:
            folders = {node.shared_folder_id for node in able} - {None}
            groups = [[node for node in able if node.shared_folder_id == folder] for folder in folders]
        return any(len(group) >= layout.num_nodes for group in groups)

    def _could_take(self, one: WaitingJob, layout: GangLayout, node: NodeView) -> bool:
        matching = {
            device.index
            for device in node.gpus
            if one.gpu_type in (None, device.model) and device.memory_bytes >= (one.gpu_memory_bytes or 0)
        }
        others = self.used_by[node.id]
        return (
            len(self.free[node.id] & matching) >= layout.gpus_per_node
            and self.cpus[node.id] >= layout.cpus_per_node
            and self.memory[node.id] >= one.memory_bytes_per_node
            and one.may_run_on(node)
            and all(node.labels.get(name) == value for name, value in one.labels)
            and not (one.is_exclusive and others)
            and not any(self.scene.jobs[job_id].is_exclusive for job_id in others)
        )


# --- Scenes ----------------------------------------------------------------------------------------------------------


def free_scene(seed: int) -> Scene:
    """A pool of up to six nodes where nothing of ours runs yet, and a queue of up to eight jobs of any shape."""
    drawn = random.Random(seed)
    nodes = tuple(rough_node(drawn, number) for number in range(1, drawn.randint(0, 6) + 1))
    return Scene(nodes=nodes, waiting=tuple(_rough_job(drawn, number) for number in range(1, drawn.randint(0, 8) + 1)))


def rough_node(drawn: random.Random, number: int) -> NodeView:
    """A node with up to 8 GPUs in groups, a few of them held, perhaps some of its CPUs and memory too."""
    gpus = tuple(
        gpu(
            index,
            group=drawn.choice("ab"),
            free=drawn.random() < 0.75,
            model=drawn.choice(["A100", "A100", "H100"]),
            memory=drawn.choice([40, 80]),
        )
        for index in range(drawn.randint(0, 8))
    )
    cpus, memory = drawn.choice([4.0, 16.0, 64.0]), drawn.choice([8, 64]) * GIB
    return NodeView(
        id=number,
        name=f"node-{number}",
        blocked_by=drawn.choice([None, None, None, "unreachable"]),
        gpus=gpus,
        cpus=cpus,
        memory_bytes=memory,
        free_cpus=cpus * drawn.choice([1.0, 1.0, 0.5, 0.0]),
        free_memory_bytes=memory // drawn.choice([1, 1, 2]),
        shared_folder_id=drawn.choice([None, "nfs", "lustre"]),
        labels=drawn.choice([{}, {}, {"switch": "a"}, {"switch": "b", "zone": "x"}]),
    )


def _rough_job(drawn: random.Random, number: int) -> WaitingJob:
    """A job of any shape, or of a range of sizes; some back off, some share their moment of submission."""
    only = (drawn.choice([1, 1, 1, 2, 3]), drawn.choice([0, 1, 1, 2, 4, 8]))
    bounds = drawn.choice([None, None, None, (1, 4), (2, 6), (2, 16), (5, 7)])
    return job(
        number,
        layouts=[only] if bounds is None else list(equal_shares(*bounds, 8, 6)),
        is_split=drawn.random() < 0.3,
        priority=drawn.choice([0, 0, 0, 1, -1, 101]),
        submitted_at=NOW - drawn.choice([0, 60, 400, 5_000]),
        gpu_type=drawn.choice([None, None, "A100", "H100"]),
        gpu_memory=drawn.choice([None, None, None, 60 * GIB]),
        cpus=drawn.choice([1.0, 1.0, 3.0, 6.0]),
        memory=drawn.choice([0, 0, 4, 16]) * GIB,
        not_before=drawn.choice([None, None, None, NOW - 1, NOW + 1]),
        home=drawn.choice([None] * 4 + [home(1), home(1, 2), home(2, 3, shared="nfs"), home(1, shared="gone")]),
        labels=drawn.choice([{}, {}, {}, {"zone": "x"}]),
        exclusive=drawn.random() < 0.2,
        limit=drawn.choice([None, 60.0, 600.0, HOUR, 50 * HOUR]),
        left=drawn.choice([None, None, 60.0, 900.0, 9_000.0]),
        promoted=drawn.choice([None, None, None, NOW - 1]),
        preemptible=drawn.random() < 0.5,
        stops=drawn.choice([0, 1, 15]),
        team=drawn.randint(1, 3),
        user=drawn.randint(1, 2),
    )


def busy_scene(seed: int, *, with_bounds: bool = False) -> Scene:
    """A pool that was filled by passes over other jobs: some of those are stopping, some GPUs are promised."""
    drawn = random.Random(seed)
    nodes = tuple(_drawn_node(drawn, number) for number in range(1, drawn.randint(1, 5) + 1))
    scene = Scene(nodes=nodes, waiting=tuple(_drawn_job(drawn, number) for number in range(101, 101 + 9)))
    runs = []
    for place in scene.plan(("time-left", "none")).places:
        one = scene.jobs[place.job_id]
        ago = drawn.choice([60.0, 700.0, 5_000.0])
        runs.append(
            RunningJob(
                job=one,
                gang=place.gang,
                started_at=NOW - ago,
                measured=running(1, "1:0", left_at=(drawn.choice([60.0, 900.0, 9_000.0, 1e6]), NOW)).measured
                if drawn.random() < 0.7
                else None,
                checkpointed_at=drawn.choice([None, NOW - 30.0]),
            )
        )
    waiting = tuple(_drawn_job(drawn, number) for number in range(1, drawn.randint(1, 8) + 1))
    teams: tuple[Team, ...] = ()
    users: tuple[User, ...] = ()
    if with_bounds:
        teams = tuple(
            Team(
                id=number,
                name=f"team-{number}",
                quota_gpus=drawn.choice([None, 0, 2, 4, 8]),
                quota_nodes=drawn.choice([None, None, None, 1]),
                cap_gpus=drawn.choice([None, None, 4, 8]),
            )
            for number in (1, 2, 3)
        )
        users = (User(id=1, cap_gpus=drawn.choice([None, 4])),)
    busy = Scene(nodes=nodes, waiting=waiting, running=tuple(runs), teams=teams, users=users)
    if drawn.random() < 0.5:
        return busy
    return _a_pass_later(busy, drawn)


def _a_pass_later(scene: Scene, drawn: random.Random) -> Scene:
    """Its plan carried out: what starts runs, what is told to leave is leaving, promises stand; more jobs arrive."""
    decided = scene.plan(("time-left", "all"))
    stopped = {stop.job_id for stop in decided.stops}
    runs = [replace(run, is_stopping=run.job.id in stopped) for run in scene.running]
    runs += [RunningJob(job=scene.jobs[one.job_id], gang=one.gang, started_at=NOW) for one in decided.places]
    started = {one.job_id for one in decided.places}
    waiting = [one for one in scene.waiting if one.id not in started]
    waiting += [_drawn_job(drawn, number) for number in range(11, 14)]
    promised = tuple(Nomination(job_id=one.job_id, gang=one.gang, after=one.after) for one in decided.nominations)
    return replace(scene, running=tuple(runs), waiting=tuple(waiting), nominations=promised)


def _drawn_node(drawn: random.Random, number: int) -> NodeView:
    size = drawn.choice([2, 4, 4, 8])
    models = drawn.choice([["A100"], ["A100"], ["A100", "H100"]])
    return NodeView(
        id=number,
        name=f"node-{number}",
        blocked_by=drawn.choice([None] * 6 + ["unreachable"]),
        gpus=tuple(gpu(index, model=models[index % len(models)]) for index in range(size)),
        cpus=float(drawn.choice([8, 16, 64])),
        memory_bytes=64 * GIB,
        free_cpus=8.0,
        free_memory_bytes=64 * GIB,
        shared_folder_id=drawn.choice([None, "nfs", "nfs", "lustre"]),
        labels=drawn.choice([{}, {"switch": "a"}, {"zone": "x"}]),
    )


def _drawn_job(drawn: random.Random, number: int) -> WaitingJob:
    size = drawn.choice([0, 1, 1, 1, 2, 2, 4, 8])
    count = drawn.choice([1, 1, 1, 1, 2, 2, 3])
    bounds = drawn.choice([None] * 5 + [(1, 4), (2, 8)])
    return job(
        number,
        layouts=[(count, size)] if bounds is None else list(equal_shares(*bounds, 8, 4)),
        is_split=drawn.random() < 0.3,
        priority=drawn.choice([0, 0, 0, 0, 1, 101]),
        submitted_at=NOW - drawn.choice([0, 60, 400, 5_000]),
        gpu_type=drawn.choice([None, None, None, "A100"]),
        cpus=float(drawn.choice([1, 1, 3])),
        memory=drawn.choice([0, 0, 4, 40]) * GIB,
        home=drawn.choice([None] * 6 + [home(1), home(1, 2, shared="nfs")]),
        exclusive=drawn.random() < 0.1,
        limit=drawn.choice([None, 60.0, 600.0, HOUR, 50 * HOUR]),
        left=drawn.choice([None, 60.0, 60.0, 900.0, 9_000.0]),
        promoted=drawn.choice([None] * 5 + [NOW - 1]),
        preemptible=drawn.random() < 0.8,
        stops=drawn.choice([0, 0, 1, 15]),
        team=drawn.randint(1, 3),
        user=drawn.randint(1, 2),
    )
