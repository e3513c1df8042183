"""Small worlds for the tests of the scheduler, written short: nodes with free GPUs, jobs in a queue."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from service.domain.checkpoints import CheckpointHome
from service.domain.gang_layout import GangLayout, equal_shares
from service.scheduler.plan import Plan
from service.scheduler.world import GPUView, NodeView, WaitingJob

GIB = 2**30


def gpu(index: int, *, group: str | None = None, model: str = "A100", free: bool = True) -> GPUView:
    """One GPU."""
    return GPUView(index=index, model=model, link_group=group, numa_node=None, is_free=free)


def node(number: int, free: int = 4, *, taken: int = 0, blocked: str | None = None, **more: Any) -> NodeView:
    """Node `node-<number>`: the first `taken` GPUs are held, `free` more are not. `groups`: a letter for each GPU."""
    groups: Sequence[str | None] = more.get("groups") or [None] * (taken + free)
    model = more.get("model", "A100")
    gpus = [gpu(index, group=group, model=model, free=index >= taken) for index, group in enumerate(groups)]
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
    )


def job(number: int, nodes: int = 1, gpus: int = 1, **more: Any) -> WaitingJob:
    """Job `number`, submitted at that time: `nodes` nodes with `gpus` GPUs each, or on any of `layouts`."""
    return WaitingJob(
        id=number,
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
            )
            for num_nodes, share in more.get("layouts", [(nodes, gpus)])
        ),
        gpu_type=more.get("gpu_type"),
        memory_bytes_per_node=more.get("memory", 0),
        not_before=more.get("not_before"),
        home=more.get("home"),
    )


def elastic(number: int, least: int, most: int, **more: Any) -> WaitingJob:
    """Job `number`, which runs on `least` to `most` GPUs in any layout of equal shares."""
    return job(number, layouts=list(equal_shares(least, most, most, most)), **more)


def home(*numbers: int, shared: str | None = None) -> CheckpointHome:
    """A checkpoint that these nodes wrote: into a shared folder, or each for itself."""
    return CheckpointHome(shared_folder_id=shared, node_names=tuple(f"node-{number}" for number in numbers))


def told(plan: Plan) -> dict[int, str]:
    """A plan as text by job: `node-1:0,1 node-2:0`, or the code of the reason why it waits."""
    placed = {
        place.job_id: " ".join(
            f"node-{share.node_id}:{','.join(map(str, share.gpu_indices))}" for share in place.gang.shares
        )
        for place in plan.places
    }
    return placed | {wait.job_id: str(wait.reason.code) for wait in plan.waits}
