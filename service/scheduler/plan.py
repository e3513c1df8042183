"""`plan(world, now)`: what should happen now, as data. Pure: no clock, database or random.

First come, first served among those that fit: a gang starts whole or not at all, and holds nothing while it waits. One
that runs on several sizes gets the largest that fits when its turn comes. Each job that does not start gets a reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from service.domain.gang_layout import GangLayout, easiest_by_share
from service.domain.reasons import Reason, ReasonCode
from service.scheduler.placement import FreeNode, PlacedGang, matches, place_gang, together
from service.scheduler.world import NodeView, WaitingJob, World, queue_order

_JOB: Final = "{job}"
"""Stands for the id of the job in a reason that is found once for all jobs of a shape."""

_IF_SHARED: Final = "several of them only if they see one shared folder, as its model is split over nodes"


@dataclass(frozen=True, kw_only=True)
class Place:
    """Start this job with this gang."""

    job_id: int
    gang: PlacedGang


@dataclass(frozen=True, kw_only=True)
class Wait:
    """Leave this job waiting, for this reason."""

    job_id: int
    reason: Reason


@dataclass(frozen=True, kw_only=True)
class Plan:
    """All decisions of one pass; every waiting job is in exactly one of them."""

    places: tuple[Place, ...]
    waits: tuple[Wait, ...]


def plan(world: World, now: float) -> Plan:
    """Decide for every waiting job: `Place` or `Wait`. `now` is epoch seconds of the database clock."""
    free = [FreeNode.of(node) for node in world.nodes]
    places: list[Place] = []
    waits: list[Wait] = []
    # Free resources only shrink during a pass, so a shape that did not fit once does not fit later in the same pass.
    refused: dict[tuple[object, ...], Reason] = {}
    for job in queue_order(world.waiting):
        if job.not_before is not None and job.not_before > now:
            waits.append(Wait(job_id=job.id, reason=_back_off(job.not_before - now)))
            continue
        if job.shape not in refused:
            gang = place_gang(free, job)
            if gang is not None:
                places.append(Place(job_id=job.id, gang=gang))
                continue
            refused[job.shape] = _why_not(world, free, job, has_placed=bool(places))
        waits.append(Wait(job_id=job.id, reason=_for(job, refused[job.shape])))
    return Plan(places=tuple(places), waits=tuple(waits))


def _for(job: WaitingJob, reason: Reason) -> Reason:
    """A reason that holds for all jobs of a shape, with this one's id in its commands: never another job's."""
    return replace(reason, fix=reason.fix.replace(_JOB, str(job.id))) if _JOB in reason.fix else reason


def _back_off(seconds: float) -> Reason:
    return Reason(
        code=ReasonCode.BACK_OFF,
        text=f"Its last start failed by the pool's fault; it is tried again within {max(1, round(seconds))} s.",
        fix="Nothing to do.",
    )


def _why_not(world: World, free: list[FreeNode], job: WaitingJob, *, has_placed: bool) -> Reason:
    if not world.nodes:
        return Reason(
            code=ReasonCode.NO_NODES,
            text="No node has joined the pool yet.",
            fix="Ask an admin to start an agent: gang node ls shows the nodes.",
        )
    if not _are_enough(world.nodes, job):
        able = [node for node in world.nodes if _could_hold(node, job, job.least)]
        return Reason(
            code=ReasonCode.NEVER_FITS,
            text=f"It needs {_ask(job)}, but only {len(able)} of {len(world.nodes)} nodes could ever hold that"
            + (f", {_IF_SHARED}." if any(layout.needs_shared_folder for layout in job.layouts) else "."),
            fix="Cancel it and submit with less, or ask an admin to add nodes.",
        )
    shares = easiest_by_share(job.layouts)
    able = [node for node in world.nodes if any(_could_hold(node, job, layout) for layout in shares)]
    if job.home is not None and (pinned := _why_pinned(able, job)) is not None:
        return pinned
    able = [node for node in able if job.may_run_on(node)]
    if not _are_enough([node for node in able if node.blocked_by is None], job):
        blocked = ", ".join(f"{node.name} is {node.blocked_by}" for node in able if node.blocked_by)
        return Reason(
            code=ReasonCode.NODES_NOT_READY,
            text=f"It needs {_ask(job)}: {blocked}.",
            fix="It starts when they are back: gang node ls.",
        )
    num_free = sum(
        len(node.matching(job.gpu_type)) for node in free if node.view.blocked_by is None and job.may_run_on(node.view)
    )
    if has_placed and _fitted_before(world, job):
        return Reason(
            code=ReasonCode.BEHIND,
            text=f"It needs {_ask(job)}; jobs ahead of it in the queue take what is free.",
            fix="It starts when they end: gang why shows them.",
        )
    if num_free < job.least.num_gpus:
        return Reason(
            code=ReasonCode.NEEDS_GPUS,
            text=f"It needs {_ask(job)}, {num_free} {'is' if num_free == 1 else 'are'} free.",
            fix="It starts when enough are free; with fewer GPUs it may start sooner.",
        )
    return Reason(
        code=ReasonCode.NEEDS_NODES,
        text=f"It needs {_ask(job)}: {num_free} GPUs are free, but not enough together with CPUs and memory.",
        fix="It starts when whole shares are free; smaller parts per node may start sooner.",
    )


def _why_pinned(able: Sequence[NodeView], job: WaitingJob) -> Reason | None:
    """Why its checkpoint keeps it from starting, when too few of the nodes that see it are there; None otherwise."""
    seeing = [node for node in able if job.may_run_on(node)]
    if job.home is None or _are_enough([node for node in seeing if node.blocked_by is None], job):
        return None
    away = ", ".join(f"{node.name} is {node.blocked_by}" for node in seeing if node.blocked_by)
    if job.home.shared_folder_id is not None:
        where = f"in a shared folder that {len(seeing)} of the nodes that could hold it see"
    else:
        where = f"on {', '.join(job.home.node_names)} alone"
        here = {node.name for node in seeing}
        gone = [name for name in job.home.node_names if name not in here]
        away = ", ".join([*([away] if away else []), *(f"{name} cannot hold it any more" for name in gone)])
    give_up = f"gang requeue {_JOB} --from-start"
    return Reason(
        code=ReasonCode.PINNED,
        text=f"It needs {_ask(job)}, and its last checkpoint lies {where}{f': {away}' if away else ''}.",
        fix=f"It resumes when they are back: gang node ls. To start it anywhere without its progress: {give_up}.",
    )


def _ask(job: WaitingJob) -> str:
    kind = f"{job.gpu_type} GPU" if job.gpu_type else "GPU"
    least, most = job.least, job.layouts[0]
    if least.num_gpus != most.num_gpus:
        return f"{least.num_gpus} to {most.num_gpus} {kind}s"
    gpus = f"{kind}{'' if most.num_gpus == 1 else 's'}"
    asked = f"{most.num_gpus} {gpus}" if most.num_gpus else f"{most.cpus_per_node:g} CPUs"
    return asked if most.num_nodes == 1 else f"{asked} on {most.num_nodes} nodes"


def _are_enough(nodes: Sequence[NodeView], job: WaitingJob) -> bool:
    """Whether these nodes, if they were idle, could hold the job in one of its layouts."""
    return any(
        sum(_could_hold(node, job, layout) for node in group) >= layout.num_nodes
        for layout in easiest_by_share(job.layouts)
        for group in together(nodes, layout, lambda node: node)
    )


def _could_hold(node: NodeView, job: WaitingJob, layout: GangLayout) -> bool:
    return (
        sum(matches(gpu, job.gpu_type) for gpu in node.gpus) >= layout.gpus_per_node
        and node.cpus >= layout.cpus_per_node
        and node.memory_bytes >= job.memory_bytes_per_node
    )


def _fitted_before(world: World, job: WaitingJob) -> bool:
    return place_gang([FreeNode.of(node) for node in world.nodes], job) is not None
