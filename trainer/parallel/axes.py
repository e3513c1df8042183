"""Where a rank stands in a plan: its number on each axis, and the group of ranks it shares each axis with.

rank = ((pp_rank × dp_replicate + replica) × dp_shard + shard) × tp + tp_rank: ranks that split a layer are neighbours,
so they share a node; pipeline stages are furthest apart. Not for: meeting the other ranks (`trainer.mesh`).
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from functools import cache

import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from trainer.mesh import Mesh
from trainer.plan.parallel_plan import ParallelPlan

AXIS_NAMES = ("pp", "dp_replicate", "dp_shard", "tp")


@dataclass(frozen=True, kw_only=True)
class Axes:
    """A rank's coordinates. `device_mesh` is None where no axis but dp_replicate is in use: that is the whole world."""

    pp_rank: int = 0
    dp_rank: int = 0
    """Among the ranks (or groups of them) that get different samples."""
    tp_rank: int = 0
    pp: int = 1
    dp_replicate: int = 1
    dp_shard: int = 1
    tp: int = 1
    device_mesh: DeviceMesh | None = None
    """Four dimensions, named as `AXIS_NAMES`."""
    data_group: dist.ProcessGroup | None = None
    """Ranks that hold the same part of the model and get different samples; None: all ranks."""

    @property
    def data_parallel_size(self) -> int:
        """Ranks (or groups of ranks) that get different samples."""
        return self.dp_replicate * self.dp_shard

    @property
    def has_first_stage(self) -> bool:
        """Whether the model's input is used here."""
        return self.pp_rank == 0

    def group(self, axis: str) -> dist.ProcessGroup:
        """The ranks that differ from this one on `axis` alone."""
        assert self.device_mesh is not None, "only axes in use have a group"
        return self.device_mesh.get_group(axis)

    def submesh(self, *axes: str) -> DeviceMesh:
        """The device mesh of these axes through this rank."""
        assert self.device_mesh is not None, "only axes in use have a mesh"
        return self.device_mesh[axes if len(axes) > 1 else axes[0]]

    @property
    def groups(self) -> tuple[dist.ProcessGroup, ...]:
        """All groups that were made for the plan."""
        if self.device_mesh is None or self.data_group is None:
            return ()
        return (*(self.device_mesh.get_group(name) for name in AXIS_NAMES), self.data_group)

    def data_group_source(self) -> int:
        """Global rank of the first rank of `data_group`."""
        return 0 if self.data_group is None else dist.get_global_rank(self.data_group, 0)


def lay_out(plan: ParallelPlan, mesh: Mesh) -> Axes:
    """This rank's place under `plan`. All ranks call it; it makes process groups where axes other than data parallelism
    with whole copies are in use."""
    sizes = (plan.pp, plan.dp_replicate, plan.dp_shard, plan.tp)
    pp_rank, replica, shard, tp_rank = coordinates(mesh.rank, sizes)
    device_mesh: DeviceMesh | None = None
    data_group: dist.ProcessGroup | None = None
    if plan.pp * plan.dp_shard * plan.tp > 1:
        device_mesh, data_group = _make_groups(mesh.device.type, sizes, mesh.start_timeout_seconds)
    return Axes(
        pp_rank=pp_rank,
        dp_rank=replica * plan.dp_shard + shard,
        tp_rank=tp_rank,
        pp=plan.pp,
        dp_replicate=plan.dp_replicate,
        dp_shard=plan.dp_shard,
        tp=plan.tp,
        device_mesh=device_mesh,
        data_group=data_group,
    )


def coordinates(rank: int, sizes: tuple[int, ...]) -> tuple[int, ...]:
    """`rank` as a number on each axis, the last one changing fastest. Pure."""
    found: list[int] = []
    for size in reversed(sizes):
        rank, index = divmod(rank, size)
        found.append(index)
    return tuple(reversed(found))


@cache
def _make_groups(
    device_type: str, sizes: tuple[int, ...], timeout_seconds: float
) -> tuple[DeviceMesh, dist.ProcessGroup]:
    """Once per layout and process: every rank makes the same groups in the same order."""
    device_mesh = init_device_mesh(device_type, sizes, mesh_dim_names=AXIS_NAMES)
    data_group: dist.ProcessGroup = device_mesh["dp_replicate", "dp_shard"]._flatten("dp").get_group()
    for group in (*(device_mesh.get_group(name) for name in AXIS_NAMES), data_group):
        # A mesh's groups wait for as long as torch's default says, whatever the others wait for.
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=timeout_seconds), group)
    return device_mesh, data_group
