"""Where this process stands among the ranks: its numbers, its device, and the process groups it talks over.

Model traffic (gradients) goes over the default group: NCCL on GPUs, gloo on CPUs. Everything that only coordinates
goes over gloo groups beside it, so that asking "shall we stop?" never touches a GPU stream. Every group has a timeout.
Not for: what a plan does with the ranks (`trainer.parallel`).
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True)
class Mesh:
    """A rank's place. The groups are None where there is nobody else to talk to."""

    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    num_nodes: int
    device: torch.device
    start_timeout_seconds: float = 600.0
    """Of model traffic until the first step is done."""
    control: dist.ProcessGroup | None = None
    """gloo, all ranks, used by the main thread only."""
    background: dist.ProcessGroup | None = None
    """gloo, all ranks, used by the thread that writes checkpoints only."""
    node_group: dist.ProcessGroup | None = None
    """gloo, the ranks of this node, used by the thread that writes checkpoints only."""

    @property
    def is_leader(self) -> bool:
        """Whether this is rank 0."""
        return self.rank == 0

    @property
    def is_node_leader(self) -> bool:
        """Whether this is local rank 0."""
        return self.local_rank == 0

    def sum(self, values: Sequence[float]) -> list[float]:
        """Element-wise sum over all ranks (float64). Every rank calls it with as many values. Blocks."""
        return self._reduce(values, dist.ReduceOp.SUM)

    def max(self, values: Sequence[float]) -> list[float]:
        """Element-wise maximum over all ranks (float64). Every rank calls it with as many values. Blocks."""
        return self._reduce(values, dist.ReduceOp.MAX)

    def gather(self, value: Any) -> list[Any]:
        """What every rank passes, by rank. For rare and small things: it pickles. Blocks."""
        if self.control is None:
            return [value]
        gathered: list[Any] = [None] * self.world_size
        dist.all_gather_object(gathered, value, group=self.control)
        return gathered

    def barrier(self) -> None:
        """Return once every rank has come here."""
        if self.control is not None:
            dist.barrier(group=self.control)

    def _reduce(self, values: Sequence[float], operation: Any) -> list[float]:
        if self.control is None:
            return list(values)
        tensor = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(tensor, op=operation, group=self.control)
        return list(tensor.tolist())


def join_mesh(environment: Mapping[str, str], *, start_timeout: float, timeout: float) -> Mesh:
    """Meet the other ranks, as the torchrun variables in `environment` say, and make the groups.

    `start_timeout`: seconds to wait for the others at the start; `timeout`: for each later collective. Raises
    `torch.distributed.DistError` and RuntimeError when a rank does not come, ValueError for wrong variables.
    """
    world_size = int(environment.get("WORLD_SIZE", "1"))
    rank, local_rank = int(environment.get("RANK", "0")), int(environment.get("LOCAL_RANK", "0"))
    local_world_size = int(environment.get("LOCAL_WORLD_SIZE", str(world_size)))
    if not 0 <= rank < world_size or not 0 <= local_rank < local_world_size:
        raise ValueError(f"RANK {rank} of WORLD_SIZE {world_size}, LOCAL_RANK {local_rank} of {local_world_size}")
    device = _device(local_rank)
    place = {
        "rank": rank,
        "local_rank": local_rank,
        "world_size": world_size,
        "local_world_size": local_world_size,
        "node_rank": int(environment.get("GROUP_RANK", str(rank // local_world_size))),
        "num_nodes": int(environment.get("GROUP_WORLD_SIZE", str(world_size // local_world_size))),
        "device": device,
        "start_timeout_seconds": start_timeout,
    }
    if world_size == 1:
        return Mesh(**place)  # type: ignore[arg-type]  # a dict of the fields above
    is_gpu = device.type == "cuda"
    dist.init_process_group(
        backend="nccl" if is_gpu else "gloo",
        init_method="env://",
        timeout=timedelta(seconds=start_timeout),
        device_id=device if is_gpu else None,
    )
    lasting = timedelta(seconds=timeout)
    everybody = list(range(world_size))
    groups = {
        "control": dist.new_group(everybody, backend="gloo", timeout=lasting),
        "background": dist.new_group(everybody, backend="gloo", timeout=lasting),
    }
    for first in range(0, world_size, local_world_size):
        members = everybody[first : first + local_world_size]
        if len(members) > 1:
            group = dist.new_group(members, backend="gloo", timeout=lasting)
            if rank in members:
                groups["node_group"] = group
    mesh = Mesh(**place, **groups)  # type: ignore[arg-type]  # a dict of the fields above
    mesh.barrier()
    return mesh


def tighten_timeout(mesh: Mesh, groups: Sequence[dist.ProcessGroup], hang_after_seconds: float) -> None:
    """After the first step, which may compile for minutes on one rank: let model traffic, over all ranks or `groups`,
    time out sooner. The watchdog of the supervisor comes first where there is one; this is for runs without."""
    if mesh.world_size > 1:
        for group in (None, *groups):
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=2 * hang_after_seconds), group)


def pinned_threads(environment: Mapping[str, str]) -> int | None:
    """Threads that torch is to use on a CPU: the number decides the bits of a sum, so it is pinned. None: as it is."""
    value = environment.get("OMP_NUM_THREADS", "")
    return int(value) if value.isdecimal() and int(value) > 0 else None


def _device(local_rank: int) -> torch.device:
    if torch.cuda.is_available() and os.environ.get("CUDA_VISIBLE_DEVICES") != "":
        device = torch.device("cuda", local_rank)
        torch.cuda.set_device(device)
        return device
    return torch.device("cpu")
