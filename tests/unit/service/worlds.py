"""Small worlds for the tests of the scheduler, written short: nodes with free GPUs, jobs in a queue, jobs that run."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from service.domain.checkpoints import CheckpointHome
from service.domain.gang_layout import GangLayout, equal_shares
from service.scheduler.facts import (
    EndedRatio,
    GPUView,
    Measured,
    NodeShare,
    NodeView,
    Nomination,
    PlacedGang,
    RunningJob,
    Team,
    User,
    WaitingJob,
)
from service.scheduler.plan import Plan

GIB = 2**30
MINUTE, HOUR, DAY = 60.0, 3600.0, 86_400.0


def gpu(index: int, *, group: str | None = None, model: str = "A100", free: bool = True, memory: int = 80) -> GPUView:
    """One GPU; `memory` in GiB."""
    return GPUView(index=index, model=model, link_group=group, numa_node=None, is_free=free, memory_bytes=memory * GIB)


def node(number: int, free: int = 4, *, taken: int = 0, blocked: str | None = None, **more: Any) -> NodeView:
    """Node `node-<number>`: the first `taken` GPUs are held, `free` more are not. `groups`: a letter for each GPU."""
    groups: Sequence[str | None] = more.get("groups") or [None] * (taken + free)
    model, gpu_memory = more.get("model", "A100"), more.get("gpu_memory", 80)
    gpus = [
        gpu(index, group=group, model=model, free=index >= taken, memory=gpu_memory)
        for index, group in enumerate(groups)
    ]
    cpus, memory = more.get("cpus", 16.0), more.get("memory", 64 * GIB)
    return NodeView(
        id=number,
        name=f"node-{number}",
        blocked_by=blocked,
        gpus=tuple(gpus),
        cpus=cpus,
        memory_bytes=memory,
        free_cpus=more.get("free_cpus", cpus - taken),
        free_memory_bytes=more.get("free_memory", memory),
        shared_folder_id=more.get("shared"),
        labels=more.get("labels", {}),
        blocked_until=more.get("blocked_until"),
    )


def ended(ratios: Iterable[float], *, user: int = 0, team: int = 0) -> list[EndedRatio]:
    """Jobs of one user and team that ended, by their real time over their limit."""
    return [EndedRatio(ratio=ratio, user_id=user, team_id=team) for ratio in ratios]


def job(number: int, nodes: int = 1, gpus: int = 1, **more: Any) -> WaitingJob:
    """Job `number`, submitted at that time: `nodes` nodes with `gpus` GPUs each, or on any of `layouts`.

    `left`: what its last report said; `waits`: since when; `stops`: how often it was preempted.
    """
    return WaitingJob(
        id=number,
        user_id=more.get("user", 0),
        team_id=more.get("team", 0),
        priority=more.get("priority", 0),
        submitted_at=more.get("submitted_at", float(number)),
        layouts=tuple(
            GangLayout(
                num_nodes=num_nodes,
                gpus_per_node=share,
                processes_per_node=max(1, share),
                cpus_per_node=more.get("cpus", float(max(1, share))),
                needs_shared_folder=more.get("is_split", False) and num_nodes > 1,
                rest_gpus=more.get("rest", 0),
            )
            for num_nodes, share in more.get("layouts", [(nodes, gpus)])
        ),
        gpu_type=more.get("gpu_type"),
        memory_bytes_per_node=more.get("memory", 0),
        not_before=more.get("not_before"),
        home=more.get("home"),
        gpu_memory_bytes=more.get("gpu_memory"),
        labels=tuple(sorted(more.get("labels", {}).items())),
        is_exclusive=more.get("exclusive", False),
        limit_seconds=more.get("limit"),
        served_seconds=more.get("served", 0.0),
        wait_began_at=more.get("waits"),
        is_preemptible=more.get("preemptible", False),
        may_borrow=more.get("may_borrow", False),
        num_stops=more.get("stops", 0),
        will_report=more.get("reports", False),
        measured_left=more.get("left"),
        promoted_at=more.get("promoted"),
        held_by=more.get("held"),
    )


def elastic(number: int, least: int, most: int, **more: Any) -> WaitingJob:
    """Job `number`, which runs on `least` to `most` GPUs in any layout of equal shares."""
    return job(number, layouts=list(equal_shares(least, most, most, most)), **more)


def gang(text: str, layout: GangLayout | None = None) -> PlacedGang:
    """A gang by its GPUs: `1:0,1 2:0,1` is two GPUs on node 1 and two on node 2."""
    shares = []
    for part in text.split():
        number, _, indices = part.partition(":")
        shares.append(
            NodeShare(node_id=int(number), gpu_indices=tuple(int(index) for index in indices.split(",") if index))
        )
    if layout is None:
        layout = job(0, len(shares), len(shares[0].gpu_indices)).layouts[0]
    return PlacedGang(layout=layout, shares=tuple(shares))


def running(number: int, where: str, *, since: float = 0.0, **more: Any) -> RunningJob:
    """Job `number` on the GPUs of `where` (see `gang`) since then. `left_at`: (seconds left, when) of its last report.

    Without that and without a limit it has a day left. It can be stopped unless `preemptible=False`.
    """
    more = {"preemptible": True, **more}
    placed = gang(where)
    shares = placed.shares
    rest = len(shares[-1].gpu_indices) if len(shares[-1].gpu_indices) < len(shares[0].gpu_indices) else 0
    one = job(number, len(shares) - bool(rest), len(shares[0].gpu_indices), **{**more, "rest": rest})
    reported = more.get("left_at")
    return RunningJob(
        job=one,
        gang=PlacedGang(layout=one.layouts[0], shares=shares),
        started_at=since,
        is_stopping=more.get("stopping", False),
        restore_seconds=more.get("restore", 0.0),
        measured=None if reported is None else Measured(left_seconds=reported[0], at=reported[1]),
        checkpointed_at=more.get("checkpointed"),
    )


def team(number: int, **bounds: int) -> Team:
    """Team `number`, with `quota_gpus`, `quota_nodes` and `cap_gpus`."""
    return Team(id=number, name=f"team-{number}", **bounds)


def user(number: int, cap_gpus: int) -> User:
    """User `number`."""
    return User(id=number, cap_gpus=cap_gpus)


def nomination(job_id: int, where: str, *after: int) -> Nomination:
    """The GPUs of `where` are kept for the job until those of `after` have left."""
    return Nomination(job_id=job_id, gang=gang(where), after=frozenset(after))


def home(*numbers: int, shared: str | None = None) -> CheckpointHome:
    """A checkpoint that these nodes wrote: into a shared folder, or each for itself."""
    return CheckpointHome(shared_folder_id=shared, node_names=tuple(f"node-{number}" for number in numbers))


def told(plan: Plan) -> dict[int, str]:
    """A plan as text by job.

    `node-1:0,1 node-2:0`: it starts there; the same with ` after 7`: those GPUs are kept for it until job 7 has left;
    `stops for 2: reclaim`; or the code of the reason why it waits. A job that moves has two of these: `…; …`.
    """
    texts = {wait.job_id: [str(wait.reason.code)] for wait in plan.waits}
    for one in plan.nominations:
        texts[one.job_id] = [f"{_where(one.gang)} after {','.join(map(str, sorted(one.after)))}"]
    for stop in plan.stops:
        texts.setdefault(stop.job_id, []).insert(0, f"stops for {stop.for_job_id}: {stop.why}")
    for place in plan.places:
        texts[place.job_id] = [_where(place.gang)]
    return {job_id: "; ".join(parts) for job_id, parts in texts.items()}


def _where(placed: PlacedGang) -> str:
    return " ".join(f"node-{share.node_id}:{','.join(map(str, share.gpu_indices))}" for share in placed.shares)
