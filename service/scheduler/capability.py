"""What the pool could hold if it were idle, and why it could not hold a job: reasons that no turn would change. Pure.

Not for: what keeps a job from starting now (`why`).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from service.domain.gang_layout import easiest_by_share
from service.domain.reasons import Reason, ReasonCode
from service.scheduler.facts import WaitingJob
from service.scheduler.node import Node, has_labels, matching_mask
from service.scheduler.placement import together
from service.scheduler.queue import Lane
from service.scheduler.world import World

JOB: Final = "{job}"
"""Stands for the id of the job in a reason that is found once for all jobs of a lane."""
_IF_SHARED: Final = "several of them only if they see one shared folder, as its model is split over nodes"


def never_fits(world: World, lane: Lane) -> bool:
    """Whether no set of the pool's nodes could ever hold a job of the lane, even if all were idle."""
    return not _are_enough(list(world.nodes.values()), lane.entries[0][2].job)


def reason_of_pool(world: World, job: WaitingJob) -> Reason | None:
    """Why it could not start even if nothing else ran; None: it could."""
    nodes = list(world.nodes.values())
    if not nodes:
        return Reason(
            code=ReasonCode.NO_NODES,
            text="No node has joined the pool yet.",
            fix="Ask an admin to start an agent: gang node ls shows the nodes.",
        )
    if not _are_enough(nodes, job):
        able = [node for node in nodes if _could_hold(node, job, job.least.gpus_per_node, job.least.cpus_per_node)]
        return Reason(
            code=ReasonCode.NEVER_FITS,
            text=f"It needs {ask_of(job)}, but only {len(able)} of {len(nodes)} nodes could ever hold that"
            + (f", {_IF_SHARED}." if any(layout.needs_shared_folder for layout in job.layouts) else "."),
            fix="Cancel it and submit with less, or ask an admin to add nodes.",
        )
    shares = easiest_by_share(job.layouts)
    able = [
        node
        for node in nodes
        if any(_could_hold(node, job, layout.gpus_per_node, layout.cpus_per_node) for layout in shares)
    ]
    if job.home is not None and (pinned := _why_pinned(able, job)) is not None:
        return pinned
    able = [node for node in able if job.may_run_on(node.view)]
    if not _are_enough([node for node in able if node.view.blocked_by is None], job):
        blocked = _blocked(able)
        return Reason(
            code=ReasonCode.NODES_NOT_READY,
            text=f"It needs {ask_of(job)}: {blocked}.",
            fix="It starts when they are back: gang node ls.",
        )
    return None


def _why_pinned(able: Sequence[Node], job: WaitingJob) -> Reason | None:
    """Why its checkpoint keeps it from starting, when too few of the nodes that see it are there; None otherwise."""
    seeing = [node for node in able if job.may_run_on(node.view)]
    if job.home is None or _are_enough([node for node in seeing if node.view.blocked_by is None], job):
        return None
    away = _blocked(seeing)
    if job.home.shared_folder_id is not None:
        where = f"in a shared folder that {len(seeing)} of the nodes that could hold it see"
    else:
        where = f"on {', '.join(job.home.node_names)} alone"
        here = {node.view.name for node in seeing}
        gone = [name for name in job.home.node_names if name not in here]
        away = ", ".join([*([away] if away else []), *(f"{name} cannot hold it any more" for name in gone)])
    give_up = f"gang requeue {JOB} --from-start"
    return Reason(
        code=ReasonCode.PINNED,
        text=f"It needs {ask_of(job)}, and its last checkpoint lies {where}{f': {away}' if away else ''}.",
        fix=f"It resumes when they are back: gang node ls. To start it anywhere without its progress: {give_up}.",
    )


def _are_enough(nodes: Sequence[Node], job: WaitingJob) -> bool:
    """Whether these nodes, if they were idle, could hold the job in one of its layouts."""
    return any(
        sum(_could_hold(node, job, layout.gpus_per_node, layout.cpus_per_node) for node in group) >= layout.num_nodes
        for layout in easiest_by_share(job.layouts)
        for group in together(nodes, layout, lambda node: node.view)
    )


def _could_hold(node: Node, job: WaitingJob, num_gpus: int, cpus: float) -> bool:
    return (
        matching_mask(node.view, job.gpu_type, job.gpu_memory_bytes).bit_count() >= num_gpus
        and node.view.cpus >= cpus
        and node.view.memory_bytes >= job.memory_bytes_per_node
        and has_labels(node.view, job)
    )


def ask_of(job: WaitingJob) -> str:
    """What a job asks for: `4 A100 GPUs on 2 nodes`."""
    kind = f"{job.gpu_type} GPU" if job.gpu_type else "GPU"
    least, most = job.least, job.layouts[0]
    if least.num_gpus != most.num_gpus:
        return f"{least.num_gpus} to {most.num_gpus} {kind}s"
    gpus = f"{kind}{'' if most.num_gpus == 1 else 's'}"
    cpus = f"{most.cpus_per_node:g} CPU{'' if most.cpus_per_node == 1 else 's'}"
    asked = f"{most.num_gpus} {gpus}" if most.num_gpus else cpus
    return asked if most.num_nodes == 1 else f"{asked} on {most.num_nodes} nodes"


def _blocked(nodes: Sequence[Node]) -> str:
    return ", ".join(f"{node.view.name} is {node.view.blocked_by}" for node in _named(nodes) if node.view.blocked_by)


def _named(nodes: Sequence[Node]) -> list[Node]:
    return sorted(nodes, key=lambda node: node.view.name)
